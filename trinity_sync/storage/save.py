"""What the tasks of a save have written so far, and the marks of a failed one."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.snapshot.callable_status import CallableStatus
from trinity_sync.snapshot.save_id import Export, SaveId
from trinity_sync.snapshot.slot_lock import hold_slot, lock_image
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.snapshot.ticket import failure_path, read_ticket
from trinity_sync.storage.manifest import FileRecord


@dataclass(frozen=True)
class Written:
    """A file that waits under a temporary name for the commit."""

    record: FileRecord
    temporary: str
    """Absolute path; empty for a file that an earlier commit of the step contains already."""
    identity: tuple[int, int]
    """Inode and time of the last write in ns: tells the file from another one of its name."""
    components: tuple[str, ...]
    """All that the rank hands over in this save."""
    seconds: float
    export: Export = ""
    node: str = ""
    """Where it was written."""
    sealed_s: float = 0.0
    """When its submission was sealed, by its node's monotonic clock; 0 for what came with another
    save of the step."""


class Persisted:
    """What one task has made of a save, for its commit.

    No dataclass: Prefect walks through those, value by value, wherever they are handed on.
    """

    def __init__(self, written: Sequence[Written], receipts: Sequence[CallableStatus] = ()) -> None:
        self.written = tuple(written)
        self.receipts = tuple(receipts)


def discard(written: Iterable[Written]) -> None:
    """Remove what waits under temporary names for a commit that does not come."""
    for file in written:
        if file.temporary:
            Path(file.temporary).unlink(missing_ok=True)


def remove_files(paths: Iterable[Path]) -> None:
    """Remove temporary files as far as the file system lets us; what stays, ``reconcile`` finds."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def mark_failed(spool: JobSpool, save: SaveId, reason: str) -> None:
    """Note beside the images of a save that it failed, so that they give way first."""
    for sealed in spool.of_step(save.run, save.step)[0]:
        if save.owns(sealed.ticket):
            mark_image_failed(sealed, reason)


def mark_image_failed(sealed: SealedImage, reason: str) -> None:
    """Note beside one image why it is not saved, unless its slot holds another one by now.

    Raises:
        LockTimeoutError: the trainer that fills the slot hangs.
    """
    with suppress(FileNotFoundError), lock_image(sealed.slot), hold_slot(sealed.slot):
        now = read_ticket(sealed.slot)
        if now and now.image == sealed.ticket.image:
            failure_path(sealed.slot).write_text(reason)
