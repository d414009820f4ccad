"""Images that wait on this node for nobody: what a worker does about them at every poll.

For those that nobody asked a flow run for, since the trainer died first or the server was away, it
asks. Those of a commit whose process died before its end are freed, when the rest of the commit is
done. Those of a cancelled save give way to new ones.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import FormatError, TrinitySyncError
from trinity_sync.layout import Kind
from trinity_sync.snapshot.slot_lock import release
from trinity_sync.snapshot.spool import JobSpool, Sealed, job_spools
from trinity_sync.snapshot.ticket import components_of
from trinity_sync.storage.commit import finish_interrupted, settle_late_image
from trinity_sync.storage.manifest import Manifest, own_manifest
from trinity_sync.storage.persist import Save, mark_failed

logger = logging.getLogger(__name__)


def stranded(
    spool: Path, *, grace_s: float = 2.0, clock: Callable[[], float] = time.time
) -> list[SaveRequest]:
    """Saves whose images wait on this node, oldest first.

    Commits that were broken off after their manifest are finished, and their slots freed.

    Args:
        spool: the node's spool, with one folder a job.
        grace_s: seconds since the last seal that are left to the trainer to ask by itself, and
            since the commit that are left to whoever commits to free the slots.
        clock: seconds since the epoch.
    """
    requests: list[SaveRequest] = []
    for job in job_spools(spool):
        try:
            requests += _stranded_in(job, grace_s, clock() - grace_s)
        except (OSError, TrinitySyncError) as error:  # other jobs have their turn
            warn_once(f"images in {job.folder} cannot be looked at: {error}")
    return sorted(requests, key=lambda request: (request.root, request.run, request.step))


def _stranded_in(job: JobSpool, grace_s: float, before: float) -> Iterator[SaveRequest]:
    """The saves of one job whose last seal is ``grace_s`` seconds ago.

    Those that were committed ``before`` (since the epoch) are finished.
    """
    sealed, bad = job.tickets()
    for error in bad:
        warn_once(str(error))
    now = time.monotonic()
    saves: dict[tuple[str, int, int, Kind, tuple[str, ...]], list[Sealed]] = defaultdict(list)
    for image in sealed:
        ticket = image.ticket
        saves[ticket.root, ticket.run, ticket.step, ticket.kind, ticket.roles].append(image)
    for (root, run, step, kind, roles), images in saves.items():
        save = Save(root, run, step, kind, roles, images[0].ticket.run_key)
        try:
            manifest = own_manifest(root, run, step)
        except FormatError as error:
            warn_once(str(error))
            continue
        if manifest and manifest.holds(kind, roles):
            _finish(save, manifest, images, before)
        elif all(image.ticket.age_s(now) > grace_s and not image.failed for image in images):
            yield _request(root, run, step, kind, images)


@lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Say something that the next look, a few seconds later, would find again."""
    logger.warning("%s", message)


def let_give_way(spool: Path, parameters: Mapping[str, Any], reason: str) -> None:
    """Note beside the images of a save that ended that new ones may have their slots at once.

    Args:
        spool: this node's, with one folder a job.
        parameters: those of the flow run; nothing is done for one that is no save, or that of a
            trainer of another release.
        reason: why it ended.
    """
    try:
        request = SaveRequest.model_validate(parameters["request"])
    except (KeyError, ValidationError, FormatError):
        return
    save = Save(request.root, request.run, request.step, request.kind, request.roles)
    try:
        mark_failed(JobSpool(spool / request.job), save, reason)
    except (OSError, TrinitySyncError) as error:
        logger.warning("%s keeps its slots for a while: %s", save, error)


def settle_late(spool: Path, request: SaveRequest) -> None:
    """Settle the images of a save whose flow run has completed: no other run will commit them.

    Args:
        spool: this node's, with one folder a job.
        request: of the save.
    """
    save = Save(
        request.root, request.run, request.step, request.kind, request.roles, request.run_key
    )
    try:
        for sealed in JobSpool(spool / request.job).of_step(save.run, save.step)[0]:
            if save.owns(sealed.ticket):
                settle_late_image(save, sealed)
    except (OSError, TrinitySyncError) as error:
        warn_once(f"images of {save} cannot be compared with its commit: {error}")


def _finish(save: Save, manifest: Manifest, images: list[Sealed], before: float) -> None:
    """Free the images that are part of a commit, and mark those that are not."""
    if manifest.committed_at >= before:
        return  # whoever commits it frees the slots, and notes what they hold
    digests = {image: record.digest for record in manifest.files for image in record.images}
    # what was compared and is not part of it waits to be evicted, perhaps for long
    unsettled = [each for each in images if each.ticket.image in digests or not each.failed]
    if not unsettled:
        return
    try:
        finish_interrupted(save)
        for image in unsettled:
            if image.ticket.image in digests:
                release(image.slot, image.ticket.image, digests[image.ticket.image])
            else:
                settle_late_image(save, image)
    except (OSError, TrinitySyncError) as error:  # other saves have their turn
        warn_once(f"{save} is committed, but cannot be finished: {error}")


def _request(root: str, run: int, step: int, kind: Kind, images: list[Sealed]) -> SaveRequest:
    return SaveRequest(
        root=root,
        step=step,
        run=run,
        run_key=images[0].ticket.run_key,
        kind=kind,
        roles=images[0].ticket.roles,
        components=components_of([image.ticket for image in images]),
        keep=max(image.ticket.keep for image in images),
    )
