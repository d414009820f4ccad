"""Locks of the kernel on files: they end with the block, or with the process, however it dies.

The one that keeps two changes of a root's committed steps apart is `one_change_at_a_time`. Whoever
takes it and that of ``claims.nobody_claims`` takes it first.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.storage.durable import make_folder

TRASH_LOCK = "trash.lock"
"""Of whoever empties the trash, in the private folder."""


@contextmanager
def file_lock(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Wait for the lock of the file at ``path``, made if it is missing, and have it in the block.

    Args:
        path: of a file that is nothing but the lock.
        shared: have it together with others that share it, and against those that do not.
    """
    make_folder(path.parent)
    with path.open("a+") as lock:  # NFS wants it open for reading to share it
        fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


@contextmanager
def file_lock_if_free(path: Path) -> Iterator[bool]:
    """As `file_lock`, without waiting: whether it is ours within the block."""
    make_folder(path.parent)
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = True
        except BlockingIOError:
            ours = False
        yield ours


@contextmanager
def one_change_at_a_time(root: str | Path) -> Iterator[None]:
    """Wait for the commits and rewinds of other processes and threads; then nobody else's begin."""
    with file_lock(Path(root) / PRIVATE_FOLDER / "commit.lock"):
        yield
