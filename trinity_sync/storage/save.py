"""What the tasks of a save have written so far, and the marks of a failed one."""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import LockTimeoutError
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, replace_file, walk_files
from trinity_sync.fs.mounts import read_file_system_time
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.identity import Export, SaveId
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.snapshot.ticket import FILL_S, failure_path, hold_slot, lock_image, read_ticket
from trinity_sync.storage.manifest import FileRecord
from trinity_sync.storage.save_functions import CallableStatus, remove_request
from trinity_sync.storage.save_timing import SaveTiming, Stall


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
    replicated: tuple[str, ...] = ()
    """Components of this save that rank 0 alone submits."""
    attached: str = ""
    """Path of the file in `attaching_folder` that this file is a link to; empty for others."""
    export: Export = ""
    keep: int = 0
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
    with suppress(OSError):  # they cannot be listed
        for path in paths:
            with suppress(OSError):
                path.unlink()


def is_being_written(root: str | Path, step: int, *, within_s: float) -> bool:
    """Return whether a save has written temporary files of a step within some seconds.

    Those beside the manifest are of a commit, which has a lock of its own. Raises as `walk_files`.
    """
    folder = step_folder(root, step)
    for path in walk_files(folder, f".*{TEMPORARY_SUFFIX}"):
        with suppress(FileNotFoundError):  # renamed or removed meanwhile
            changed_at = read_change_time(path) if path.parent != folder else -math.inf
            if changed_at > read_file_system_time(root) - within_s:
                return True
    return False


def read_change_time(path: Path) -> float:
    """Return when a file was written, or got its name as another one of an older file."""
    return path.lstat().st_ctime


def mark_failed(spool: JobSpool, save: SaveId, reason: str, *, limit_s: float = math.inf) -> None:
    """Mark the images of a save as failed, so that they are evicted first; drop its request.

    With a ``limit_s``, images that are marked, or held for so long by what persists them, stay.
    """
    images = spool.read_step(save.run, save.step)[0]  # first: it may be of another release
    remove_request(spool, save.run, save.step, save.kind)
    for sealed in images:
        if save.owns(sealed.ticket) and (limit_s == math.inf or not sealed.failed):
            try:
                mark_image_failed(sealed, reason, limit_s=limit_s)
            except LockTimeoutError:
                if limit_s == math.inf:
                    raise


def mark_image_failed(sealed: SealedImage, reason: str, *, limit_s: float = math.inf) -> None:
    """Record why an image is not saved, unless its slot holds another image by now.

    Raises:
        LockTimeoutError: the trainer that fills the slot hangs, or what persists it does.
    """
    held = lock_image(sealed.slot, limit_s=limit_s)
    with suppress(FileNotFoundError), held, hold_slot(sealed.slot, limit_s=min(limit_s, FILL_S)):
        now = read_ticket(sealed.slot)
        if now and now.image == sealed.ticket.image:
            try:
                replace_file(failure_path(sealed.slot), reason, sync=False, own_name=False)
            except OSError:  # shared memory is full: an empty file takes none
                failure_path(sealed.slot).touch()


def measure_save(
    save: SaveId,
    written: Sequence[Written],
    started_at: float,
    persisted_at: float,
    committed_at: float,
    *,
    by_saver: bool,
) -> SaveTiming:
    """Return how long a save took. All times are seconds since the epoch.

    ``started_at`` is when its flow run started, ``persisted_at`` when all files were durable; 0 if
    that is unknown. ``committed_at`` is when the manifest is written.
    """
    own = [file for file in written if file.submitted_at]  # others are of another save of the step
    submitted_at = max((file.submitted_at for file in own), default=0.0)
    slowest = {file.record.role: file for file in sorted(own, key=lambda file: file.stall_s)}
    return SaveTiming(
        kind=save.kind,
        roles=save.roles,
        stalls=tuple(
            Stall(role, file.record.rank, file.stall_s) for role, file in sorted(slowest.items())
        ),
        submitted_at=submitted_at or started_at or committed_at,
        # the clocks of two nodes may disagree
        queue_s=max(started_at - submitted_at, 0.0) if started_at and submitted_at else 0.0,
        write_s=max(persisted_at - started_at, 0.0),
        commit_s=max(committed_at - persisted_at, 0.0) if persisted_at else 0.0,
        nbytes=sum(file.record.nbytes for file in written if file.temporary),
        ranks=len({(file.record.role, file.record.rank) for file in own}),
        nodes=len({file.node for file in own}),
        by_saver=by_saver,
    )
