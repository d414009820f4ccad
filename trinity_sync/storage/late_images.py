"""Free the slots of committed saves; resolve images that were submitted after their commit."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from trinity_sync.fs.direct_io import digest_bytes
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.layout import SERVES_AS
from trinity_sync.snapshot.callable_status import remove_statuses
from trinity_sync.snapshot.job_identity import read_identity
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.slot_lock import free_slot, lock_slot
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.snapshot.ticket import read_ticket
from trinity_sync.storage.manifest import read_run_manifest, write_manifest
from trinity_sync.storage.persist import unpack_image
from trinity_sync.storage.save import Written, mark_image_failed

logger = logging.getLogger(__name__)


def free_committed_slots(spool: JobSpool, save: SaveId, written: Sequence[Written]) -> None:
    """Free this node's slots of a committed save, whose files its tasks here have written.

    Until the next save fills a slot, `load_shards` finds the committed file in it.
    """
    digests = {image: file.record.digest for file in written for image in file.record.images}
    for sealed in spool.read_step(save.run, save.step)[0]:
        if sealed.ticket.kind not in SERVES_AS[save.kind]:
            continue  # it belongs to the checkpoint, even if it shares the image of the sync
        if sealed.ticket.image in digests:
            free_slot(sealed.slot, sealed.ticket.image, digests[sealed.ticket.image])
        elif save.owns(sealed.ticket):
            resolve_late_image(save, sealed)
    remove_statuses(spool, save.run, save.step, save.kind)


def resolve_late_image(save: SaveId, sealed: SealedImage) -> None:
    """Free an image whose save is committed, or mark it as failed.

    An image that equals the committed file byte for byte joins the manifest: it is a state that was
    submitted again. Any other image is marked as failed, and evicted first.

    Raises:
        CommitError: this node lost the commit lock of the root to another node.
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
            files = unpack_image(ticket, content[: ticket.nbytes])
            digests = {path: digest_bytes(each) for path, each in files}
    except FileNotFoundError:
        return
    with acquire_commit_lock(save.root) as lock:
        is_there = read_identity(save.root) == save.identity  # and no other job since
        manifest = read_run_manifest(save.root, save.run, save.step) if is_there else None
        records = [manifest.find_file(path) if manifest else None for path in digests]
        same = [r for r in records if r and r.digest == digests[r.path]]
        if manifest and len(same) == len(digests):
            merged = [replace(r, images=(*r.images, ticket.image)) for r in same]
            lock.require_held()
            write_manifest(save.root, manifest.merge(replace(manifest, files=tuple(merged))))
            free_slot(sealed.slot, ticket.image, digests.get(ticket.path, ""))
            return
    found = "with other content" if manifest else "and has been removed or replaced since"
    reason = (
        f"{ticket.what} is not saved: the {save.kind} of that step was committed in {save.root} "
        f"without it, {found}. Submit a step in one call, and a changed state as another step."
    )
    mark_image_failed(sealed, reason)
    logger.error("%s", reason)
