"""Locks of the kernel on files: they end with the block, or with the process, however it dies.

The one that keeps two changes of a root's committed steps apart is `one_change_at_a_time`. Whoever
takes it and that of ``leases.removal_lock`` takes it first.

To take such a lock a process needs no more than to read the file, so only those who may write into
the folder of a lock may open it: whoever may read a root cannot keep others from it.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import CommitError
from trinity_sync.fs.atomic import make_folder
from trinity_sync.fs.flock import LockFile, name_of_process
from trinity_sync.fs.mounts import mount_of
from trinity_sync.layout import PRIVATE_FOLDER

TRASH_LOCK = "trash.lock"
"""Of whoever empties the trash, in the private folder."""
LIMIT_S = 600.0
"""Seconds that whoever needs a lock waits for it at most, unless it says otherwise."""
LONG_S = 3600.0
"""The same for locks under which others digest, or remove, as much as a step has."""
_MAKING_S = 0.01, 0.1
"""Seconds after which another user who is making a lock has let those open it who may."""


@dataclass(frozen=True)
class Held:
    """A lock, within the block that has it."""

    path: Path
    file: LockFile

    def require_ours(self) -> None:
        """See that it is still ours, right before what cannot be taken back.

        A file server gives a lock to another node when it has not heard of ours for a while. Ours
        is told when it writes to the file of the lock, and by nothing else that it does.

        Raises:
            CommitError: another node may have it, or the process that has it is this one's parent.
        """
        if self.file.fd < 0:
            raise CommitError(
                f"the lock {self.path} belongs to the process that forked this one, so nothing is "
                "changed here; do it in that process, or take the lock anew"
            )
        try:
            self._note()
        except OSError as error:
            raise CommitError(
                f"this node has lost the lock {self.path}: the file server did not hear of it for "
                "too long, and may have given the lock to another node. What was to be done under "
                "it was broken off; do it again"
            ) from error

    def _note(self) -> None:
        """Write into the file who has the lock, for other nodes, whose kernels cannot tell."""
        if not mount_of(self.path).shared:
            return
        try:
            os.pwrite(self.file.fd, f"{name_of_process()}\n".encode(), 0)
            os.fsync(self.file.fd)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # else it is of a server that has looked at the lock before


@contextmanager
def file_lock(path: Path, *, shared: bool = False, limit_s: float = LIMIT_S) -> Iterator[Held]:
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
        held = Held(path, lock)
        if not shared:
            with suppress(OSError):
                held._note()
        yield held


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
def one_change_at_a_time(root: str | Path) -> Iterator[Held]:
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
