"""Run the save functions of a process.

Save functions of the user (Megatron, adapters, ``save_pretrained``) run in threads. A function
writes anywhere below the step's folder, from which an earlier run's commit is moved away before. A
status file in the spool tells the commit of the step when the function has ended, which files it
wrote, or why it failed.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity_sync.errors import SaveTimeoutError, describe_error
from trinity_sync.fs.atomic import walk_files
from trinity_sync.fs.process import read_process_identity
from trinity_sync.snapshot.identity import SaveId, read_identity
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.manifest import is_own_file, read_run_manifest
from trinity_sync.storage.replace import displace_step, exclude_writes
from trinity_sync.storage.save_functions import FunctionStatus, write_status

logger = logging.getLogger(__name__)


class FunctionRunner:
    """Runs the save functions of one process."""

    def __init__(self, root: Path, spool: JobSpool) -> None:
        self._root = root
        self._identity = read_identity(root)
        self._spool = spool
        self._threads: dict[str, threading.Thread] = {}
        self._failures: list[str] = []
        self.process = read_process_identity(os.getpid())
        """Identity of this process, read while it can open files."""

    def start(self, name: str, save_fn: Callable[[], Any], status: FunctionStatus) -> None:
        """Run a save function in a thread, after an earlier one of the same name.

        Its error is logged, and `wait` returns it.
        """
        write_status(self._spool, status)
        previous = self._threads.get(name)

        def run() -> None:
            if previous:
                previous.join()
            try:
                if error := self._run(save_fn, status):
                    raise error
            except Exception as error:
                self._failures.append(
                    f"save {name!r} of step {status.step}: {describe_error(error)}"
                )
                logger.exception("save %r of step %d failed", name, status.step)

        thread = threading.Thread(target=run, name=f"save-{name}-step{status.step}")
        try:
            thread.start()
        except RuntimeError as error:  # what waits for the function is told
            self._write_failure(status, error)
            raise
        self._threads[name] = thread

    def call(self, save_fn: Callable[[], Any], status: FunctionStatus) -> Exception | None:
        """Run a save function in the calling thread, and return its error; raise any other."""
        with suppress(OSError):  # memory is full: other ranks may be in its collectives
            write_status(self._spool, status)
        return self._run(save_fn, status)

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

    def _run(self, save_fn: Callable[[], Any], status: FunctionStatus) -> Exception | None:
        of_step = status.run, "", status.step, status.kind, ()
        save = SaveId(str(self._root), *of_step, identity=self._identity)
        try:
            with exclude_writes(save, shared=True):
                displace_step(save)
                before = _files_below(save.folder)
                start = time.monotonic()
                try:
                    save_fn()
                except Exception as error:
                    self._write_failure(status, error)
                    return error
                seconds = time.monotonic() - start
                for wait_s in 1, 5, 0:
                    try:
                        files = _list_changed(save, before)
                        ended = replace(status, state="finished", seconds=seconds, files=files)
                        write_status(self._spool, ended)
                        break
                    except OSError as error:
                        if not wait_s:
                            raise
                        told = "Cannot record the end of save %r of step %d, will retry in %d s: %s"
                        logger.warning(told, status.name, status.step, wait_s, error)
                        time.sleep(wait_s)
                return None
        except BaseException as error:
            with suppress(OSError):  # the caller is told
                self._write_failure(status, error)
            raise

    def _write_failure(self, status: FunctionStatus, error: BaseException) -> None:
        write_status(self._spool, replace(status, state="failed", error=describe_error(error)))


def _list_changed(save: SaveId, before: Mapping[str, object]) -> tuple[str, ...]:
    after, of_sync = _files_below(save.folder), read_run_manifest(save.root, save.run, save.step)
    changed = sorted(name for name in after if before.get(name) != after[name])
    return tuple(name for name in changed if not (of_sync and is_own_file(name)))


def _files_below(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time in ns of each file and link by path, without temporary ones."""
    found: dict[str, tuple[int, int, int]] = {}
    for path in walk_files(folder):
        name = path.relative_to(folder).as_posix()
        with suppress(FileNotFoundError):  # renamed or removed meanwhile
            seen = path.lstat()
            if not is_own_file(f"below/{name}"):
                found[name] = (seen.st_ino, seen.st_size, seen.st_mtime_ns)
    return found
