"""What a save has before its commit: images that wait, and files under temporary names.

Models that are exported into a step, after its commit, have their folders elsewhere meanwhile.

`gather_images` waits for the images of a component on a node, and fails early for evicted ones.
Between two looks, it reads tickets and manifest only if the spool's folder or the manifest changed.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trinity_sync.errors import EvictedError, ManifestError, MissingShardsError
from trinity_sync.fs.atomic import (
    TEMPORARY_SUFFIX,
    ReadOnChange,
    lengthen_pauses,
    list_uncached,
    remove_tree,
    walk_files,
)
from trinity_sync.fs.file_system import is_recent, read_file_system_time
from trinity_sync.layout import MANIFEST, PRIVATE_FOLDER, step_folder
from trinity_sync.snapshot.identity import Export, SaveId
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.snapshot.ticket import Ticket
from trinity_sync.storage.manifest import FileRecord, Manifest, read_manifest
from trinity_sync.storage.placement import NodeShards, describe_ranks
from trinity_sync.storage.runs import RunEnd
from trinity_sync.storage.save_functions import FunctionStatus
from trinity_sync.storage.save_timing import refuse_removed


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
    metrics: dict[str, float] = field(default_factory=dict, hash=False)
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

    def __init__(self, written: Sequence[Written], statuses: Sequence[FunctionStatus] = ()) -> None:
        self.written = tuple(written)
        self.statuses = tuple(statuses)


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
            # when it was written, or got its name as another one of an older file
            changed_at = path.lstat().st_ctime if path.parent != folder else -math.inf
            if is_recent(changed_at, read_file_system_time(root), within_s):
                return True
    return False


_RoleRank = tuple[str, int]


def gather_images(
    shards: NodeShards,
    save: SaveId,
    component: str,
    rank_timeout_s: float,
    clock: Callable[[], float],
) -> tuple[list[SealedImage], list[Written]]:
    """Return the images to write, and the files that a commit of the same step contains already.

    The images are awaited for ``rank_timeout_s``.

    Raises:
        MissingShardsError: a rank did not submit its image in time.
        EvictedError: the image of a rank was evicted.
        TicketError: a ticket is torn.
        FormatError: the job's spool is of another release.
        SaveError: the save was committed and removed before.
    """
    spool = JobSpool(Path(shards.spool))
    tickets = ReadOnChange(spool.folder, spool.tickets)
    ranks = {rank for of_role in shards.ranks.values() for rank in of_role}
    manifests = ReadOnChange(
        save.folder / MANIFEST, lambda: read_manifest(save.root, save.step, ranks=ranks)
    )
    deadline = clock() + rank_timeout_s
    later: set[_RoleRank] = set()
    is_first = True
    pauses, end = lengthen_pauses(), RunEnd(save.root, save.run)
    while True:
        waiting, bad = tickets.get()
        sealed = [
            i
            for i in waiting
            if save.owns(i.ticket) or (save.is_of_step(i.ticket) and i.ticket.kind != save.kind)
        ]
        manifest, is_known = None, False
        with suppress(ManifestError, OSError):  # read again the next time
            found_now = manifests.get()
            manifest = found_now if found_now and found_now.run == save.run else None
            is_known = True
        overdue = clock() >= deadline or (not is_first and end.is_over())
        found = _select(shards, save, component, sealed, manifest, overdue)
        if not found.missing:
            return found.images, found.committed
        # perhaps a retry after its step was removed, or all but the weights of it
        if is_first and is_known and not sealed and (manifest is None or manifest.removed):
            refuse_removed(save)
        is_first &= not is_known
        gone = [each for each in found.missing if each in later - found.awaited]
        if gone:  # a rank seals its steps in order, so these can no longer come
            raise EvictedError(
                f"{save} is not committed: {component} of {_describe(gone)} was evicted from "
                f"{shards.spool} on node {shards.node} for later steps. Later saves are unaffected."
            )
        # used by the next iteration, which finds all images sealed by now that were not evicted
        later = _find_ranks_past(save, [image.ticket for image in waiting])
        if overdue:
            for error in bad:
                if error.component == component and (error.role, error.rank) in found.missing:
                    raise error
            until = "before its run ended" if end.is_over() else f"within {rank_timeout_s:g} s"
            raise MissingShardsError(
                f"{save} is not committed: {component} of {_describe(found.missing)} was not "
                f"submitted on node {shards.node} {until}. Check the trainer's log: its process "
                "died, its image was evicted, or it did not call save, as every rank has to. "
                f"Submitted images are in {spool.folder}; later saves are unaffected."
            )
        time.sleep(next(pauses))


@dataclass
class _Found:
    """What one look finds of a component."""

    images: list[SealedImage] = field(default_factory=list)
    """To write."""
    committed: list[Written] = field(default_factory=list)
    missing: list[_RoleRank] = field(default_factory=list)
    awaited: set[_RoleRank] = field(default_factory=set)
    """Those of the missing whose image the sync of the step writes."""


def _select(
    shards: NodeShards,
    save: SaveId,
    component: str,
    sealed: Sequence[SealedImage],
    manifest: Manifest | None,
    overdue: bool,
) -> _Found:
    """Decide for each rank of the node between its images and the files of the manifest."""
    images: dict[_RoleRank, list[SealedImage]] = defaultdict(list)
    uncommitted: set[str] = set()
    for image in sealed:
        images[image.ticket.role, image.ticket.rank].append(image)
        if save.owns(image.ticket) and image.ticket.component == component:
            uncommitted.add(image.ticket.image)
    files: dict[_RoleRank, list[FileRecord]] = defaultdict(list)
    is_retry = False
    if manifest:
        uncommitted -= manifest.images
        is_retry = manifest.has_kind(save.kind, save.roles) and not uncommitted
        for file in manifest.files:
            if file.component == component:
                files[file.role, file.rank].append(file)
    found = _Found()
    for role, rank in [(role, rank) for role, ranks in shards.ranks.items() for rank in ranks]:
        if rank and component == "metadata":
            continue
        done = files[role, rank]
        if is_retry:
            found.committed += map(_as_written, done)
            continue
        own = [image.ticket for image in images[role, rank] if save.owns(image.ticket)]
        if not own:
            found.missing.append((role, rank))
            continue
        if component not in own[0].components:
            continue
        # what a sync that was submitted again has in the place of the shared image is no part
        shared = {t.shared[component] for t in own if component in t.shared}
        if shared:
            done = [file for file in done if shared.intersection(file.images)]
        first = _find_first(save, component, images[role, rank], shared)
        # the sync of the step writes this image itself: wait for its commit
        theirs = first and first.ticket.kind != save.kind and not first.failed
        if first and first.ticket.image in uncommitted:
            found.images.append(first)  # also a second submission: the commit compares the two
        elif done:
            found.committed += [_as_written(record, own[0]) for record in done]
        elif first and (not theirs or overdue):
            found.images.append(first)
        else:
            found.missing.append((role, rank))
            if first:
                found.awaited.add((role, rank))
    return found


def _find_first(
    save: SaveId, component: str, of_rank: Iterable[SealedImage], shared: Collection[str]
) -> SealedImage | None:
    """Return a rank's first image of a step that was submitted twice: submissions are not mixed."""
    its = (
        image
        for image in of_rank
        if image.ticket.component == component
        and (not shared or save.owns(image.ticket) or image.ticket.image in shared)
    )
    return min(its, key=lambda i: (i.ticket.kind != save.kind, i.ticket.monotonic_s), default=None)


