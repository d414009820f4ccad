"""Recover zombie runs and orphaned images of a node at every poll, and tell what has failed."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import UUID

from trinity_sync.client.prefect_api import FAILED, UNDER_WAY, FlowRun, PrefectApi
from trinity_sync.client.save_trigger import SERVER
from trinity_sync.client.saver_control import SERVED
from trinity_sync.errors import PrefectApiError, RequestRefusedError, warn_once
from trinity_sync.fs.locks import try_acquire_file_lock
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.orchestration.job_registry import ANSWER_S, is_allowed
from trinity_sync.orchestration.recovery.flow_runs import (
    LATE_S,
    end_unreported_tasks,
    recover_zombie,
    retry_crashed,
    try_tell_failure,
)
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.pipeline.pending import find_pending_saves
from trinity_sync.saves.pending_save import compare_late_images
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.spool import JobSpool, list_job_spools, try_run_lock

logger = logging.getLogger(__name__)

ENDED_S = 86400.0, 600.0
"""Seconds for which a run may have ended at the first poll of a worker, and at the later ones."""
OTHERS_S = 300.0
"""Age in seconds from which a worker takes images of a job of another stack, which may be gone."""
CRASH_GRACE_S = LATE_S + 15.0
"""Seconds for which a worker may still retry a crashed run, from when this one has seen it."""


def find_own_saves(job: JobSpool, server: str) -> list[SaveRequest]:
    """Return what `find_pending_saves` finds, for the stack of a server.

    A spool may serve several stacks of a user. The saves of another one are left to it, and taken
    after `OTHERS_S` where this stack may write their root. A root that is away is told by a saver
    that serves the job, otherwise here.
    """
    if not (job.folder / SERVED).exists():
        job.tell_away()
    named = ""
    with suppress(OSError):  # no trainer of this release has saved there
        named = (job.folder / SERVER).read_text()
    if named in ("", server):
        return find_pending_saves(job)
    stack, late = StackSettings(), find_pending_saves(job, grace_s=OTHERS_S)
    return [request for request in late if is_allowed(stack, request.root)]


class NodeRecovery:
    """Recovers the runs and images of one worker's node.

    Runs and images are recovered independently: a spool that hangs must not delay cancellations. So
    are the images of each job: nor must a root that hangs delay other jobs. ``here`` is the
    worker's process, as ``node/pid/start time``. ``executes`` returns whether it executes a run,
    and ``cancel`` cancels such a run.
    """

    def __init__(
        self,
        spool: Path,
        here: str,
        executes: Callable[[UUID], bool],
        cancel: Callable[[UUID], None],
    ) -> None:
        self._spool = spool
        self._here = here
        self._executes = executes
        self._cancel = cancel
        self._ended_s = ENDED_S[0]
        self._failed: dict[tuple[UUID, str], float] = {}
        """When runs were seen that had failed (monotonic), by id and state; infinite once told."""
        self._jobs: dict[JobSpool, asyncio.Task[None]] = {}
        """Recoveries of jobs that have not ended."""

    async def recover_flow_runs(self, api: PrefectApi, pool: str) -> None:
        """Cancel runs on request, and end zombie runs and their unreported tasks."""
        candidates = []
        for run in await api.read_pool_runs(pool, *UNDER_WAY):
            if not self._executes(run.id):
                candidates.append(run)
            elif run.state.type == "CANCELLING":
                self._cancel(run.id)
        for run in candidates:
            try:
                await recover_zombie(api, run, self._here, spool=self._spool)
            except PrefectApiError as error:
                if not error.status:  # the server is away; otherwise others are unaffected
                    raise
                logger.warning("cannot recover flow run %s: %s", run.name, error)
        await self._tell_failures(api, pool)
        await end_unreported_tasks(api, pool)

    async def _tell_failures(self, api: PrefectApi, pool: str) -> None:
        """Tell which saves failed whose runs no worker has seen to their end.

        They were cancelled before they began, or have crashed and are not retried.
        """
        after = time.time() - self._ended_s
        runs = await api.read_pool_runs(pool, *FAILED, ended_after=after)
        now, self._ended_s = time.monotonic(), ENDED_S[1]
        seen = {(run.id, run.state.id): run for run in runs if run.is_save}
        self._failed = {each: self._failed.get(each, now) for each in seen}
        for each, run in seen.items():
            if now >= self._failed[each] + self._get_grace(run) and not self._executes(run.id):
                self._failed[each] = math.inf
                await try_tell_failure(self._spool, run)

    def _get_grace(self, run: FlowRun) -> float:
        """Return the seconds for which the failure of a run may not be its end."""
        if run.state.type != "CRASHED":
            return 0.0
        with try_run_lock(self._spool, run.id) as ended:
            # one that continues on this node lost its server; one by another name waits
            return CRASH_GRACE_S if ended and run.state.name == "Crashed" else math.inf

    async def recover_images(self, api: PrefectApi) -> None:
        """Request the flow runs of orphaned images, and retry crashed runs."""
        begun = {}
        for job in await run_in_thread(lambda: list(list_job_spools(self._spool))):
            if job not in self._jobs:
                begun[job] = asyncio.create_task(self._recover_job(api, job))
        self._jobs |= begun
        if begun:
            await asyncio.wait(begun.values(), timeout=ANSWER_S)
        for job, task in begun.items():
            if not task.done():
                logger.warning(
                    "the recovery of the job in %s has not ended within %.0f s; it goes on, and "
                    "others are unaffected. Check the file system of its root.",
                    job.folder,
                    ANSWER_S,
                )
        ended = [job for job, task in self._jobs.items() if task.done()]
        errors = [self._jobs.pop(job).exception() for job in ended]
        for error in filter(None, errors):
            raise error

    async def _recover_job(self, api: PrefectApi, job: JobSpool) -> None:
        await run_in_thread(job.remove_closed)
        requests = await run_in_thread(find_own_saves, job, api.find_server().identity)
        if not requests:
            return
        for request in requests:
            try:
                run = await api.create_flow_run(request.flow_run)
            except RequestRefusedError as error:  # others are unaffected
                warn_once(f"{request.run_name} of {request.root}: {error}")
                continue
            if run.state.type in ("CANCELLED", "FAILED"):
                # before a worker acquired it, or on a worker that cannot reach this node
                await try_tell_failure(self._spool, run)
            elif run.state.type == "CRASHED":
                await self._retry_crashed(api, request, run.id)
            elif run.state.type == "COMPLETED":
                await run_in_thread(compare_late_images, job, request)

    async def _retry_crashed(self, api: PrefectApi, request: SaveRequest, run_id: UUID) -> None:
        """Retry a crashed run, unless the worker of another node is about to."""
        lock = try_acquire_file_lock(Path(request.root) / PRIVATE_FOLDER / "retry.lock")
        locks = ExitStack()
        try:
            if await run_in_thread(locks.enter_context, lock):
                await retry_crashed(api, run_id, self._here, spool=self._spool)
        finally:
            await run_in_thread(locks.close)
