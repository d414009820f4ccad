"""Recover zombie runs of a node at every poll, tell what has failed, and start savers.

A scheduler may kill a saver with all trainers of a job. The one that the worker then starts does
what it would have done: it requests flow runs, commits what none begins, and tells what fails.
"""

import math
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from uuid import UUID

import anyio

from trinity_sync.client.prefect_api import FAILED, UNDER_WAY, FlowRun, PrefectApi
from trinity_sync.client.saver_control import (
    OF_WORKER,
    SERVED,
    SERVER,
    UNREQUESTED,
    SaverControl,
    find_saver,
    lock_path,
    name_saver,
)
from trinity_sync.errors import PrefectApiError, TrinitySyncError, warn_once
from trinity_sync.fs.atomic import read_file, replace_file
from trinity_sync.fs.locks import try_acquire_file_lock
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.orchestration.job_registry import require_allowed
from trinity_sync.orchestration.recovery.flow_runs import (
    LATE_S,
    MARK_S,
    end_unreported_tasks,
    look_at_jobs,
    recover_run,
    try_tell_failure,
)
from trinity_sync.orchestration.root_threads import RootVisits, run_in_thread
from trinity_sync.pipeline.pending import GRACE_S, find_pending_saves
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings, read_settings
from trinity_sync.snapshot.spool import JobSpool, try_run_lock

ENDED_S = 86400.0, 600.0
"""Seconds for which a run may have ended at the first poll of a worker, and at the later ones."""
OTHERS_S = 300.0
"""Age in seconds from which a worker serves images of a job of another stack, which may be gone."""
CRASH_GRACE_S = LATE_S + 15.0
"""Seconds for which a worker may still retry a crashed run, from when this one has seen it."""


class NodeRecovery:
    """Recovers the runs of one worker's node, and has savers serve its images.

    Both are independent: a spool that hangs must not delay cancellations. ``here`` is the worker's
    process, as ``node/pid/start time``. ``executes`` returns whether it executes a run, and
    ``cancel`` cancels such a run.
    """

    def __init__(
        self,
        settings: Settings,
        here: str,
        executes: Callable[[UUID], bool],
        cancel: Callable[[UUID], None],
    ) -> None:
        self._spool = settings.spool
        self._home = settings.home
        self._here = here
        self._executes = executes
        self._cancel = cancel
        self._ended_s = ENDED_S[0]
        self._failed: dict[tuple[UUID, str], float] = {}
        """When runs were seen that had failed (monotonic), by id and state; infinite once told."""
        self._visits = RootVisits("saves that wait")
        self._savers: dict[str, SaverControl] = {}
        """Savers that this worker has started, by name; they live until nothing waits."""

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
                await recover_run(api, run.id, self._here, spool=self._spool)
            except PrefectApiError as error:
                if not error.status:  # the server is away; otherwise others are unaffected
                    raise
                warn_once(f"cannot recover flow run {run.name}: {error}")
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

    async def serve_images(self, api: PrefectApi) -> None:
        """Start savers where saves wait and none lives, and retry the crashed runs of saves."""
        look = partial(self._look_at, api.find_server().identity)
        waiting = await run_in_thread(look_at_jobs, self._visits, self._spool, look)
        for control in [] if waiting else self._savers.values():
            control.close()
        for request in waiting:
            for run in await api.read_job_runs(request.job, step=request.step):
                if run.key == request.key and run.state.type == "CRASHED":
                    with anyio.move_on_after(MARK_S):  # its root may hang from now on
                        await self._retry_crashed(api, request, run.id)

    def _look_at(self, server: str, job: JobSpool) -> Collection[SaveRequest]:
        """Return the saves of a job that wait, for which a saver lives or is started.

        A spool may serve several stacks of a user. A worker leaves the saves of another one to it
        for `OTHERS_S`. A root that is away is told by a saver that serves the job, otherwise here.
        """
        job.remove_closed()
        if not (job.folder / SERVED).exists():
            job.tell_away()
        named = ""
        with suppress(OSError):  # no trainer of this release has saved there
            named = read_file(job.folder / SERVER).decode()
        grace_s = GRACE_S if named in ("", server) else OTHERS_S
        waiting = find_pending_saves(job, grace_s=grace_s)
        try:
            if waiting:
                require_allowed(next(iter(waiting)).root, read_settings()[1])
                self._have_served(job, server)
        except (OSError, ValueError, TrinitySyncError) as error:
            warn_once(f"the saves in {job.folder} wait, as this worker starts no saver: {error}")
            with suppress(OSError):  # it has gone, or shared memory is full
                replace_file(job.folder / UNREQUESTED, str(error), sync=False)
        return waiting

    def _have_served(self, job: JobSpool, server: str) -> None:
        """Start a saver for a job whose own is dead, with its umask and this worker's server."""
        how, name = find_saver(job.folder)
        usual = name_saver()
        own = (name or usual)[:3] + usual[3:] + OF_WORKER
        made = SaverControl(self._spool, self._home, name=own)
        control = self._savers.setdefault(own, made)
        with try_acquire_file_lock(lock_path(self._spool, name or own)) as is_dead:
            if is_dead or name in ("", own):
                replace_file(job.folder / SERVER, server, sync=False)
                if name == own:
                    control.wake()
                else:
                    control.serve(job.folder.name, how)

    async def _retry_crashed(self, api: PrefectApi, request: SaveRequest, run_id: UUID) -> None:
        """Retry a crashed run, unless the worker of another node is about to."""
        lock = try_acquire_file_lock(Path(request.root) / PRIVATE_FOLDER / "retry.lock")
        locks = ExitStack()
        try:
            if await run_in_thread(locks.enter_context, lock):
                await recover_run(api, run_id, self._here, spool=self._spool)
        finally:
            await run_in_thread(locks.close)
