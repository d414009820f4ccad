"""Kernel locks on files, held within a block: they are released with the block or the process.

A process that waits for a lock logs a warning with the holder, and a lock that is held for moments
only has a time limit. `acquire_commit_lock` keeps two changes of a root's committed steps apart;
acquire it before `acquire_removal_lock`.

To acquire a lock, a process needs to read the file only. So a lock file can be opened only by users
who may write into its folder: a user who may read a root cannot block others.

A `LockFile` is an open file with a kernel lock (``flock``). Such a lock belongs to the open file,
and a forked child inherits the open file: it would keep the lock after the parent closes its
descriptor. So a lock is released before its file is closed, and a forked child closes the lock
files of its parent, which also releases the locks when the parent is killed. A mapping keeps its
file open, so memory is mapped through another open file. Programs that are started inherit nothing:
descriptors are close-on-exec.
"""

import errno
import fcntl
import logging
import math
import mmap
import os
import signal
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

from trinity_sync.errors import CommitError, LockTimeoutError
from trinity_sync.fs.atomic import (
    NO_LINKS,
    NO_ROOM,
    make_folder,
    make_temporary_path,
    open_fd,
    pin_folder,
    pinned,
    sync_folder,
    write_in_place,
)
from trinity_sync.fs.file_system import find_mount
from trinity_sync.fs.process import describe_holder, describe_this_process
from trinity_sync.layout import PRIVATE_FOLDER

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
        with _change(), pin_folder(path.parent) as folder:
            self.fd = os.open(folder / path.name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _open_here.add(self)

    def try_acquire(self, *, shared: bool = False) -> bool:
        """Acquire the lock if it is free; return whether it was acquired."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            error.filename = os.fspath(self.path)
            raise
        return True

    def try_acquire_range(self, how: int = fcntl.F_RDLCK, start: int = 0, length: int = 0) -> bool:
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
        """Do as `acquire` by an ``attempt``, which tries to acquire a lock of the file."""
        began, warn_s = time.monotonic(), WARN_S if math.isfinite(limit_s) else WARN_LATE_S
        while not attempt():
            waited = time.monotonic() - began
            if waited >= limit_s:
                holder = describe_holder(self.fd, self.path)
                raise LockTimeoutError(
                    f"the lock {self.path} was not released within {limit_s:g} s: it is held by "
                    f"{holder}. Check that process, end it if it hangs, and retry."
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
            if error.errno not in NO_ROOM:
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
        if self.fd >= 0:
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


os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _lock.release(),  # of the lock that this process has by then
    after_in_child=_after_fork_in_child,
)


TRASH_LOCK = "trash.lock"
"""Name of the lock for emptying the trash, in the private folder."""
LOCKS = "commit.lock", "removal.lock", TRASH_LOCK
"""Names of the locks without which no step can be removed, in the private folder."""
LIMIT_S = 600.0
"""Default seconds to wait for a lock."""
LONG_S = 3600.0
"""Seconds to wait for locks under which whole steps are digested or removed."""
_CREATION_WAITS_S = 0.01, 0.1
"""Seconds to wait while another user creates a lock file and sets its permissions."""


@contextmanager
def acquire_file_lock(
    path: Path, *, shared: bool = False, limit_s: float = LIMIT_S
) -> Iterator[LockFile]:
    """Wait for the lock of a file, created if it is missing, and hold it within the block.

    The file is used for the lock only. ``shared`` is with other holders that share it; ``limit_s``
    is ``math.inf`` if a holder may take any time.

    Raises:
        LockTimeoutError: the lock was not released within ``limit_s``.
    """
    with open_lock_file(path) as lock:
        lock.acquire(shared=shared, limit_s=limit_s)
        if not shared:
            with suppress(OSError):
                lock.write_holder()
        yield lock


@contextmanager
def lock_file(path: Path, *, shared: bool, limit_s: float) -> Iterator[LockFile]:
    """Do as `acquire_file_lock` with a file that has to exist, and is not written."""
    with closing(LockFile(path, os.O_RDWR)) as lock:
        lock.acquire(shared=shared, limit_s=limit_s)
        yield lock


@contextmanager
def try_acquire_file_lock(path: Path) -> Iterator[bool]:
    """Acquire the lock of a file without waiting; yield whether it is held within the block."""
    with open_lock_file(path) as lock:
        yield lock.try_acquire()


def acquire_commit_lock(
    root: str | Path, *, limit_s: float = LONG_S
) -> AbstractContextManager[LockFile]:
    """Do as `acquire_file_lock` with the commit lock of a root, which commits and rewinds hold."""
    return acquire_file_lock(Path(root) / PRIVATE_FOLDER / "commit.lock", limit_s=limit_s)


@contextmanager
def open_lock_file(path: Path) -> Iterator[LockFile]:
    """Open a lock file, created if it is missing, for the length of the block."""
    make_folder(path.parent)
    with closing(_open(path)) as lock:
        _restrict_to_writers(lock.fd, path.parent)
        yield lock


def _open(path: Path) -> LockFile:
    flags = os.O_RDWR | os.O_CREAT  # NFS needs read access for shared locks
    for wait_s in _CREATION_WAITS_S:
        try:
            return LockFile(path, flags)
        except PermissionError:
            if not os.access(path.parent, os.W_OK):
                raise
            time.sleep(wait_s)
    return LockFile(path, flags)


def _restrict_to_writers(fd: int, folder: Path) -> None:
    """Let exactly the users who may write into a lock file's folder open it, whatever the umask.

    Another user may have moved a file of this user to the path of the lock, so a file with content
    gets no additional permissions.
    """
    found, above = os.fstat(fd), folder.stat()
    if found.st_uid != os.geteuid() or found.st_nlink > 1 or not stat.S_ISREG(found.st_mode):
        return
    if not found.st_size and (found.st_uid, found.st_gid) != (above.st_uid, above.st_gid):
        with suppress(OSError):  # other users than root can only set groups of theirs
            os.fchown(fd, -1, above.st_gid)
            os.fchown(fd, above.st_uid, -1)
    writers = above.st_mode & 0o222
    if os.fstat(fd).st_gid != above.st_gid:
        writers &= ~stat.S_IWGRP
    now, wanted = stat.S_IMODE(found.st_mode), stat.S_IRUSR | stat.S_IWUSR | writers | writers << 1
    if found.st_size:
        wanted &= now
    with suppress(OSError):  # file systems without permissions
        if now != wanted:
            os.fchmod(fd, wanted)


@pinned
def create_file(path: Path, content: str | bytes) -> bool:
    """Create a file atomically and durably; return False if it exists."""
    temporary = make_temporary_path(path)
    try:
        write_in_place(temporary, content)
        _rename_exclusively(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def _rename_exclusively(temporary: Path, path: Path) -> None:
    """Rename a temporary file to a name that no other file has.

    Raises:
        FileExistsError: another file has the name.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with acquire_file_lock(path.parent / ".names.lock"):
            if path.exists():
                raise FileExistsError(errno.EEXIST, "exists", str(path)) from None
            temporary.replace(path)


_F_SETOWN_EX, _F_OWNER_TID = 15, 0
"""Constants of Linux's fcntl.h: set the owner of an open file's signals; the owner is a thread."""


def has_no_other_users(path: Path) -> bool:
    """Return whether a file has no other name and no other process has it open or mapped.

    The kernel grants a write lease only then.
    """
    try:
        with open_fd(path, os.O_RDWR | os.O_NOFOLLOW) as fd:
            if os.fstat(fd).st_nlink > 1:
                return False
            with ThreadPoolExecutor(1, "lease") as thread:
                return thread.submit(_can_be_leased, fd).result()
    except (OSError, RuntimeError):  # no thread can be started
        return False


def _can_be_leased(fd: int) -> bool:
    """Return whether the kernel grants a write lease of a file. Call it in a thread of its own.

    If a process opens the file while it is leased, the kernel sends a SIGIO, which ends a process
    that does not handle it. It is sent to this thread only, which blocks the signal and then ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
    owner = struct.pack("ii", _F_OWNER_TID, threading.get_native_id())
    fcntl.fcntl(fd, _F_SETOWN_EX, owner)  # otherwise the lease makes the process the owner
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
