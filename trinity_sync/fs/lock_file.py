"""Lock file: an open file with a kernel lock (``flock``), which ends with the process.

Such a lock belongs to the open file, and a forked child inherits the open file: it would keep the
lock after the parent closes its descriptor. So a lock is released before its file is closed, and a
forked child closes the lock files of its parent, which also releases the locks when the parent is
killed. A mapping keeps its file open, so memory is mapped through another open file. Programs that
are started inherit nothing: descriptors are close-on-exec.
"""

import errno
import fcntl
import logging
import math
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity_sync.errors import CommitError, LockTimeoutError
from trinity_sync.fs.atomic import open_fd
from trinity_sync.fs.lock_holder import describe_holder, describe_this_process
from trinity_sync.fs.mounts import find_mount

logger = logging.getLogger(__name__)

WARN_S = 5.0
"""Seconds after which a waiting process logs a warning; each next one takes four times as long."""
WARN_LATE_S = 60.0
"""The same for locks that may be held for any time, e.g. a write permit."""
FORK_S = 1.0
"""Seconds for which a fork waits for files that other threads open or close, which takes for ever
while a file server does not answer; the process that forks is a trainer."""

_open_here: weakref.WeakSet["LockFile"] = weakref.WeakSet()
_changing: dict[object, int] = {}
"""Threads that are opening or closing a file, during which ``_open_here`` is not accurate."""
_lock = threading.RLock()
"""Lock of ``_changing``, which a fork holds. It is entered rather than its condition, whose methods
are Python code: a signal's handler that raises there leaves the lock held for ever."""
_changed = threading.Condition(_lock)


class LockFile:
    """An open file and its lock; ``flags`` are those of ``os.open``."""

    fd = -1

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        with _change():
            self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _open_here.add(self)

    def try_acquire(self, *, shared: bool = False) -> bool:
        """Acquire the lock if it is free; return whether it was acquired."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def try_acquire_range(self, how: int, start: int = 0, length: int = 0) -> bool:
        """Acquire a lock on bytes of the file, by default all, if it is free; return whether it is.

        ``how`` is ``fcntl.F_RDLCK`` or ``F_WRLCK``. It is an open file description lock, which ends
        with the open file as that of `try_acquire` does, and is independent of it.
        """
        # struct flock of 64-bit Linux
        lock = struct.pack("hhqqi4x", how, os.SEEK_SET, start, length, 0)
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, lock)
        except BlockingIOError:
            return False
        return True

    def acquire(self, *, shared: bool = False, limit_s: float = math.inf) -> None:
        """Wait for the lock and acquire it, ``shared`` with other holders that share it.

        Raises:
            LockTimeoutError: the lock was not released within ``limit_s``.
        """
        self.wait(lambda: self.try_acquire(shared=shared), limit_s)

    def wait(self, attempt: Callable[[], bool], limit_s: float) -> None:
        """Wait until ``attempt``, which tries to acquire a lock of the file, returns True.

        Raises:
            LockTimeoutError: as `acquire`.
        """
        began, warn_s = time.monotonic(), WARN_S if math.isfinite(limit_s) else WARN_LATE_S
        while not attempt():
            waited = time.monotonic() - began
            if waited >= limit_s:
                holder = describe_holder(self.fd, self.path)
                raise LockTimeoutError(
                    f"the lock {self.path} was not released within {limit_s:g} s: it is held by "
                    f"{holder}. Check that process, end it if it hangs, and retry.",
                    path=self.path,
                    holder=holder,
                )
            if waited >= warn_s:
                warn_s *= 4
                logger.warning(
                    "waiting for the lock %s for %.0f s; it is held by %s",
                    self.path,
                    waited,
                    describe_holder(self.fd, self.path),
                )
            # a blocking flock has no time limit and no warnings
            time.sleep(min(0.001 + waited / 10, 0.1, max(0.0, limit_s - waited)))

    def release(self) -> None:
        """Release the lock; in a forked child, leave it to the parent."""
        if self.fd >= 0:
            # closing is not enough if a child has the file open
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the lock and close the file; closing again is harmless."""
        with suppress(OSError):  # the file server does not answer
            self.release()
        with _change():
            self.detach()

    def detach(self) -> None:
        """Close the file without releasing the lock, for other processes with the open file."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def require_held(self) -> None:
        """Require that the lock is still held; call it right before a change that cannot be undone.

        A file server gives a lock to another node if it has not heard of its holder for some time.
        The holder notices only when it writes to the lock file, so this writes to it.

        Raises:
            CommitError: another node may hold the lock, or it belongs to the parent of this
                process.
        """
        if self.fd < 0:
            raise CommitError(
                f"the lock {self.path} belongs to the parent of this process, so nothing is "
                "changed here; do it in the parent, or acquire the lock again"
            )
        try:
            self.write_holder()
        except OSError as error:
            raise CommitError(
                f"this node has lost the lock {self.path}: it did not reach the file server for "
                "too long, and another node may hold the lock. The operation was stopped; retry."
            ) from error

    def write_holder(self) -> None:
        """Write a description of this process into the file, for other nodes' messages."""
        if not find_mount(self.path).shared:
            return
        try:
            os.pwrite(self.fd, f"{describe_this_process()}\n".encode(), 0)
            os.fsync(self.fd)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # a full disk is reported by a server that has checked the lock

    def map(self, nbytes: int, *, writable: bool = False, populate: bool = False) -> mmap.mmap:
        """Map the first bytes of the file as shared memory; the mapping keeps no lock.

        ``populate`` maps all pages at once, rather than each at its first access.
        """
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        again = f"/proc/self/fd/{self.fd}"  # an open file that does not share the lock
        with open_fd(again, os.O_RDWR if writable else os.O_RDONLY) as fd:
            return mmap.mmap(fd, nbytes, flags, prot)

    def __del__(self) -> None:  # must not wait, because it runs in any thread
        with suppress(OSError):
            self.release()
        self.detach()


@contextmanager
def _change() -> Iterator[None]:
    """Open or close a file within the block; a fork in another thread waits `FORK_S` for it."""
    this = object()
    with _lock:
        _changing[this] = threading.get_ident()
    try:
        yield
    finally:
        with _lock:
            _changing.pop(this, None)
            _changed.notify_all()


def _before_fork() -> None:
    """Before a fork, let no thread begin to open or close a file, and wait for those that did."""
    _lock.acquire()
    mine = threading.get_ident()  # a signal handler may fork while its thread opens a file
    if not _changed.wait_for(
        lambda: all(each == mine for each in tuple(_changing.values())), FORK_S
    ):
        _changing.clear()  # the next fork does not wait for them again


def _after_fork_in_child() -> None:
    global _lock, _changed
    _lock = threading.RLock()
    _changed = threading.Condition(_lock)  # threads that wait for the old one are not here
    _changing.clear()
    for file in list(_open_here):
        file.detach()


def _after_fork_in_parent() -> None:
    _lock.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
