"""Gather the images of a component on a node, and fail early for evicted images.

Between two looks, tickets and manifest are read only if the spool's folder or the manifest changed.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from trinity_sync.errors import EvictedError, MissingShardsError, TicketError
from trinity_sync.fs.atomic import ReadOnChange, lengthen_pauses
from trinity_sync.layout import MANIFEST
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.snapshot.ticket import Ticket
from trinity_sync.storage.manifest import FileRecord, Manifest, read_manifest, read_run_manifest
from trinity_sync.storage.placement import NodeShards, describe_ranks
from trinity_sync.storage.runs import RunEnd
from trinity_sync.storage.save import Written
from trinity_sync.storage.save_timing import refuse_removed


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
    wanted = {
        role: [rank for rank in ranks if rank == 0 or component != "metadata"]
        for role, ranks in shards.ranks.items()
    }
    tickets = ReadOnChange(spool.folder, spool.tickets)
    ranks = {rank for of_role in shards.ranks.values() for rank in of_role}
    manifests = ReadOnChange(
        save.folder / MANIFEST, lambda: read_manifest(save.root, save.step, ranks=ranks)
    )
    deadline = clock() + rank_timeout_s
    later: set[tuple[str, int]] = set()
    is_first = True
    pauses, end = lengthen_pauses(), RunEnd(save.root, save.run)
    while True:
        waiting, bad = tickets.get()
        sealed = [
            i
            for i in waiting
            if save.owns(i.ticket) or (save.is_of_step(i.ticket) and i.ticket.kind != save.kind)
        ]
        manifest = read_run_manifest(
            save.root, save.run, save.step, read=lambda *_: manifests.get()
        )
        known = manifest.images if manifest else frozenset()
        uncommitted = {
            image.ticket.image
            for image in sealed
            if save.owns(image.ticket) and image.ticket.component == component
        }.difference(known)
        if manifest and manifest.has_kind(save.kind, save.roles) and not uncommitted:  # a retry
            mine = [file for file in manifest.files if file.component == component]
            return [], [_as_written(f) for f in mine if f.rank in wanted.get(f.role, ())]
        overdue = clock() >= deadline or end.is_over()
        by_rank: dict[tuple[str, int], list[SealedImage]] = defaultdict(list)
        for image in sealed:
            by_rank[image.ticket.role, image.ticket.rank].append(image)
        images: list[SealedImage] = []
        committed: list[Written] = []
        missing: dict[str, list[int]] = defaultdict(list)
        awaited: set[tuple[str, int]] = set()
        for role, rank in [(role, rank) for role, ranks in wanted.items() for rank in ranks]:
            of_rank = by_rank[role, rank]
            own = [image.ticket for image in of_rank if save.owns(image.ticket)]
            if not own:
                missing[role].append(rank)
                continue
            if component not in own[0].components:
                continue
            # what a sync that was submitted again has in the place of the shared image is no part
            shared = {t.shared[component] for t in own if component in t.shared}
            done = [
                record
                for record in _committed(manifest, role, component, rank)
                if not shared or shared.intersection(record.images)
            ]
            its = [
                image
                for image in of_rank
                if image.ticket.component == component
                and (not shared or save.owns(image.ticket) or image.ticket.image in shared)
            ]
            # the first images of a step that was submitted twice, or submissions would be mixed
            found = min(
                its,
                key=lambda i: (i.ticket.kind != save.kind, i.ticket.monotonic_s),
                default=None,
            )
            # the sync of the step writes this image itself: wait for its commit
            theirs = found and found.ticket.kind != save.kind and not found.failed
            if found and found.ticket.image in uncommitted:
                images.append(found)  # also a second submission: the commit compares the two
            elif done:
                committed += [_as_written(record, own[0]) for record in done]
            elif found and (not theirs or overdue):
                images.append(found)
            else:
                missing[role].append(rank)
                if found:
                    awaited.add((role, rank))
        if not missing:
            return images, committed
        if is_first and not sealed and not manifest:  # perhaps a retry after its step was removed
            refuse_removed(save)
        is_first = False
        _refuse_evicted(shards, save, component, missing, later - awaited)
        # used by the next iteration, which finds all images sealed by now that were not evicted
        later = _find_ranks_past(save, [image.ticket for image in waiting])
        if overdue:
            for error in bad:
                if not isinstance(error, TicketError):
                    continue
                if error.component == component and error.rank in missing.get(error.role, ()):
                    raise error
            until = "before its run ended" if end.is_over() else f"within {rank_timeout_s:g} s"
            lacking = ", ".join(
                f"role {role} {describe_ranks(ranks)}" for role, ranks in missing.items()
            )
            raise MissingShardsError(
                f"{save} is not committed: {component} of {lacking} was not submitted on node "
                f"{shards.node} {until}. Check the trainer's log: its process "
                "died, its image was evicted, or it did not call save, as every rank has to. "
                f"Submitted images are in {spool.folder}; later saves are unaffected."
            )
        time.sleep(next(pauses))


def _find_ranks_past(save: SaveId, tickets: Sequence[Ticket]) -> set[tuple[str, int]]:
    """Return the roles and ranks that sealed a later step since this save started on this node.

    Images of an earlier start of the same run are older than this save and prove nothing.
    """
    run = [t for t in tickets if (t.run, t.run_key) == (save.run, save.run_key)]
    own = [t.sealed_at for t in run if save.owns(t)]
    begun = min(own, default=math.inf)
    return {(t.role, t.rank) for t in run if t.step > save.step and t.sealed_at > begun}


def _refuse_evicted(
    shards: NodeShards,
    save: SaveId,
    component: str,
    missing: Mapping[str, Sequence[int]],
    later: Collection[tuple[str, int]],
) -> None:
    """Fail for images that can no longer come: a rank seals its steps in order.

    ``missing`` has the ranks without an image to write, ``later`` is from `_find_ranks_past`.

    Raises:
        EvictedError: a rank is in both.
    """
    evicted = {role: [r for r in ranks if (role, r) in later] for role, ranks in missing.items()}
    if any(evicted.values()):
        what = ", ".join(
            f"role {role} {describe_ranks(ranks)}" for role, ranks in evicted.items() if ranks
        )
        raise EvictedError(
            f"{save} is not committed: {component} of {what} was evicted from {shards.spool} on "
            f"node {shards.node} for later steps. Later saves are unaffected."
        )


def _committed(manifest: Manifest | None, role: str, component: str, rank: int) -> list[FileRecord]:
    if manifest is None:
        return []
    wanted = (role, component, rank)
    return [f for f in manifest.files if (f.role, f.component, f.rank) == wanted]


def _as_written(record: FileRecord, of: Ticket | None = None) -> Written:
    components, replicated = (of.components, of.replicated) if of else ((), ())
    return Written(record, "", (0, 0), components, 0.0, replicated)
