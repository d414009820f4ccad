"""Locks of the kernel on files: they end with the block, or with the process, however it dies.

The one that keeps two changes of a root's committed steps apart is `one_change_at_a_time`. Whoever
takes it and that of ``claims.nobody_claims`` takes it first.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import CommitError
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.storage.durable import make_folder
from trinity_sync.storage.mounts import mount_of

TRASH_LOCK = "trash.lock"
"""Of whoever empties the trash, in the private folder."""


@dataclass(frozen=True)
class Held:
    """A lock, within the block that has it."""

    path: Path
    fd: int
    """Of its file."""

    def require_ours(self) -> None:
        """See that it is still ours, right before what cannot be taken back.

        A file server gives a lock to another node when it has not heard of ours for a while. Ours
        is told when it writes to the file of the lock, and by nothing else that it does.

        Raises:
            CommitError: another node may have it.
        """
        if not mount_of(self.path).shared:
            return
        try:
            os.pwrite(self.fd, b"\n", 0)
            os.fsync(self.fd)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return  # of a server that has looked at the lock before
            raise CommitError(
                f"this node has lost the lock {self.path}: the file server did not hear of it for "
                "too long, and may have given the lock to another node. What was to be done under "
                "it was broken off; do it again"
            ) from error


@contextmanager
def file_lock(path: Path, *, shared: bool = False) -> Iterator[Held]:
    """Wait for the lock of the file at ``path``, made if it is missing, and have it in the block.

    Args:
        path: of a file that is nothing but the lock.
        shared: have it together with others that share it, and against those that do not.
    """
    with _opened(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield Held(path, lock)


@contextmanager
def file_lock_if_free(path: Path) -> Iterator[bool]:
    """As `file_lock`, without waiting: whether it is ours within the block."""
    with _opened(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = True
        except BlockingIOError:
            ours = False
        yield ours


@contextmanager
def one_change_at_a_time(root: str | Path) -> Iterator[Held]:
    """Wait for the commits and rewinds of other processes and threads; then nobody else's begin."""
    with file_lock(Path(root) / PRIVATE_FOLDER / "commit.lock") as lock:
        yield lock


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    make_folder(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # NFS wants to read what is shared
    try:
        yield fd
    finally:
        os.close(fd)
