"""The reader's side of a slot: its bytes while its lock is held, and its release.

Any number of readers share a slot's lock: who writes it out, who restores from it, who loads the
weights in it. The stager alone takes it for itself. What only one may do at a time with an image,
writing it out and freeing it, is done under the lock of its ticket, so that a slow reader holds up
neither.

It does not need torch, and so spares the processes that write images the seconds of its import.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity_sync.fs.flock import LockFile
from trinity_sync.snapshot.slot_cache import Kept, keep
from trinity_sync.snapshot.ticket import failure_path, read_ticket, ticket_path

FILL_S = 600.0
"""Seconds in which a trainer has filled a slot that it had begun to fill."""


@contextmanager
def held(path: Path, *, limit_s: float = FILL_S) -> Iterator[int]:
    """A descriptor of a slot's file while nobody may change its bytes.

    Waits for the lock, ``limit_s`` seconds at most: a trainer holds it no longer than a copy takes.

    Raises:
        FileNotFoundError: there is no such slot.
        LockTimeoutError: the trainer that fills it hangs.
    """
    with _under_lock(path, shared=True, limit_s=limit_s) as lock:
        yield lock.fd


@contextmanager
def locked(path: Path) -> Iterator[memoryview]:
    """The bytes of a slot, read-only, while nobody may change them; as `held` else."""
    with _under_lock(path, shared=True, limit_s=FILL_S) as lock:
        size = os.fstat(lock.fd).st_size
        # unmapped with the last view of it: a slice may outlive the block, the lock does not
        yield memoryview(lock.map(size) if size else b"")


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """The sealed image in the slot at ``path`` is this thread's to write out, or to free.

    Waits for whoever has claimed it, however long that writes. The image may have given way
    meanwhile: look at its ticket again, under the slot's lock too, which is taken after this one.

    Raises:
        FileNotFoundError: no image is sealed there.
    """
    with _under_lock(ticket_path(path), shared=False, limit_s=math.inf):
        yield


@contextmanager
def _under_lock(path: Path, *, shared: bool, limit_s: float) -> Iterator[LockFile]:
    lock = LockFile(path, os.O_RDWR)
    try:
        lock.acquire(shared=shared, limit_s=limit_s)
        yield lock
    finally:
        lock.close()


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
