"""Verify committed steps: choose files, read them, mark corrupted steps; or load the newest."""

import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_sync.errors import TrinitySyncError
from trinity_sync.orchestration.job_registry import select_roots
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.storage import verify
from trinity_sync.storage.verify import CheckedFile, ChosenFile

if TYPE_CHECKING:
    from trinity_sync.storage.verify_load import LoadedCheckpoint


def choose_files(
    root: str | None, step: int | None, newest: int, sample_percent: float, seed: int | None
) -> list[ChosenFile]:
    """Choose the files to read, of one job or for None of all known jobs.

    These are all files of ``step`` and of the ``newest`` steps of each job, and a sample of about
    ``sample_percent`` of the bytes of all steps. ``seed`` selects the sample; None is the number of
    the day.
    """
    roots = select_roots(root, Settings())
    return [
        file
        for each in roots
        for file in verify.choose_files(
            each,
            step=step,
            newest=newest,
            sample=sample_percent / 100,
            seed=date.today().toordinal() if seed is None else seed,
        )
    ]


def read_files(files: Sequence[ChosenFile]) -> list[CheckedFile]:
    """Read files and compare their digests with the manifests."""
    return verify.check_files(files, nice=StackSettings().worker.nice, clock=time.perf_counter)


def load_newest_checkpoints(root: str | None) -> "list[tuple[Path, LoadedCheckpoint | str]]":
    """Load the newest checkpoint of a job, or for None of all known jobs that have one.

    One that cannot be loaded is returned as the reason.
    """
    from trinity_sync.storage.verify_load import load_newest  # imports torch, which is slow

    results: list[tuple[Path, LoadedCheckpoint | str]] = []
    for each in select_roots(root, Settings()):
        try:
            if done := load_newest(each):
                results.append((each, done))
        except (TrinitySyncError, OSError) as error:
            results.append((each, str(error)))
    return results
