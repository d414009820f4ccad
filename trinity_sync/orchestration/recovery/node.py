"""Recover the zombie runs and orphaned images of a worker's node, at every poll."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.exceptions import ObjectNotFound

from trinity_sync.client.save_request import SAVE_DEPLOYMENT, SaveRequest
from trinity_sync.errors import RequestRefusedError
from trinity_sync.fs.locks import try_acquire_file_lock
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.orchestration.job_registry import ANSWER_S
from trinity_sync.orchestration.prefect_queries import UNDER_WAY, read_pool_runs, request_run
from trinity_sync.orchestration.recovery.evictions import EvictionReporter
from trinity_sync.orchestration.recovery.flow_runs import (
    end_unreported_tasks,
    recover_zombie,
    retry_crashed,
)
from trinity_sync.orchestration.recovery.images import allow_eviction
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.pipeline.pending import compare_late_images, find_pending_saves, warn_once
from trinity_sync.snapshot.spool import JobSpool, list_job_spools

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

    async def recover_flow_runs(self, client: PrefectClient, pool: str) -> None:
        """Cancel runs on request, and end zombie runs and their unreported tasks."""
        candidates = []
        for run in await read_pool_runs(client, pool, *UNDER_WAY):
            if not self._executes(run.id):
                candidates.append(run)
            elif run.state and run.state.is_cancelling():
                self._cancel(run.id)
        for run in candidates:
            try:
                await recover_zombie(client, run, self._here, spool=self._spool)
            except (ObjectNotFound, httpx.HTTPStatusError) as error:  # others are unaffected
                logger.warning("cannot recover flow run %s: %s", run.name, error)
        await end_unreported_tasks(client, pool)

    async def recover_images(self, client: PrefectClient) -> None:
        """Report evictions, request the flow runs of orphaned images, and retry crashed runs."""
        await run_in_thread(self._evictions.report)
        begun = {}
        for job in await run_in_thread(lambda: list(list_job_spools(self._spool))):
            if job not in self._jobs:
                begun[job] = asyncio.create_task(self._recover_job(client, job))
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

    async def _recover_job(self, client: PrefectClient, job: JobSpool) -> None:
        requests = await run_in_thread(find_pending_saves, job)
        if not requests:
            return
        deployment = await client.read_deployment_by_name(SAVE_DEPLOYMENT)
        for request in requests:
            try:
                run = await request_run(client, deployment.id, request.flow_run)
            except RequestRefusedError as error:  # others are unaffected
                warn_once(f"{request.run_name} of {request.root}: {error}")
                continue
            if run.state and (run.state.is_cancelled() or run.state.is_failed()):
                # before a worker acquired it, or on a worker that cannot reach this node
                await run_in_thread(
                    allow_eviction, self._spool, run.parameters, str(run.state.message)
                )
            elif run.state and run.state.is_crashed():
                await self._retry_crashed(client, request, run.id)
            elif run.state and run.state.is_completed():
                await run_in_thread(compare_late_images, self._spool, request)

    async def _retry_crashed(
        self, client: PrefectClient, request: SaveRequest, run_id: UUID
    ) -> None:
        """Retry a crashed run, unless the worker of another node is about to."""
        lock = try_acquire_file_lock(Path(request.root) / PRIVATE_FOLDER / "retry.lock")
        locks = ExitStack()
        try:
            if await run_in_thread(locks.enter_context, lock):
                await retry_crashed(client, run_id, self._here, spool=self._spool)
        finally:
            await run_in_thread(locks.close)
