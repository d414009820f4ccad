"""Kernel locks on files, held within a block: they are released with the block or the process.

A process that waits for a lock logs a warning with the holder, and a lock that is held for moments
only has a time limit. `acquire_commit_lock` keeps two changes of a root's committed steps apart;
acquire it before `leases.acquire_removal_lock`.

To acquire a lock, a process needs to read the file only. So a lock file can be opened only by users
who may write into its folder: a user who may read a root cannot block others.
"""

import os
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

from trinity_sync.fs.atomic import make_folder
from trinity_sync.fs.lock_file import LockFile
from trinity_sync.layout import PRIVATE_FOLDER

TRASH_LOCK = "trash.lock"
"""Name of the lock for emptying the trash, in the private folder."""
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
def try_acquire_file_lock(path: Path) -> Iterator[bool]:
    """Acquire the lock of a file without waiting; yield whether it is held within the block."""
    with open_lock_file(path) as lock:
        yield lock.try_acquire()


def is_locked(path: Path) -> bool:
    """Return whether a process on any node holds the exclusive lock of a file.

    Unlike `try_acquire_file_lock`, it creates no file, and many processes may call it at a time.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        with closing(LockFile(path, os.O_RDONLY | os.O_NONBLOCK)) as lock:  # it may be a pipe
            return not lock.try_acquire(shared=True)
    except FileNotFoundError:
        return False


def acquire_commit_lock(root: str | Path) -> AbstractContextManager[LockFile]:
    """Hold the commit lock of a root within the block; wait for commits and rewinds in flight.

    Raises:
        LockTimeoutError: a holder has taken an hour.
    """
    return acquire_file_lock(Path(root) / PRIVATE_FOLDER / "commit.lock", limit_s=LONG_S)


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
