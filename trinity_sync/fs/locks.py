"""Locks of the kernel on files (``flock``): they end with the block, or with the process.

Such a lock belongs to the open file, and a forked child has that file open as well: it would keep
the lock when the parent closes its descriptor. So a lock is released before its file is closed, and
a forked child closes the lock files of its parent, which also leaves no lock behind when the parent
is killed. A mapping keeps its file open, so memory is mapped through another open file. Programs
that are started inherit none of this: descriptors are close-on-exec.

No process waits for a lock in silence: a warning names the process that holds it, and where a lock
is held for moments only, waiting ends with an error.

The lock that keeps two changes of a root's committed steps apart is `acquire_commit_lock`. It is
acquired before that of ``leases.acquire_removal_lock``.

To acquire a lock, a process only needs to read the file, so only those who may write into the
folder of a lock may open it: whoever may read a root cannot keep others from it.
"""

import errno
import fcntl
import logging
import math
import mmap
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity_sync.errors import CommitError, LockTimeoutError
from trinity_sync.fs.atomic import make_folder
from trinity_sync.fs.lock_holder import describe_holder, describe_this_process
from trinity_sync.fs.mounts import find_mount
from trinity_sync.layout import PRIVATE_FOLDER

logger = logging.getLogger(__name__)

TRASH_LOCK = "trash.lock"
"""Of whoever empties the trash, in the private folder."""
LIMIT_S = 600.0
"""Seconds that whoever needs a lock waits for it at most, unless it says otherwise."""
LONG_S = 3600.0
"""The same for locks under which others digest, or remove, as much as a step has."""
_MAKING_S = 0.01, 0.1
"""Seconds after which another user who is making a lock has let those open it who may."""
SAY_S = 5.0
"""Seconds after which a process that waits says so; then after four times as many, and so on."""
SAY_LATE_S = 60.0
"""The same where others may rightly take any time, as who writes a shard when one may at a time."""

FORK_S = 1.0
"""Seconds for which a fork waits for files that other threads open or close. On a file server that
is away that takes as long as the server likes, and the one that forks is a trainer."""

_open_here: weakref.WeakSet["LockFile"] = weakref.WeakSet()
_changing: dict[object, int] = {}
"""Threads that open or close a file, for which the set does not tell the same."""
_changed = threading.Condition()
"""Of these, and held by who forks."""


class LockFile:
    """An open file and its lock.

    Args:
        path: of the file.
        flags: as of ``os.open``.
        mode: of a file that is made.
    """

    def __init__(self, path: Path, flags: int, mode: int = 0o600) -> None:
        self.path = path
        self.fd = -1
        with _change():
            self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
            _open_here.add(self)

    def try_acquire(self, *, shared: bool = False) -> bool:
        """Take the lock if no other open file has it; whether it was taken."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def acquire(self, *, shared: bool = False, limit_s: float = math.inf) -> None:
        """Wait for the lock.

        Raises:
            LockTimeoutError: others have had it for ``limit_s`` seconds.
        """
        self.wait(lambda: self.try_acquire(shared=shared), limit_s)

    def wait(self, attempt: Callable[[], bool], limit_s: float) -> None:
        """Wait until an attempt to take a lock of the file succeeds; raises as `acquire`."""
        began, say_s = time.monotonic(), SAY_S if math.isfinite(limit_s) else SAY_LATE_S
        while not attempt():
            waited = time.monotonic() - began
            if waited >= limit_s:
                holder = describe_holder(self.fd, self.path)
                raise LockTimeoutError(
                    f"the lock {self.path} was not released within {limit_s:g} s: it is held by "
                    f"{holder}. See what that process does, end it if it hangs, and try again.",
                    path=self.path,
                    holder=holder,
                )
            if waited >= say_s:
                say_s *= 4
                logger.warning(
                    "waiting for the lock %s for %.0f s; it is held by %s",
                    self.path,
                    waited,
                    describe_holder(self.fd, self.path),
                )
            # a blocking flock could neither be bounded nor tell what it waits for
            time.sleep(min(0.001 + waited / 10, 0.1, max(0.0, limit_s - waited)))

    def release(self) -> None:
        """Give the lock back; in a forked child, leave it to the parent."""
        if self.fd >= 0:
            fcntl.flock(self.fd, fcntl.LOCK_UN)  # a child that has the file open would keep it

    def close(self) -> None:
        """Release the lock and close the file; again is harmless."""
        with suppress(OSError):  # of a server that is away: closing says no more
            self.release()
        with _change():
            self.leave()

    def leave(self) -> None:
        """Close the file, and leave the lock to a process that has the same open file."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def require_ours(self) -> None:
        """See that it is still ours, right before what cannot be taken back.

        A file server gives a lock to another node when it has not heard of ours for a while. Ours
        is told when it writes to the file of the lock, and by nothing else that it does.

        Raises:
            CommitError: another node may have it, or the process that has it is this one's parent.
        """
        if self.fd < 0:
            raise CommitError(
                f"the lock {self.path} belongs to the process that forked this one, so nothing is "
                "changed here; do it in that process, or take the lock anew"
            )
        try:
            self.note_holder()
        except OSError as error:
            raise CommitError(
                f"this node has lost the lock {self.path}: the file server did not hear of it for "
                "too long, and may have given the lock to another node. What was to be done under "
                "it was broken off; do it again"
            ) from error

    def note_holder(self) -> None:
        """Write into the file who has the lock, for other nodes, whose kernels cannot tell."""
        if not find_mount(self.path).shared:
            return
        try:
            os.pwrite(self.fd, f"{describe_this_process()}\n".encode(), 0)
            os.fsync(self.fd)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # else it is of a server that has looked at the lock before

    def map(self, nbytes: int, *, writable: bool = False, populate: bool = False) -> mmap.mmap:
        """The first bytes of the file as memory that processes share; it keeps no lock.

        Args:
            nbytes: how many.
            writable: map them to be written to, too.
            populate: map all pages at once, and not each when it is touched.
        """
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with reopen_fd(self.fd, os.O_RDWR if writable else os.O_RDONLY) as fd:
            return mmap.mmap(fd, nbytes, flags, prot)

    def __del__(self) -> None:  # wherever the collector runs, so it waits for nothing
        with suppress(OSError):
            self.release()
        self.leave()


