"""The reader's side of a slot: its bytes while its lock is held, and its release.

It does not need torch, and so spares the processes that write images the seconds of its import.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trinity_sync.snapshot.kept import Kept, keep
from trinity_sync.snapshot.ticket import failure_path, read_ticket, ticket_path


@contextmanager
def held(path: Path, *, shared: bool = False) -> Iterator[int]:
    """A descriptor of a slot's file while its lock is held.

    Waits for the lock: a trainer holds it no longer than a copy takes.

    Args:
        path: of the slot.
        shared: hold it together with others who only read, and against those who do not.

    Raises:
        FileNotFoundError: there is no such slot.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield fd
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a mapping keeps the file open
        os.close(fd)


@contextmanager
def locked(path: Path) -> Iterator[memoryview]:
    """The bytes of a slot, read-only, while its lock is held; as `held` else."""
    with held(path) as fd:
        size = os.fstat(fd).st_size
        # unmapped with the last view of it: a slice may outlive the block, the lock does not
        yield memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) if size else b"")


def release(path: Path, image: str, digest: str = "") -> None:
    """Free the slot at ``path`` if it still holds ``image``.

    Args:
        path: of the slot.
        image: as in its ticket.
        digest: of the file that the image was committed as; it is noted, so that the file can be
            read from the slot as long as nothing else fills it.
    """
    with held(path):
        ticket = read_ticket(path)
        if ticket and ticket.image == image:
            if digest and ticket.form == "file":
                keep(path, Kept(ticket.step, ticket.path, ticket.nbytes, digest))
            ticket_path(path).unlink(missing_ok=True)
            failure_path(path).unlink(missing_ok=True)
