"""The warm worker: a Prefect worker type that runs flows in its own, long-lived process.

A process worker needs seconds per run to import Prefect and to join Ray; this worker has done both.
It wakes on the event that a run of its pool was scheduled, and polls in case it missed one. At
every poll it also recovers the zombie runs of its node, and starts a saver where images wait and
none lives (`recovery.node`). It cancels runs that are cancelled in Prefect, and waits for a server
that is away without a limit.

Start it with ``trinity-sync worker``, or ``prefect worker start --type trinity-sync``.
"""

import importlib
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import httpx
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventNameFilter
from prefect.exceptions import Abort, ObjectNotFound, ParameterBindError, SignatureMismatchError
from prefect.flows import Flow
from prefect.settings import (
    PREFECT_DEFAULT_RESULT_STORAGE_BLOCK,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    get_current_settings,
    temporary_settings,
)
from prefect.states import Cancelled, Crashed, Failed, Pending
from prefect.workers.base import BaseJobConfiguration, BaseVariables, BaseWorker, BaseWorkerResult
from websockets.exceptions import ConnectionClosed

from trinity_sync.client.prefect_api import PAGE, PrefectApi
from trinity_sync.errors import ConfigError, PrefectApiError, warn_once
from trinity_sync.fs.process import read_process_identity
from trinity_sync.orchestration.package_paths import PACKAGES
from trinity_sync.orchestration.prefect_compat import (
    InProcessWorker,
    propose_state,
    run_flow,
    spare_calls_of_runs,
)
from trinity_sync.orchestration.recovery.flow_runs import (
    ACQUIRED_BY,
    ATTEMPTS,
    describe_end,
    read_request,
    try_allow_eviction,
    try_tell,
)
from trinity_sync.orchestration.recovery.node import NodeRecovery
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.saves.journal import SaveState
from trinity_sync.settings import RAY_FOLDER, read_settings
from trinity_sync.snapshot.spool import WORKER, try_run_lock

logger = logging.getLogger(__name__)

SCHEDULED = ("prefect.flow-run.Scheduled", "prefect.flow-run.AwaitingRetry")
CANCELLING = "prefect.flow-run.Cancelling"
API_SETTINGS = ("PREFECT_API_", "PREFECT_CLIENT_")
"""Prefixes of the variables that say how to connect to the server."""
ENTRYPOINT_S = 60.0
"""Seconds for which a worker does not ask again which flow a deployment runs."""
POLL_S = 5.0
"""Seconds between two polls, unless an event wakes the worker before."""
TOUCH_S = 3600.0
"""Seconds between two calls of `touch_files`."""


def _is_away(error: Exception) -> bool:
    """Return whether an error means only that the server is away."""
    if isinstance(error, PrefectApiError):
        return error.status == 0 or error.status >= 500
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, (httpx.HTTPError, ConnectionError, TimeoutError, ConnectionClosed))


