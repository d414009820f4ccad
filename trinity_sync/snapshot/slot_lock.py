"""Read a slot under its lock, and free it.

Readers share a slot's lock: the task that persists the image, a restore, a weight reader. Only the
stager takes it exclusively. Persisting and freeing an image are exclusive among themselves by the
lock of its ticket, so a slow reader delays neither.

The module does not import torch, which saves the processes that persist images seconds of import.
"""

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

from trinity_sync.fs.lock_file import LockFile
from trinity_sync.snapshot.slot_cache import CachedFile, write_cached_file
from trinity_sync.snapshot.ticket import failure_path, read_ticket, ticket_path

FILL_S = 600.0
"""Seconds within which a trainer has filled a slot."""


@contextmanager
def hold_slot(path: Path, *, limit_s: float = FILL_S) -> Iterator[int]:
    """Yield a descriptor of a slot's file, whose bytes cannot change within the block.

    Raises:
        FileNotFoundError: there is no such slot.
        LockTimeoutError: the trainer that fills it hangs.
    """
    with _under_lock(path, shared=True, limit_s=limit_s) as lock:
        yield lock.fd


@contextmanager
def lock_slot(path: Path) -> Iterator[memoryview]:
    """Yield the bytes of a slot, read-only; waits and raises as `hold_slot`."""
    with _under_lock(path, shared=True, limit_s=FILL_S) as lock:
        size = os.fstat(lock.fd).st_size
        # unmapped with the last view of it: a slice may outlive the block, the lock does not
        yield memoryview(lock.map(size) if size else b"")


def lock_image(path: Path) -> AbstractContextManager[object]:
    """Hold the ticket's lock of the sealed image in the slot at ``path``, to persist or to free it.

    Waits for another holder without a limit. The image may have been evicted meanwhile: read its
    ticket again, under the slot's lock as well, which is acquired after this one.

    Raises:
        FileNotFoundError: no image is sealed there.
    """
    return _under_lock(ticket_path(path), shared=False, limit_s=math.inf)


@contextmanager
def _under_lock(path: Path, *, shared: bool, limit_s: float) -> Iterator[LockFile]:
    with closing(LockFile(path, os.O_RDWR)) as lock:
        lock.acquire(shared=shared, limit_s=limit_s)
        yield lock


def free_slot(path: Path, image: str, digest: str = "") -> None:
    """Free the slot at ``path`` if it still holds ``image``, as named in its ticket.

    The ``digest`` of the committed file is recorded beside the slot, so that the file can be read
    from the slot until another image fills it.
    """
    # a file that is missing was freed before, or removed with the trainer
    with suppress(FileNotFoundError), lock_image(path), hold_slot(path):
        ticket = read_ticket(path)
        if ticket and ticket.image == image:
            if digest and ticket.form == "file":
                kept = CachedFile(ticket.step, ticket.path, ticket.nbytes, digest)
                with suppress(OSError):  # without the record, the file is read from disk
                    write_cached_file(path, kept)
            ticket_path(path).unlink(missing_ok=True)
            failure_path(path).unlink(missing_ok=True)
