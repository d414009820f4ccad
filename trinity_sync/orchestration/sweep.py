"""Sealed images that nobody asked a flow run for: the trainer died first, or the server was away.

A worker looks for them at its start and at every poll, on the node that it runs on.
"""

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from trinity_sync.layout import COMPONENTS, Kind
from trinity_sync.request import SaveRequest
from trinity_sync.snapshot.reading import release
from trinity_sync.snapshot.spool import JobSpool, Sealed, job_spools
from trinity_sync.storage.manifest import is_committed

logger = logging.getLogger(__name__)


def stranded(
    spool: Path, *, grace_s: float = 2.0, clock: Callable[[], float] = time.time
) -> list[SaveRequest]:
    """Saves whose images wait on this node, oldest first.

    Slots of saves that are committed already, by a flow that died before it freed them, are freed.

    Args:
        spool: the node's spool, with one folder a job.
        grace_s: seconds since the last seal that are left to the trainer to ask by itself.
        clock: seconds since the epoch.
    """
    requests = []
    for job in job_spools(spool):
        sealed, bad = job.tickets()
        for error in bad:
            logger.warning("%s", error)
        saves: dict[tuple[str, int, int, Kind], list[Sealed]] = defaultdict(list)
        for image in sealed:
            ticket = image.ticket
            saves[ticket.root, ticket.run, ticket.step, ticket.kind].append(image)
        for (root, run, step, kind), images in saves.items():
            if is_committed(root, run, step, kind):
                for image in images:
                    release(image.slot, image.ticket.image)
            elif not any(image.failed for image in images) and all(
                clock() - image.ticket.sealed_at > grace_s for image in images
            ):
                requests.append(_request(job, root, run, step, kind, images))
    return sorted(requests, key=lambda request: (request.root, request.run, request.step))


def _request(
    job: JobSpool, root: str, run: int, step: int, kind: Kind, images: list[Sealed]
) -> SaveRequest:
    named = {name for image in images for name in image.ticket.components}
    return SaveRequest(
        root=root,
        step=step,
        run=run,
        run_key=images[0].ticket.run_key,
        kind=kind,
        roles=images[0].ticket.roles,
        components=tuple(name for name in COMPONENTS if name in named),
        spools={socket.gethostname(): str(job.folder)},
    )