class TrinitySyncWorker(
    InProcessWorker, BaseWorker[BaseJobConfiguration, BaseVariables, BaseWorkerResult]
):
    """Worker that runs the flows of its pool in this process."""

    type = "trinity-sync"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._trinity, stack = read_settings()
        self._max_runs = stack.worker.max_runs or math.inf
        super().__init__(*args, **kwargs)
        self._running: dict[UUID, anyio.CancelScope] = {}
        self._cancelled: set[UUID] = set()
        self._locks: dict[UUID, ExitStack] = {}
        """Locks of the runs that this worker has acquired, see `try_run_lock`."""
        self._places: dict[UUID, tuple[UUID, str]] = {}
        """Work queue and job of the runs that this worker starts or executes."""
        self._entrypoints: dict[UUID, tuple[float, str | None]] = {}
        """When an entrypoint was read, in monotonic seconds, and the entrypoint, by deployment."""
        self._postponed = False
        """Whether runs were due at the last poll and exceeded the limit of their queue."""
        self._complete_at = 0.0
        """When all due runs may be read again, by ``time.monotonic``."""
        self._away = False
        self._infrastructure = f"{self._trinity.node}/{read_process_identity(os.getpid())}"
        self._api = PrefectApi(self._trinity)
        self._recovery = NodeRecovery(
            self._trinity, self._infrastructure, self.is_active, self._cancel
        )

    async def run(self, *_: Any, **__: Any) -> BaseWorkerResult:
        """Refuse to run a flow in an infrastructure: `execute_run` runs it in this process."""
        raise NotImplementedError

    async def execute_run(self, flow_run: FlowRun) -> None:
        """Run a flow in this process; an error of the flow does not end the worker."""
        try:
            flow = load_flow(await self._find_entrypoint(flow_run))
        except (ConfigError, ObjectNotFound) as error:
            end: State[Any] = Crashed(message=f"Cannot start the flow: {error}")
            await self._tell(flow_run, "left", str(end.message))
            await self.client.set_flow_run_state(flow_run.id, end, force=True)
            return
        try:
            await self._tell(flow_run, "begun")
            state = await self._run_until_cancelled(flow, flow_run)
            cancelled = flow_run.id in self._cancelled or (state and state.is_cancelling())
            if cancelled and not (state and state.is_final()):
                message = (
                    "Cancelled while running. A step that was not committed stays uncommitted."
                )
                state = Cancelled(message=message)
                why = describe_end(state.name, message)
                given = flow_run.parameters, flow_run.idempotency_key
                await try_allow_eviction(self._trinity.spool, *given, why)
                await self.client.set_flow_run_state(flow_run.id, state, force=True)
            if state and (state.is_failed() or state.is_cancelled()):  # a crashed run is retried
                # what this release cannot read, the saver can, which is of the trainer's
                told: SaveState = "failed" if read_request(flow_run.parameters) else "left"
                await self._tell(flow_run, told, describe_end(state.name, state.message))
        finally:
            self._running.pop(flow_run.id, None)

    async def _tell(self, flow_run: FlowRun, state: SaveState, message: str = "") -> None:
        """Write into the journal that this worker begins a save, or how it has ended."""
        request = read_request(flow_run.parameters, of_any_release=True)
        if request and request.key == flow_run.idempotency_key:  # otherwise a user has made the run
            url, start = self._api.get_page(flow_run.id), flow_run.run_count + 1
            await try_tell(request, state, message, url=url, start=start)

    async def _find_entrypoint(self, flow_run: FlowRun) -> str | None:
        """Return the entrypoint of a run's deployment, which is read again after a minute."""
        now, deployment = time.monotonic(), flow_run.deployment_id
        assert deployment is not None  # it is a run of a work pool
        read_at, entrypoint = self._entrypoints.get(deployment, (-math.inf, None))
        if now > read_at + ENTRYPOINT_S:
            entrypoint = (await self.client.read_deployment(deployment)).entrypoint
            self._entrypoints[deployment] = (now, entrypoint)
        return entrypoint

    async def _run_until_cancelled(
        self, flow: Flow[..., Any], flow_run: FlowRun
    ) -> State[Any] | None:
        """Run the flow and return its last state; None if it was cancelled or interrupted.

        None also if it runs again, or the server will not hear of it.
        """
        with anyio.CancelScope() as scope:
            self._running[flow_run.id] = scope
            if flow_run.id in self._cancelled:  # before it started
                scope.cancel()
            try:
                state: State[Any] = await run_flow(flow, flow_run=flow_run, return_type="state")
                error = await state.aresult(raise_on_failure=False) if state.is_failed() else None
                if not isinstance(error, (httpx.HTTPError, ObjectNotFound)):
                    return state
                # no flow raises one: it has ended, and the server has not taken the end
                if flow_run.run_count + 1 < ATTEMPTS:
                    await self._api.retry_flow_run(flow_run.id)  # finds what it has committed
            except (ParameterBindError, SignatureMismatchError) as error:  # a retry has them, too
                failed: State[Any] = Failed(message=f"Wrong parameters: {error}")
                await self._tell(flow_run, "left", str(failed.message))
                await self.client.set_flow_run_state(flow_run.id, failed, force=True)
            except (Exception, Abort):
                if flow_run.id not in self._cancelled:
                    logger.exception("flow run %s was interrupted", flow_run.name)
        return None

    def on_ended(self, flow_run_id: UUID) -> None:
        """Release the run's lock and its place in the queue's limit; forget its cancellation."""
        self._unlock(flow_run_id)
        self._places.pop(flow_run_id, None)
        self._cancelled.discard(flow_run_id)

    async def on_capacity_free(self) -> None:
        """Start the next run at once, if runs wait for the limit of their queue."""
        if self.has_limit or self._postponed:
            try:
                await self.get_and_submit_flow_runs()
            except Exception as error:  # the next poll starts it
                logger.debug("cannot start the next run before the next poll: %r", error)

    def select_runs(self, due: Sequence[WorkerFlowRunResponse]) -> list[WorkerFlowRunResponse]:
        """Return the due runs within the limits of their work queues, in turns of the jobs.

        Each queue has a limit of its own. So a sync does not wait for checkpoints, a save does not
        wait for maintenance, and no flow waits for a part that another flow would bring. A job gets
        another place of a queue only if more are free than it holds: one whose runs hang leaves
        half of them to others, two leave a quarter.
        """
        places = {run: place for run, place in self._places.items() if self.is_active(run)}
        taken = Counter(queue for queue, _ in places.values())
        held = Counter(places.values())
        new = [each for each in due if each.flow_run.id not in places]
        turns = Counter(held)
        in_turns = []
        for each in new:
            tags, flow = each.flow_run.tags, str(each.flow_run.flow_id)  # which is for all jobs
            job = next((tag for tag in tags if tag.startswith("job:")), flow)
            place = (each.work_queue_id, job)
            in_turns.append((turns[place], place, each))
            turns[place] += 1
        selected = []
        for _, place, each in sorted(in_turns, key=lambda turn: turn[0]):
            if taken[place[0]] + held[place] < self._max_runs:
                places[each.flow_run.id] = place
                taken[place[0]] += 1
                held[place] += 1
                selected.append(each)
        self._places, self._postponed = places, len(selected) < len(new)
        return selected

    async def complete_due_runs(
        self, due: list[WorkerFlowRunResponse], before: datetime
    ) -> list[WorkerFlowRunResponse]:
        """Return all due runs if there are more than in a response, at most every `POLL_S`.

        A response for the whole pool has `PAGE` runs at most, those of the queue with the highest
        priority first. They may all be of one job, whose runs hang or come in a burst.
        """
        now = time.monotonic()
        if len(due) < PAGE or now < self._complete_at:
            return due
        self._complete_at = now + POLL_S
        found: dict[UUID, WorkerFlowRunResponse] = {}
        for queue in await self.client.read_work_queues(work_pool_name=self.pool_name):
            wanted = {"work_queue_names": [queue.name], "scheduled_before": str(before)}
            while True:
                response = await self.client.request(
                    "POST",
                    "/work_pools/{name}/get_scheduled_flow_runs",
                    path_params={"name": self.pool_name},
                    json=wanted,
                )
                page = WorkerFlowRunResponse.model_validate_list(response.json())
                new = {each.flow_run.id: each for each in page if each.flow_run.id not in found}
                found |= new
                if len(page) < PAGE or not new:
                    break
                wanted["scheduled_after"] = str(page[-1].flow_run.next_scheduled_start_time)
        return list(found.values())

    async def acquire_run(self, flow_run: FlowRun) -> bool:
        """Set a run to Pending, and return whether this worker acquired it.

        The state's message names this process, which identifies a zombie run later.
        """
        pending: State[Any] = Pending(message=ACQUIRED_BY + self._infrastructure)
        taken = locked = False
        try:
            locked = await self._lock(flow_run.id)
            if locked:
                taken = (await propose_state(self.client, pending, flow_run.id)).is_pending()
            else:
                logger.info("not acquiring flow run %s: it still runs on this node", flow_run.name)
        except Abort as refusal:
            logger.info("not acquiring flow run %s: %s", flow_run.name, refusal)
        except Exception as error:
            logger.warning("cannot acquire flow run %s: %r", flow_run.name, error)
        finally:
            if locked and not taken:
                self._unlock(flow_run.id)
        return taken

    async def _lock(self, flow_run_id: UUID) -> bool:
        """Acquire the run's lock, and return False if a process of this node executes the run."""
        if flow_run_id == WORKER and WORKER in self._locks:
            return True
        for wait_s in (0.02, 0.05, 0.1, 0.2, 0.4, 0.0):  # a recovery of the run holds it that long
            lock = ExitStack()
            if lock.enter_context(try_run_lock(self._trinity.spool, flow_run_id)):
                self._locks[flow_run_id] = lock
                return True
            lock.close()
            await anyio.sleep(wait_s)
        return False

    def _unlock(self, flow_run_id: UUID) -> None:
        if lock := self._locks.pop(flow_run_id, None):
            lock.close()

    def _cancel(self, flow_run_id: UUID) -> None:
        if self.is_active(flow_run_id) and flow_run_id not in self._cancelled:
            self._cancelled.add(flow_run_id)
            if scope := self._running.get(flow_run_id):
                scope.cancel()

    async def start(self, *args: Any, **kwargs: Any) -> None:
        """Serve until the worker is stopped, as Prefect's worker does."""
        spare_calls_of_runs()
        # for all runs at once: settings are validated again each time that one is changed
        own = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: HEARTBEAT_S}
        with temporary_settings(own, restore_defaults={PREFECT_DEFAULT_RESULT_STORAGE_BLOCK}):
            await super().start(*args, **kwargs)

    async def setup(self) -> None:
        """Connect to the server, then listen and recover until the worker stops."""
        await super().setup()
        found = get_current_settings().to_environment_variables(exclude_unset=True)
        # `PrefectApi` reads no profile
        os.environ |= {name: each for name, each in found.items() if name.startswith(API_SETTINGS)}
        touch = partial(run_in_thread, touch_files, self._trinity.home)
        recover = partial(self._recovery.recover_flow_runs, self._api, self.pool_name)
        serve = partial(self._recovery.serve_images, self._api)
        beat = partial(run_in_thread, tell_heartbeat, self._trinity.home)
        polled: dict[Callable[[], Any], float] = {touch: TOUCH_S}
        polled |= dict.fromkeys((self.stand_by, beat, recover, serve), POLL_S)
        self.start_service(partial(self._serve, self._listen))
        for work, pause_s in polled.items():
            self.start_service(partial(self._serve, partial(self._poll, work, pause_s)))

    async def teardown(self, *exc_info: Any) -> None:
        """Close the connections."""
        self._unlock(WORKER)
        await self._api.close()
        await super().teardown(*exc_info)

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """Start the runs that are due; none while the server is away."""
        with self._server_may_be_away():
            return await super().get_and_submit_flow_runs()
        return []

    async def sync_with_backend(self) -> None:
        """Read the work pool and send a heartbeat, unless the server is away."""
        with self._server_may_be_away():
            await super().sync_with_backend()

    async def stand_by(self) -> None:
        """Tell savers that this worker begins runs, if the server answers, whose clock rules."""
        holds = await self._lock(WORKER)
        usual_s = get_current_settings().worker.prefetch_seconds
        await self._api.read_version()
        self.set_prefetch(usual_s + self._api.clock_skew)
        if holds:
            os.utime(self._trinity.spool / ".runs.lock")

    @contextmanager
    def _server_may_be_away(self) -> Iterator[None]:
        """Wait for a server that is away; Prefect's own loops end the worker after some minutes."""
        try:
            yield
        except httpx.HTTPError as error:
            if not _is_away(error):
                raise
            if not self._away:
                logger.warning("the Prefect server is away (%r); waiting for it", error)
            self._away = True
        else:
            if self._away:
                logger.warning("the Prefect server is back")
            self._away = False

    async def _serve(self, service: Callable[[], Any], scope: anyio.CancelScope) -> None:
        """Run a service until the worker stops, and restart it after each error."""
        with scope:
            while True:
                try:
                    await service()
                except Exception as error:
                    logger.debug("restarting %s after %r", service, error)
                    if not _is_away(error):
                        warn_once(f"a service of the worker failed, restarting it: {error!r}")
                await anyio.sleep(1.0)

    async def _listen(self) -> None:
        async with get_events_subscriber(select_events(self.pool_name)) as events:
            await self.get_and_submit_flow_runs()  # runs scheduled before the subscription
            async for event in events:
                if event.event in SCHEDULED:
                    await self.get_and_submit_flow_runs()
                else:
                    self._cancel(UUID(event.resource.id.rpartition(".")[2]))

    async def _poll(self, work: Callable[[], Any], pause_s: float) -> None:
        while True:
            await work()
            await anyio.sleep(pause_s)