@contextmanager
def reopen_fd(fd: int, flags: int = os.O_RDONLY) -> Iterator[int]:
    """The same file, opened once more: it has no part in the lock of the first."""
    again = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    try:
        yield again
    finally:
        os.close(again)


@contextmanager
def file_lock(path: Path, *, shared: bool = False, limit_s: float = LIMIT_S) -> Iterator[LockFile]:
    """Wait for the lock of the file at ``path``, made if it is missing, and have it in the block.

    Who waits is told by a warning who has it.

    Args:
        path: of a file that is nothing but the lock.
        shared: have it together with others that share it, and against those that do not.
        limit_s: seconds to wait at most; ``math.inf`` where others may rightly take any time.

    Raises:
        LockTimeoutError: others have had it for so long.
    """
    with open_lock_file(path) as lock:
        lock.acquire(shared=shared, limit_s=limit_s)
        if not shared:
            with suppress(OSError):
                lock.note_holder()
        yield lock


@contextmanager
def file_lock_if_free(path: Path) -> Iterator[bool]:
    """As `file_lock`, without waiting: whether it is ours within the block."""
    with open_lock_file(path) as lock:
        yield lock.try_acquire()


def is_locked(path: Path) -> bool:
    """Return whether a process, on whatever node, holds the lock of a file alone.

    Unlike `file_lock_if_free`, it makes no file, and many may ask at a time.

    Raises:
        OSError: the file is there, and cannot be read.
    """
    try:
        lock = LockFile(path, os.O_RDONLY | os.O_NONBLOCK)  # it may be somebody's pipe
    except FileNotFoundError:
        return False
    try:
        return not lock.try_acquire(shared=True)
    finally:
        lock.close()


@contextmanager
def acquire_commit_lock(root: str | Path) -> Iterator[LockFile]:
    """Wait for the commits and rewinds of other processes and threads; then nobody else's begin.

    Raises:
        LockTimeoutError: one of them has taken an hour.
    """
    with file_lock(Path(root) / PRIVATE_FOLDER / "commit.lock", limit_s=LONG_S) as lock:
        yield lock


@contextmanager
def open_lock_file(path: Path) -> Iterator[LockFile]:
    """Open the file of a lock, made if it is missing, for the length of the block."""
    make_folder(path.parent)
    lock = _open(path)
    try:
        _let_writers_alone_open(lock.fd, path.parent)
        yield lock
    finally:
        lock.close()


def _open(path: Path) -> LockFile:
    flags = os.O_RDWR | os.O_CREAT  # NFS wants to read what is shared
    for wait_s in _MAKING_S:
        try:
            return LockFile(path, flags)
        except PermissionError:
            if not os.access(path.parent, os.W_OK):
                raise
            time.sleep(wait_s)
    return LockFile(path, flags)


def _let_writers_alone_open(fd: int, folder: Path) -> None:
    """Let those open a lock who may write into its folder, whatever the umask, and nobody else.

    Somebody may have moved another file of ours to the place of the lock. So what has content is
    opened to nobody.
    """
    found, above = os.fstat(fd), folder.stat()
    if found.st_uid != os.geteuid() or found.st_nlink > 1 or not stat.S_ISREG(found.st_mode):
        return
    if not found.st_size and (found.st_uid, found.st_gid) != (above.st_uid, above.st_gid):
        with suppress(OSError):  # who is not root can give it to a group of its own only
            os.fchown(fd, -1, above.st_gid)
            os.fchown(fd, above.st_uid, -1)
    writers = above.st_mode & 0o222
    if os.fstat(fd).st_gid != above.st_gid:
        writers &= ~stat.S_IWGRP
    now, wanted = stat.S_IMODE(found.st_mode), stat.S_IRUSR | stat.S_IWUSR | writers | writers << 1
    if found.st_size:
        wanted &= now
    with suppress(OSError):  # file systems without modes
        if now != wanted:
            os.fchmod(fd, wanted)


@contextmanager
def _change() -> Iterator[None]:
    """Open or close a file; others may do so meanwhile, and a fork waits `FORK_S` for it."""
    this = object()
    with _changed:
        _changing[this] = threading.get_ident()
    try:
        yield
    finally:
        with _changed:
            _changing.pop(this, None)
            _changed.notify_all()


def _await_others() -> None:
    """Before a fork: let none begin to open or close a file, and let those end that have."""
    _changed.acquire()
    mine = threading.get_ident()  # a signal's handler may fork while its thread opens a file
    if not _changed.wait_for(
        lambda: all(each == mine for each in tuple(_changing.values())), FORK_S
    ):
        _changing.clear()  # the next fork does not wait for the same once more


def _leave_to_parent() -> None:
    global _changed
    _changed = threading.Condition()  # threads that wait for the old one are not here
    _changing.clear()
    for file in list(_open_here):
        file.leave()


def _let_others() -> None:
    _changed.release()


os.register_at_fork(
    before=_await_others, after_in_parent=_let_others, after_in_child=_leave_to_parent
)
