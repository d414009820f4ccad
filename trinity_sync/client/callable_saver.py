"""Run save functions of the user (Megatron, adapters, ``save_pretrained``), in threads.

A function writes anywhere below the step's folder, from which an earlier run's commit is moved
away before. A status file in the spool tells the step's flow run when the function has ended, which
files it wrote, or why it failed.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity_sync.errors import SaveTimeoutError
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.callable_status import CallableStatus, write_status
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.displace import displace_step
from trinity_sync.storage.manifest_files import is_own_file

logger = logging.getLogger(__name__)


class CallableSaver:
    """Runs the save functions of one process."""

    def __init__(self, root: Path, spool: JobSpool) -> None:
        self._root = root
        self._spool = spool
        self._threads: dict[str, threading.Thread] = {}
        self._failures: list[str] = []

    def start(self, name: str, save_fn: Callable[[], Any], status: CallableStatus) -> None:
        """Run a save function in a thread, after an earlier one of the same name.

        Its error is logged, and `wait` returns it.
        """
        write_status(self._spool, status)
        previous = self._threads.get(name)

        def run() -> None:
            if previous:
                previous.join()
            try:
                self._run(save_fn, status)
            except Exception as error:
                self._failures.append(f"save {name!r} of step {status.step}: {error!r}")
                logger.exception("save %r of step %d failed", name, status.step)

        thread = threading.Thread(target=run, name=f"save-{name}-step{status.step}")
        self._threads[name] = thread
        thread.start()

    def call(self, save_fn: Callable[[], Any], status: CallableStatus) -> None:
        """Run a save function in the calling thread, and raise its errors."""
        write_status(self._spool, status)
        self._run(save_fn, status)

    def wait(self, deadline: float | None) -> list[str]:
        """Join all threads; return the failures since the last call.

        The deadline is in monotonic seconds.

        Raises:
            SaveTimeoutError: a function still runs.
        """
        for name, thread in list(self._threads.items()):
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise SaveTimeoutError(
                    f"save {name!r} still runs; call wait_all again to wait longer"
                )
            self._threads.pop(name)
        failures, self._failures = self._failures, []
        return failures

    def _run(self, save_fn: Callable[[], Any], status: CallableStatus) -> None:
        folder = step_folder(self._root, status.step)
        try:
            displace_step(SaveId(str(self._root), status.run, "", status.step, status.kind, ()))
            before = _files_below(folder)
            start = time.monotonic()
            save_fn()
            seconds = time.monotonic() - start
            after = _files_below(folder)
            changed = tuple(sorted(name for name in after if before.get(name) != after[name]))
            finished = replace(status, state="finished", seconds=seconds, files=changed)
            write_status(self._spool, finished)
        except BaseException as error:
            write_status(self._spool, replace(status, state="failed", error=repr(error)))
            raise


def _files_below(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time in ns of each file by path, without files of trinity_sync."""
    found: dict[str, tuple[int, int, int]] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        try:
            if not is_own_file(name) and path.is_file():
                seen = path.stat()
                found[name] = (seen.st_ino, seen.st_size, seen.st_mtime_ns)
        except FileNotFoundError:
            continue  # renamed or removed meanwhile
    return found