def _describe(ranks: Iterable[_RoleRank]) -> str:
    by_role: dict[str, list[int]] = defaultdict(list)
    for role, rank in ranks:
        by_role[role].append(rank)
    return ", ".join(f"role {role} {describe_ranks(of_role)}" for role, of_role in by_role.items())


def _find_ranks_past(save: SaveId, tickets: Sequence[Ticket]) -> set[_RoleRank]:
    """Return the roles and ranks that sealed a later step since this save started on this node.

    Images of an earlier start of the same run are older than this save and prove nothing.
    """
    run = [t for t in tickets if (t.run, t.run_key) == (save.run, save.run_key)]
    own = [t.sealed_at for t in run if save.owns(t)]
    begun = min(own, default=math.inf)
    return {(t.role, t.rank) for t in run if t.step > save.step and t.sealed_at > begun}


def _as_written(record: FileRecord, of: Ticket | None = None) -> Written:
    components, replicated = (of.components, of.replicated) if of else ((), ())
    return Written(record, "", (0, 0), components, 0.0, replicated)


def exports_folder(root: str | Path) -> Path:
    """Return the folder of exports into steps in flight."""
    return Path(root) / PRIVATE_FOLDER / "exports"


def list_export_files(root: str | Path, step: int) -> list[Path]:
    """Return the files of exports into a step, in flight or interrupted."""
    return list_uncached(exports_folder(root), f"{step_folder(root, step).name}.*")


def remove_export_files(root: str | Path, step: int) -> None:
    """Remove all files that exports into a removed step left."""
    for path in list_export_files(root, step):
        with suppress(OSError):
            remove_tree(path)
