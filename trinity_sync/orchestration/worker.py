"""The warm worker: a Prefect worker type that runs flows in its own, long-lived process.

A process worker needs seconds to import Prefect and to join Ray for every run; this one has done
both. It wakes on the event that a run of its pool was scheduled, and polls in case it missed one.
It looks for images that nobody asked a run for, takes up runs whose process died, and honours
cancellation.

Start it with ``trinity-sync worker``, or ``prefect worker start --type trinity-sync``.
"""

import asyncio
import importlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import anyio.abc
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import SettingsContext, get_settings_context
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventNameFilter
from prefect.flow_engine import run_flow
from prefect.flows import Flow
from prefect.states import AwaitingRetry, Cancelled, Crashed
from prefect.workers.base import (
    BaseJobConfiguration,
    BaseVariables,
    BaseWorker,
    BaseWorkerResult,
)

import trinity_sync
from trinity_sync.errors import ConfigError
from trinity_sync.orchestration.sweep import stranded
from trinity_sync.request import SAVE_DEPLOYMENT, SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.receipt import process_lives, process_name

logger = logging.getLogger(__name__)

SCHEDULED = ("prefect.flow-run.Scheduled", "prefect.flow-run.AwaitingRetry")
CANCELLING = "prefect.flow-run.Cancelling"
ATTEMPTS = 3
"""Times that a save is begun before its crashes are left for a person to look at."""


class TrinitySyncJobConfiguration(BaseJobConfiguration):
    """Flows run in the worker's process: there is no infrastructure to configure."""

    @classmethod
    def _base_environment(cls) -> dict[str, str]:
        """Nothing is started that would need one; writing it down takes 60 ms a run."""
        return {}


class TrinitySyncVariables(BaseVariables):
    """As `TrinitySyncJobConfiguration`."""


class TrinitySyncWorkerResult(BaseWorkerResult):
    """How a run ended, for Prefect."""


