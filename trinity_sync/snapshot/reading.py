"""The reader's side of a slot: its bytes while its lock is held, and its release.

Any number of readers share a slot's lock: who writes it out, who restores from it, who loads the
weights in it. The stager alone takes it for itself. What only one may do at a time with an image,
writing it out and freeing it, is done under the lock of its ticket, so that a slow reader holds up
neither.

It does not need torch, and so spares the processes that write images the seconds of its import.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity_sync.snapshot.kept import Kept, keep
from trinity_sync.snapshot.ticket import failure_path, read_ticket, ticket_path


@contextmanager
def held(path: Path) -> Iterator[int]:
    """A descriptor of a slot's file while nobody may change its bytes.

    Waits for the lock: a trainer holds it no longer than a copy takes.

    Raises:
        FileNotFoundError: there is no such slot.
    """
    with _under_lock(path, fcntl.LOCK_SH) as fd:
        yield fd


@contextmanager
def locked(path: Path) -> Iterator[memoryview]:
    """The bytes of a slot, read-only, while nobody may change them; as `held` else."""
    with held(path) as fd:
        size = os.fstat(fd).st_size
        # unmapped with the last view of it: a slice may outlive the block, the lock does not
        yield memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) if size else b"")


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """The sealed image in the slot at ``path`` is this thread's to write out, or to free.

    Waits for whoever has claimed it. The image may have given way meanwhile: look at its ticket
    again, under the slot's lock too, which is taken after this one.

    Raises:
        FileNotFoundError: no image is sealed there.
    """
    with _under_lock(ticket_path(path), fcntl.LOCK_EX):
        yield


@contextmanager
def _under_lock(path: Path, how: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, how)
        yield fd
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough: a mapping keeps the file open
        os.close(fd)


def release(path: Path, image: str, digest: str = "") -> None:
    """Free the slot at ``path`` if it still holds ``image``.

    Args:
        path: of the slot.
        image: as in its ticket.
        digest: of the file that the image was committed as; it is noted, so that the file can be
            read from the slot as long as nothing else fills it.
    """
    try:
        with claimed(path), held(path):
            ticket = read_ticket(path)
            if ticket and ticket.image == image:
                if digest and ticket.form == "file":
                    with suppress(OSError):  # without room it is read from the disk
                        keep(path, Kept(ticket.step, ticket.path, ticket.nbytes, digest))
                ticket_path(path).unlink(missing_ok=True)
                failure_path(path).unlink(missing_ok=True)
    except FileNotFoundError:
        return  # freed before, or removed with the trainer
