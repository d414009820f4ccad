"""Recover orphaned images: sealed images on this node that no flow run will persist.

If the trainer died before it requested the flow run, or the server was away, the run is requested.
If the save was cancelled or failed, its images are marked, so that later saves evict them first.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
from pydantic import ValidationError

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import FormatError, TrinitySyncError
from trinity_sync.orchestration.job_registry import ANSWER_S
from trinity_sync.orchestration.root_threads import RootVisits, run_in_thread
from trinity_sync.pipeline.pending import GRACE_S, find_pending_saves
from trinity_sync.snapshot.spool import JobSpool, list_job_spools
from trinity_sync.storage.save import mark_failed

logger = logging.getLogger(__name__)

MARK_S = 5.0
"""Seconds to wait for `allow_eviction`: a task on a file system that hangs holds its images."""

_visits = RootVisits("orphaned images")


def find_orphaned_saves(
    spool: Path, *, grace_s: float = GRACE_S, clock: Callable[[], float] = time.time
) -> list[SaveRequest]:
    """Return `find_pending_saves` of all jobs, oldest first of each.

    Jobs whose roots do not answer are left out.
    """
    jobs = defaultdict(list)  # an earlier job of a root may have a folder as well
    for job in list_job_spools(spool):
        jobs[job.root or job.folder].append(job)
    found = _visits.visit(
        jobs,
        lambda root: [
            request
            for job in jobs[root]
            for request in find_pending_saves(job, grace_s=grace_s, clock=clock)
        ],
        limit_s=ANSWER_S,
    )
    return [request for requests in found.values() for request in requests]


async def try_allow_eviction(spool: Path, parameters: Mapping[str, Any], reason: str) -> None:
    """Call `allow_eviction`, and wait no longer than `MARK_S` for it."""
    with anyio.move_on_after(MARK_S):
        await run_in_thread(allow_eviction, spool, parameters, reason)


def allow_eviction(spool: Path, parameters: Mapping[str, Any], reason: str) -> None:
    """Mark the images of a save that ended without a commit, so that later saves evict them first.

    ``parameters`` are the flow run's. A run of another flow, or of a trainer of another release, is
    ignored.
    """
    try:
        request = SaveRequest.model_validate(parameters["request"])
    except (KeyError, ValidationError, FormatError):
        return
    try:
        mark_failed(JobSpool(spool / request.job), request.save, reason)
    except (OSError, TrinitySyncError) as error:
        logger.warning("cannot mark the images of %s for eviction: %s", request.save, error)
