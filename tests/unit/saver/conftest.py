"""Jobs of a spool whose saves a saver commits."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.job import Job
from tests.support.savers import end_savers
from trinity_sync import CheckpointCoordinator, Settings

Make = Callable[..., CheckpointCoordinator]
Saves = CheckpointCoordinator


@pytest.fixture
def settings(spool_folder: Path, tmp_path: Path) -> Iterator[Settings]:
    yield Settings(spool=spool_folder, home=tmp_path / "home", saver="auto")
    end_savers(spool_folder)


@pytest.fixture
def coordinator(job: Job, settings: Settings) -> Iterator[Make]:
    made = []

    def make(**others: object) -> CheckpointCoordinator:
        made.append(CheckpointCoordinator(job.root, settings=settings, **others))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close(timeout=0)


@pytest.fixture
def saves(coordinator: Make) -> Saves:
    return coordinator()
