"""What a Lightning trainer has besides its model: averaged weights, loaders' workers, other roots.

In a process of its own, as in `test_lightning`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.ranks import own_process


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., Any]]:
    with own_process("lightning_hosts") as call:
        yield call


def test_killed_trainings_with_averaged_weights_resume_as_from_a_model_checkpoint(
    call: Callable[..., Any], tmp_path: Path, spool_folder: Path
) -> None:
    call("resume_averaged_weights_after_a_kill", tmp_path, spool_folder)


@pytest.mark.parametrize("ends", ["max_steps", "a stop", "an epoch's end"])
@pytest.mark.parametrize("averaging", ["none", "ema", "swa", "swa with batch norm"])
def test_an_ended_training_resumes_bit_equal_whatever_averages_its_weights(
    call: Callable[..., Any], tmp_path: Path, spool_folder: Path, averaging: str, ends: str
) -> None:
    call("resume_what_has_ended", tmp_path, spool_folder, averaging, ends)


def test_a_path_loads_a_step_of_another_root_and_no_path_the_last_step(
    call: Callable[..., Any], tmp_path: Path, spool_folder: Path
) -> None:
    call("load_by_a_path_and_without_one", tmp_path, spool_folder)


def test_spawned_workers_and_copies_of_a_trainer_do_without_the_callbacks_methods(
    call: Callable[..., Any], tmp_path: Path, spool_folder: Path
) -> None:
    call("train_with_spawned_workers", tmp_path, spool_folder)