class TrinitySyncWorker(
    BaseWorker[TrinitySyncJobConfiguration, TrinitySyncVariables, TrinitySyncWorkerResult]
):
    """Runs flows of its pool in this process; see the module."""

    type = "trinity-sync"
    job_configuration = TrinitySyncJobConfiguration
    job_configuration_variables = TrinitySyncVariables
    _description = "Runs trinity_sync's flows in a warm process that has joined Ray already."
    _documentation_url = "https://docs.prefect.io/v3/concepts/workers"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trinity = Settings()
        self._running: dict[UUID, anyio.CancelScope] = {}
        self._cancelled: set[UUID] = set()
        self._infrastructure = f"{socket.gethostname()}/{process_name(os.getpid())}"

    # ------------------------------------------------------------ running a flow

    async def run(
        self,
        flow_run: FlowRun,
        configuration: TrinitySyncJobConfiguration,
        task_status: anyio.abc.TaskStatus[Any] | None = None,
    ) -> TrinitySyncWorkerResult:
        """Run the flow here and now; its failure is its own, not the worker's."""
        deployment = configuration._related_objects["deployment"]
        flow = load_flow(deployment.entrypoint)
        if task_status:
            task_status.started(self._infrastructure)
        with anyio.CancelScope() as scope:
            self._running[flow_run.id] = scope
            try:
                with _WholeSettings.of_now():
                    await run_flow(flow, flow_run=flow_run, return_type="state")  # type: ignore[misc]
            except Exception:
                logger.exception("flow run %s broke off", flow_run.name)
            finally:
                del self._running[flow_run.id]
        if flow_run.id in self._cancelled:
            self._cancelled.discard(flow_run.id)
            state: State[Any] = Cancelled(
                message="Cancelled while it ran; nothing of it was committed."
            )
            await self.client.set_flow_run_state(flow_run.id, state, force=True)
        return TrinitySyncWorkerResult(status_code=0, identifier=self._infrastructure)

    async def _propose_submitting_state(self, flow_run: FlowRun) -> None:
        """Nothing is submitted: the run is here already, and one call to the server is saved."""

    async def _give_worker_labels_to_flow_run(self, flow_run_id: UUID) -> None:
        """The infrastructure pid names this worker; another call is saved."""

    def _cancel(self, flow_run_id: UUID) -> None:
        scope = self._running.get(flow_run_id)
        if scope and flow_run_id not in self._cancelled:
            self._cancelled.add(flow_run_id)
            scope.cancel()

    # ------------------------------------------------------------ what wakes it

    async def setup(self) -> None:
        """Join the server, then listen and sweep for as long as the worker lives."""
        await super().setup()
        assert self._runs_task_group is not None  # made by the base class
        for service in (self._listen, self._sweep_at_every_poll):
            scope = anyio.CancelScope()
            self._scheduled_task_scopes.add(scope)
            self._runs_task_group.start_soon(self._serve, scope, service)

    async def _serve(self, scope: anyio.CancelScope, service: Any) -> None:
        """Keep a service going through whatever the server does."""
        with scope:
            while True:
                try:
                    await service()
                except Exception as error:
                    logger.debug("%s is taken up again after %r", service.__name__, error)
                await anyio.sleep(1.0)

    async def _listen(self) -> None:
        pool = self._work_pool
        if pool is None:
            return
        resource = EventAnyResourceFilter(id=[f"prefect.work-pool.{pool.id}"])
        names = EventNameFilter(name=[*SCHEDULED, CANCELLING])
        async with get_events_subscriber(EventFilter(event=names, any_resource=resource)) as events:
            await self.get_and_submit_flow_runs()  # what was scheduled before anybody listened
            async for event in events:
                if event.event in SCHEDULED:
                    await self.get_and_submit_flow_runs()
                else:
                    self._cancel(UUID(event.resource.id.rpartition(".")[2]))

    async def _sweep_at_every_poll(self) -> None:
        await self.mend()
        while True:
            if self._running:
                for run in await self._runs_in(StateType.CANCELLING):
                    self._cancel(run.id)
            await self.sweep()
            await anyio.sleep(self._trinity.poll_s)

    # ------------------------------------------------------------ what others left behind

    async def sweep(self) -> None:
        """Ask for the runs of images that wait on this node, and take up crashed ones."""
        requests = await asyncio.to_thread(stranded, self._trinity.spool)
        if not requests:
            return
        deployment = await self.client.read_deployment_by_name(SAVE_DEPLOYMENT)
        for request in requests:
            run = await self.client.create_flow_run_from_deployment(
                deployment.id, **request.flow_run
            )
            await self._take_up(run, request)

    async def _take_up(self, run: FlowRun, request: SaveRequest) -> None:
        if run.state is None or not run.state.is_crashed() or run.run_count >= ATTEMPTS:
            return
        logger.warning("%s crashed (%s) and is begun again", request.run_name, run.state.message)
        await self.client.set_flow_run_state(run.id, AwaitingRetry(), force=True)

    async def mend(self) -> None:
        """Mark runs of this pool as crashed whose process on this node is gone."""
        for run in await self._runs_in(StateType.RUNNING, StateType.PENDING, StateType.CANCELLING):
            host, _, process = (run.infrastructure_pid or "").partition("/")
            if host == socket.gethostname() and not process_lives(process):
                state: State[Any] = Crashed(message=f"The worker process {process} on {host} died.")
                await self.client.set_flow_run_state(run.id, state, force=True)

    async def _runs_in(self, *states: StateType) -> list[FlowRun]:
        wanted = FlowRunFilterState(type=FlowRunFilterStateType(any_=list(states)))
        return await self.client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=wanted),
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[self._work_pool_name])),
        )


class _WholeSettings(SettingsContext):
    """The settings of this process, handed to tasks as they are.

    Prefect takes them apart for each task and reads them anew in the task's process, from the
    environment and all: 0.15 s a task, twice on a save's way. Pickling them takes 3 ms.
    """

    @classmethod
    def of_now(cls) -> "_WholeSettings":
        now = get_settings_context()
        return cls(profile=now.profile, settings=now.settings)

    def serialize(self, include_secrets: bool = True) -> dict[str, Any]:
        return {"profile": self.profile, "settings": self.settings}


PACKAGES = str(Path(trinity_sync.__file__).parent.parent)
"""The folder that holds flows, tasks and trinity_sync as they were installed."""

_flows: dict[str, Flow[..., Any]] = {}


def load_flow(entrypoint: str | None) -> Flow[..., Any]:
    """The flow that a deployment names (``package.module.flow`` or ``package.module:flow``).

    Raises:
        ConfigError: it cannot be imported here.
    """
    if entrypoint not in _flows:
        if sys.path[0] != PACKAGES:  # a user's own flows and tasks must not be found first
            sys.path.insert(0, PACKAGES)
        module, _, name = str(entrypoint).replace(":", ".").rpartition(".")
        try:
            flow = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"the deployment's entrypoint {entrypoint!r} cannot be imported by this worker: "
                f"{error}. Is the package installed where the worker runs?"
            ) from error
        _flows[str(entrypoint)] = flow
    return _flows[str(entrypoint)]