def select_events(pool: str) -> EventFilter:
    """Return the filter of events of a pool's runs, whatever its id: a reset server has another."""
    labels = {"prefect.resource.role": "work-pool", "prefect.resource.name": pool}
    resource = EventAnyResourceFilter.model_validate({"labels": labels})
    return EventFilter(event=EventNameFilter(name=[*SCHEDULED, CANCELLING]), any_resource=resource)


HEARTBEAT_S = 30
"""Seconds between two heartbeats of a flow run, Prefect's minimum. ``worker.heartbeat_timeout``
must be several times as long."""


def touch_files(home: Path) -> None:
    """Set the times of the stack's files to now: a cleaner of old files must not remove them.

    They are those in its home, and those of its Ray node in ``/tmp``.
    """
    ray = os.environ.get("RAY_TMPDIR", "")
    folders = [home / name for name in ("logs", "prefect", "roots")]
    folders += [Path(ray)] if Path(ray).name.startswith(RAY_FOLDER) else []
    below = (each for folder in folders for each in folder.rglob("*"))
    for path in [home, *home.glob("*"), *folders, *below]:
        with suppress(OSError):  # removed meanwhile, or of a home that cannot be written
            os.utime(path, follow_symlinks=False)


def tell_heartbeat(home: Path) -> None:
    """Tell `status` that this worker does not hang, by the time of its log."""
    with suppress(OSError):  # there is no stack
        (home / "logs/worker.log").touch()


def load_flow(entrypoint: str | None) -> Flow[..., Any]:
    """Return the flow of an entrypoint, ``package.module.flow`` or ``package.module:flow``.

    Raises:
        ConfigError: The flow cannot be imported here.
    """
    if sys.path[0] != PACKAGES:  # a user's own flows and tasks must not be found first
        sys.path.insert(0, PACKAGES)
    module, _, name = str(entrypoint).replace(":", ".").rpartition(".")
    try:
        flow: Flow[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot import the deployment's entrypoint {entrypoint!r} in this worker: "
            f"{error}. Is the package installed where the worker runs?"
        ) from error
    return flow
