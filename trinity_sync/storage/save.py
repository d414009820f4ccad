"""What the tasks of a save have written so far, and the marks of a failed one."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.snapshot.callable_status import CallableStatus, remove_request
from trinity_sync.snapshot.save_id import Export, SaveId
from trinity_sync.snapshot.slot_lock import hold_slot, lock_image
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.snapshot.ticket import failure_path, read_ticket
from trinity_sync.storage.manifest_files import FileRecord


@dataclass(frozen=True)
class Written:
    """A file that is written under a temporary name, for the commit to rename."""

    record: FileRecord
    temporary: str
    """Absolute path; empty for a file that an earlier commit of the step contains already."""
    identity: tuple[int, int]
    """Inode and mtime in ns: tell the file from another file of the same name."""
    components: tuple[str, ...]
    """All components that the rank submits in this save."""
    seconds: float
    export: Export = ""
    node: str = ""
    sealed_s: float = 0.0
    """Time at which its submission was sealed, in seconds of the node's monotonic clock; 0 for a
    file of another save of the step."""
    submitted_at: float = 0.0
    """The same in seconds since the epoch; 0 likewise."""
    stall_s: float = 0.0
    """Seconds for which its submission stalled the rank's training thread."""


class Persisted:
    """Files and statuses that one persist task passes to the commit task.

    Not a dataclass, because Prefect walks through dataclasses value by value in task arguments.
    """

    def __init__(self, written: Sequence[Written], statuses: Sequence[CallableStatus] = ()) -> None:
        self.written = tuple(written)
        self.statuses = tuple(statuses)


def discard(written: Iterable[Written]) -> None:
    """Remove files that were written for a commit that does not happen."""
    for file in written:
        if file.temporary:
            Path(file.temporary).unlink(missing_ok=True)


def remove_files(paths: Iterable[Path]) -> None:
    """Remove temporary files where possible; ``reconcile`` finds the others."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def mark_failed(spool: JobSpool, save: SaveId, reason: str) -> None:
    """Mark the images of a save as failed, so that they are evicted first; drop its request."""
    remove_request(spool, save.run, save.step, save.kind)
    for sealed in spool.read_step(save.run, save.step)[0]:
        if save.owns(sealed.ticket):
            mark_image_failed(sealed, reason)


def mark_image_failed(sealed: SealedImage, reason: str) -> None:
    """Record why an image is not saved, unless its slot holds another image by now.

    Raises:
        LockTimeoutError: the trainer that fills the slot hangs.
    """
    with suppress(FileNotFoundError), lock_image(sealed.slot), hold_slot(sealed.slot):
        now = read_ticket(sealed.slot)
        if now and now.image == sealed.ticket.image:
            failure_path(sealed.slot).write_text(reason)
