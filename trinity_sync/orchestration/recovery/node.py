"""Recover zombie runs and orphaned images of a worker's node at every poll; report evictions."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID

from trinity_sync.client.prefect_api import UNDER_WAY, PrefectApi
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import PrefectApiError, RequestRefusedError
from trinity_sync.fs.locks import try_acquire_file_lock
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.orchestration.job_registry import ANSWER_S
from trinity_sync.orchestration.recovery.flow_runs import (
    allow_eviction,
    end_unreported_tasks,
    recover_zombie,
    retry_crashed,
)
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.orchestration.step_events import emit_step_event
from trinity_sync.pipeline.pending import compare_late_images, find_pending_saves, warn_once
from trinity_sync.snapshot.spool import JobSpool, list_job_spools, read_evictions

logger = logging.getLogger(__name__)


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
        self._evictions = EvictionReporter(spool)
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
        await end_unreported_tasks(api, pool)

    async def recover_images(self, api: PrefectApi) -> None:
        """Report evictions, request the flow runs of orphaned images, and retry crashed runs."""
        await run_in_thread(self._evictions.report)
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
        requests = await run_in_thread(find_pending_saves, job)
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
                await run_in_thread(allow_eviction, self._spool, run.parameters, run.state.message)
            elif run.state.type == "CRASHED":
                await self._retry_crashed(api, request, run.id)
            elif run.state.type == "COMPLETED":
                await run_in_thread(compare_late_images, self._spool, request)

    async def _retry_crashed(self, api: PrefectApi, request: SaveRequest, run_id: UUID) -> None:
        """Retry a crashed run, unless the worker of another node is about to."""
        lock = try_acquire_file_lock(Path(request.root) / PRIVATE_FOLDER / "retry.lock")
        locks = ExitStack()
        try:
            if await run_in_thread(locks.enter_context, lock):
                await retry_crashed(api, run_id, self._here, spool=self._spool)
        finally:
            await run_in_thread(locks.close)


class EvictionReporter:
    """Reports each save whose images are evicted on this node from now on, once."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._since = time.time()
        self._reported: set[tuple[str, int, int, str]] = set()

    def report(self) -> None:
        """Report the evictions since the last call."""
        found: set[tuple[str, int, int, str]] = set()
        for job in list_job_spools(self._spool):
            evictions = [e for e in read_evictions(job.folder) if e.evicted_at >= self._since]
            root = job.root if evictions else None
            for each in evictions if root else ():
                save = (job.folder.name, each.run, each.step, each.kind)
                found.add(save)
                if save in self._reported:
                    continue
                self._reported.add(save)
                level = logging.WARNING if each.kind == "checkpoint" else logging.INFO
                logger.log(
                    level,
                    "the %s of step %d of %s is lost: %s of role %s rank %d was evicted from the "
                    "spool of this node for step %d (%s)",
                    each.kind,
                    each.step,
                    root,
                    each.component,
                    each.role,
                    each.rank,
                    each.for_step,
                    each.why,
                )
                emit_step_event(
                    "evicted",
                    root or "",
                    each.step,
                    job=job.folder.name,
                    run=each.run,
                    kind=each.kind,
                    for_step=each.for_step,
                    why=each.why,
                )
        self._reported = found  # the others are no longer in the file
