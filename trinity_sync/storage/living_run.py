"""The run of a job that is still running, if any: a second run would supersede its saves.

Rank 0 of each process group of a run holds a shared lock of ``runs/{number}.lock`` for as long as
it lives. The kernel releases the lock when the process dies, however it dies; a file server that
has lost the node of the process does so after a while.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity_sync.errors import RootInUseError
from trinity_sync.fs.lock_holder import describe_holder, describe_this_process
from trinity_sync.fs.locks import acquire_file_lock, open_lock_file
from trinity_sync.fs.mounts import find_mount
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.storage.runs import Run, list_runs

logger = logging.getLogger(__name__)

WAIT_S = 30.0
"""Seconds to wait for the earlier run to end: its last save on preemption may take as long."""
SHARED_WAIT_S = 120.0
"""The same on a network file system, whose server releases the locks of a lost node after its grace
period, by default 90 s with NFS."""
LOOK_S = 0.2
"""Seconds between two looks at the lock."""


@contextmanager
def hold_run(root: str | Path, number: int) -> Iterator[None]:
    """Show within the block that a process of a run lives."""
    with acquire_file_lock(_lock_path(root, number), shared=True) as lock:
        with suppress(OSError):  # for messages on nodes that do not see this process
            os.pwrite(lock.fd, f"{describe_this_process()}\n".encode(), 0)
        yield


def find_living_run(root: str | Path, key: str) -> tuple[Run, str] | None:
    """Return the run that a process is still part of, and a description of the process.

    Of the runs that processes have begun, the newest counts: earlier ones are superseded. The
    caller's run, which has ``key``, does not count.

    Raises:
        CommitError, FormatError: as `list_runs`.
    """
    for run in sorted(list_runs(root), key=lambda each: each.number, reverse=True):
        path = _lock_path(root, run.number)
        if run.key == key or not path.exists():  # a rewind has no process
            continue
        with open_lock_file(path) as lock:
            return None if lock.try_acquire() else (run, describe_holder(lock.fd, path))
    return None


def wait_for_living_run(root: str | Path, key: str, *, take_over: bool) -> None:
    """Wait for an earlier run to end; with ``take_over``, only warn that it is superseded.

    ``key`` is that of the caller's run.

    Raises:
        RootInUseError: the run has not ended in time.
        CommitError, FormatError: as `list_runs`.
    """
    limit_s = SHARED_WAIT_S if find_mount(Path(root)).shared else WAIT_S
    began, said = time.monotonic(), False
    while living := find_living_run(root, key):
        run, holder = living
        running = f"run {run.number} of {root} is still running: {holder}"
        if take_over:
            logger.warning("%s. Taking over: its later saves are refused", running)
            return
        if time.monotonic() - began >= limit_s:
            raise RootInUseError(
                f"{running}. A second run would supersede its saves, so none has begun. End that "
                "process, or use another root. To read steps beside it, use "
                "trinity_sync.Checkpoints; to supersede it, pass take_over=True or set "
                "TRINITY_SYNC_TAKE_OVER=1.",
                run=run.number,
                holder=holder,
            )
        if not said:
            said = True
            logger.warning("%s. Waiting up to %.0f s for its end", running, limit_s)
        time.sleep(LOOK_S)


def _lock_path(root: str | Path, number: int) -> Path:
    return Path(root) / PRIVATE_FOLDER / "runs" / f"{number}.lock"
