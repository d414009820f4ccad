"""Free the slots of committed saves; compare an image that is not part of its commit with it."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from trinity_sync.fs.direct_io import digest_of_bytes
from trinity_sync.fs.locks import one_change_at_a_time
from trinity_sync.layout import (
    SERVES_AS,
)
from trinity_sync.snapshot.callable_status import remove_statuses
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.slot_lock import free_slot, lock_slot
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.snapshot.ticket import read_ticket
from trinity_sync.storage.manifest import (
    read_own_manifest,
    write_manifest,
)
from trinity_sync.storage.persist import files_in
from trinity_sync.storage.save import Written, mark_image_failed

logger = logging.getLogger(__name__)


def free_committed_slots(spool: JobSpool, save: SaveId, written: Sequence[Written]) -> None:
    """Free this node's slots of a committed save.

    Until the next save fills a slot, `load_shards` finds the committed file there.

    Args:
        spool: of the job on this node.
        save: which is committed.
        written: what its tasks on this node have written.
    """
    digests = {image: file.record.digest for file in written for image in file.record.images}
    for sealed in spool.of_step(save.run, save.step)[0]:
        if sealed.ticket.kind not in SERVES_AS[save.kind]:
            continue  # the checkpoint's, which may be sealed in the image of its sync
        if sealed.ticket.image in digests:
            free_slot(sealed.slot, sealed.ticket.image, digests[sealed.ticket.image])
        elif save.owns(sealed.ticket):
            resolve_late_image(save, sealed)
    remove_statuses(spool, save.run, save.step, save.kind)


def resolve_late_image(save: SaveId, sealed: SealedImage) -> None:
    """Free an image whose save is committed, or say that it is not part of it.

    One that holds what is committed, byte for byte, joins the manifest: a state that was submitted
    again. No other is freed; it is marked as failed, and so the first to be evicted.

    Raises:
        CommitError: this node was cut off, and another one may have the lock of the root.
        OSError: the root cannot be read or written.
    """
    if sealed.failed:
        return
    ticket = sealed.ticket
    try:
        with lock_slot(sealed.slot) as content:
            now = read_ticket(sealed.slot)
            if now is None or now.image != ticket.image:
                return
            files = files_in(ticket, content[: ticket.nbytes])
            digests = {path: digest_of_bytes(each) for path, each in files}
    except FileNotFoundError:
        return
    with one_change_at_a_time(save.root) as lock:
        manifest = read_own_manifest(save.root, save.run, save.step)
        records = [manifest.file(path) if manifest else None for path in digests]
        same = [r for r in records if r and r.digest == digests[r.path]]
        if manifest and len(same) == len(digests):
            joined = [replace(r, images=(*r.images, ticket.image)) for r in same]
            lock.require_ours()
            write_manifest(save.root, manifest.joined(replace(manifest, files=tuple(joined))))
            free_slot(sealed.slot, ticket.image, digests.get(ticket.path, ""))
            return
    there = "with another content" if manifest else "and has been removed or replaced since"
    reason = (
        f"{ticket.what} is not saved: the {save.kind} of that step was committed in {save.root} "
        f"without it, {there}. Submit all of a step in one call, and a state that has changed as "
        "another step"
    )
    mark_image_failed(sealed, reason)
    logger.error("%s", reason)
