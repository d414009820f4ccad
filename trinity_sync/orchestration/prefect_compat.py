"""The private and undocumented names of Prefect and prefect-ray that this project uses.

Prefect renames them without notice. Each is listed here once, with its purpose and what to do if it
is gone, and is looked up when the process that needs it starts: names of the worker when this
module is imported, names of prefect-ray when ``flows.on_ray`` is, names of the server before it
starts. A version that lacks a name is refused there, and not in the middle of a save.

`InProcessWorker` overrides the private methods of Prefect's worker and gives its subclass public
ones. Each override calls the original, or does nothing but save a call.
"""

import inspect
import logging
import pkgutil
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import anyio
import prefect
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse, WorkerFlowRunResponse
from prefect.flows import Flow
from prefect.workers.base import (
    BaseJobConfiguration,
    BaseVariables,
    BaseWorker,
    BaseWorkerResult,
)

from trinity_sync.errors import UnsupportedPrefectError

SUPPORTED = ">=3.7.5,<3.9"
"""Supported versions of Prefect, as in pyproject.toml."""
SUPPORTED_RAY = ">=0.5,<0.7"
"""Supported versions of prefect-ray, as in pyproject.toml."""

logger = logging.getLogger(__name__)


def look_up(name: str, owner: object = None) -> Any:
    """Return the object that a qualified name of Prefect or prefect-ray refers to.

    Args:
        name: The qualified name, which starts with ``prefect`` or ``prefect_ray``.
        owner: The object whose attribute is the last part of the name, if it is neither a module
            nor a class.

    Raises:
        UnsupportedPrefectError: The installed version lacks the name.
    """
    try:
        if owner is None:
            return pkgutil.resolve_name(name)
        return getattr(owner, name.rpartition(".")[2])
    except (ImportError, AttributeError) as error:
        if name.startswith("prefect_ray"):
            import prefect_ray

            found = f"prefect-ray {prefect_ray.__version__}"
            supported = f"prefect-ray{SUPPORTED_RAY}"
        else:
            found, supported = f"Prefect {prefect.__version__}", f"prefect{SUPPORTED}"
        raise UnsupportedPrefectError(
            f'{found} has no {name}, which trinity_sync needs; install "{supported}"'
        ) from error


# Flows in this process

run_flow: Callable[..., Any] = look_up("prefect.flow_engine.run_flow")
"""Run a flow as a given flow run. If it is gone: see what ``Runner.execute_flow_run`` calls."""

propose_state: Callable[..., Any] = look_up("prefect.utilities.engine.propose_state")
"""Propose a state of a run to the server. If it is gone: ``client.set_flow_run_state`` without
force, whose answer says whether the server rejects or delays the state."""

parameter_schema: Callable[[Flow[..., Any]], Any] = look_up(
    "prefect.utilities.callables.parameter_schema"
)
"""Return the JSON schema of a flow's parameters. If it is gone: see what ``Flow.deploy`` calls."""

serialize_context: Callable[[], dict[str, Any]] = look_up("prefect.context.serialize_context")
"""Serialize the context of a flow for its tasks. If it is gone: see what
``RayTaskRunner.submit`` calls."""

_SettingsContext: Any = look_up("prefect.context.SettingsContext")
_get_settings_context: Callable[[], Any] = look_up("prefect.context.get_settings_context")
look_up("prefect.context.SettingsContext.serialize")


class PickledSettings(_SettingsContext):
    """The settings of this process, passed to tasks as an object.

    Prefect serializes them for each task, which reads them again from its environment: 0.15 s a
    task, two on the path of a save. Pickling them takes 3 ms. If the context or its ``serialize``
    is gone, saves work without this class.
    """

    @classmethod
    def of_now(cls, heartbeat_s: int) -> "PickledSettings":
        """Return the settings of the calling context.

        Args:
            heartbeat_s: Seconds between two heartbeats of a flow run.
        """
        now = _get_settings_context()
        flows = now.settings.flows.model_copy(update={"heartbeat_frequency": heartbeat_s})
        settings = now.settings.model_copy(update={"flows": flows})
        return cls(profile=now.profile, settings=settings)

    def serialize(self, include_secrets: bool = True) -> dict[str, Any]:
        """Return the settings as a task runner pickles them for every task."""
        return {"profile": self.profile, "settings": self.settings}


# The worker


def _find_attributes(function: Callable[..., Any]) -> SimpleNamespace:
    """Find the attributes that a function reads or sets, also those of instances."""
    return SimpleNamespace(**dict.fromkeys(inspect.unwrap(function).__code__.co_names))


for _name in (
    "_get_scheduled_flow_runs",
    "_give_worker_labels_to_flow_run",
    "_propose_pending_state",
    "_propose_submitting_state",
    "_release_limit_slot",
    "_submit_run",
    "_submit_run_and_capture_errors",
    "_submit_scheduled_flow_runs",
    "_description",
    "_documentation_url",
):
    look_up(f"prefect.workers.base.BaseWorker.{_name}")
for _name in (
    "_limiter",
    "_prefetch_seconds",
    "_runs_task_group",
    "_scheduled_task_scopes",
    "_submitting_flow_run_ids",
    "_work_pool",
    "_work_pool_name",
):
    look_up(
        f"prefect.workers.base.BaseWorker.{_name}",
        _find_attributes(BaseWorker.__init__),
    )
look_up("prefect.workers.base.BaseJobConfiguration._base_environment")
look_up(
    "prefect.workers.base.BaseJobConfiguration._related_objects",
    _find_attributes(BaseJobConfiguration.prepare_for_flow_run),
)


class InProcessJobConfiguration(BaseJobConfiguration):
    """The configuration of a run in the worker's own process, which has no infrastructure."""

    @classmethod
    def _base_environment(cls) -> dict[str, str]:
        """Return an empty environment: building Prefect's takes 60 ms a run and has no use here.

        If the method is gone, runs take that much longer and nothing else changes.
        """
        return {}

    @property
    def deployment(self) -> DeploymentResponse:
        """The deployment of the run.

        If ``_related_objects`` is gone: ``client.read_deployment``, one call a run.
        """
        deployment: DeploymentResponse = self._related_objects["deployment"]
        return deployment


class InProcessVariables(BaseVariables):
    """The template of `InProcessJobConfiguration`."""


class InProcessResult(BaseWorkerResult):
    """The result of a run."""


if TYPE_CHECKING:
    _Worker = BaseWorker[InProcessJobConfiguration, InProcessVariables, InProcessResult]
else:
    _Worker = object  # Prefect registers each subclass of BaseWorker as a worker type


class InProcessWorker(_Worker):
    """A mixin before ``BaseWorker``, for workers that run flows in their own process.

    A subclass implements `select_runs`, `acquire_run` and the methods whose names begin with
    ``on_``. If a method that is overridden here is gone, see what ``get_and_submit_flow_runs`` of
    ``BaseWorker`` calls instead: the worker must neither take a run without `acquire_run`, nor end
    when one cannot be started.
    """

    job_configuration = InProcessJobConfiguration
    job_configuration_variables = InProcessVariables
    _description = "Runs trinity_sync's flows in a warm process that has joined Ray already."
    _documentation_url = "https://docs.prefect.io/v3/concepts/workers"

    def select_runs(self, due: Sequence[WorkerFlowRunResponse]) -> list[WorkerFlowRunResponse]:
        """Return the due runs that this worker starts now."""
        raise NotImplementedError

    async def complete_due_runs(
        self, due: list[WorkerFlowRunResponse], before: datetime
    ) -> list[WorkerFlowRunResponse]:
        """Return all runs that are due before a time, of which one response may lack some."""
        raise NotImplementedError

    async def acquire_run(self, flow_run: FlowRun) -> bool:
        """Set a run to Pending, and return whether this worker acquired it."""
        raise NotImplementedError

    def on_submitted(self, flow_run_id: UUID) -> None:
        """Handle that a run was started, or could not be."""
        raise NotImplementedError

    def on_ended(self, flow_run_id: UUID) -> None:
        """Handle that a started run has ended."""
        raise NotImplementedError

    async def on_capacity_free(self) -> None:
        """Start another run after one has ended."""
        raise NotImplementedError

    @property
    def pool_id(self) -> UUID | None:
        """Id of the work pool; None until the server has answered."""
        return self._work_pool.id if self._work_pool else None

    @property
    def pool_name(self) -> str:
        """Name of the work pool."""
        return self._work_pool_name

    @property
    def has_limit(self) -> bool:
        """Whether the number of concurrent runs is limited, as by ``prefect worker --limit``."""
        return self._limiter is not None

    def is_submitting(self, flow_run_id: UUID) -> bool:
        """Return whether a run is between `select_runs` and its start."""
        return flow_run_id in self._submitting_flow_run_ids

    def set_prefetch(self, seconds: float) -> None:
        """Set how many seconds before their scheduled time runs are started."""
        self._prefetch_seconds = seconds

    def start_service(self, service: Callable[[anyio.CancelScope], Any]) -> None:
        """Run an async function until the worker stops.

        Args:
            service: Called with the scope that is cancelled when the worker stops.
        """
        assert self._runs_task_group is not None  # made by setup
        scope = anyio.CancelScope()
        self._scheduled_task_scopes.add(scope)
        self._runs_task_group.start_soon(service, scope)

    async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
        before = datetime.now(timezone.utc) + timedelta(seconds=int(self._prefetch_seconds))
        return await self.complete_due_runs(await super()._get_scheduled_flow_runs(), before)

    async def _submit_scheduled_flow_runs(
        self, flow_run_response: list[WorkerFlowRunResponse]
    ) -> list[FlowRun]:
        return await super()._submit_scheduled_flow_runs(self.select_runs(flow_run_response))

    async def _submit_run(self, flow_run: FlowRun) -> None:
        """Start a run; an error must not cancel the other runs of the task group."""
        try:
            await super()._submit_run(flow_run)
        except Exception as error:
            logger.warning("cannot start flow run %s: %r", flow_run.name, error)
            self._release_limit_slot(flow_run.id)
        finally:
            self._submitting_flow_run_ids.discard(flow_run.id)
            self.on_submitted(flow_run.id)

    async def _submit_run_and_capture_errors(
        self, flow_run: FlowRun, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            result = await super()._submit_run_and_capture_errors(flow_run, *args, **kwargs)
        finally:
            self.on_ended(flow_run.id)
        await self.on_capacity_free()
        return result

    async def _propose_pending_state(self, flow_run: FlowRun) -> bool:
        return await self.acquire_run(flow_run)

    async def _propose_submitting_state(self, flow_run: FlowRun) -> None:
        """Do nothing, which saves a call: a run is submitted and started in the same process."""

    async def _give_worker_labels_to_flow_run(self, flow_run_id: UUID) -> None:
        """Do nothing, which saves a call: the infrastructure pid names this worker."""


# prefect-ray, which imports Ray


def get_task_body() -> Callable[..., Any]:
    """Return the function that ``RayTaskRunner`` runs on Ray for each task.

    If it is gone: use ``RayTaskRunner`` itself, of which Ray keeps a remote function per task run.
    """
    body: Callable[..., Any] = look_up("prefect_ray.task_runners.RayTaskRunner._run_prefect_task")
    return body


def get_options_context() -> Any:
    """Return the context that ``prefect_ray.remote_options`` sets.

    If it is gone: use a context variable that is set where ``remote_options`` is called.
    """
    return look_up("prefect_ray.context.RemoteOptionsContext")


# The server


def wrap_vacuum_session(
    wrap: Callable[..., Callable[..., AbstractAsyncContextManager[Any]]],
) -> None:
    """Wrap the database session of each batch of the server's vacuum.

    If it is gone, and ``test_between_two_batches_of_the_vacuum_others_may_write`` passes without
    this function: remove it.
    """
    vacuum = look_up("prefect.server.services.db_vacuum")
    session = look_up("prefect.server.services.db_vacuum._maintenance_session")
    vacuum._maintenance_session = wrap(session)


def begin_transactions_as_writers() -> None:
    """Make the server's SQLite transactions take the write lock when they begin.

    If it is gone, and ``test_prefect_s_own_transactions_refuse_the_slower_one`` fails: remove it.
    """
    configuration = look_up("prefect.server.database.configurations.AioSqliteConfiguration")
    begin = look_up(
        "prefect.server.database.configurations.AioSqliteConfiguration.begin_transaction"
    )

    def begin_as_writer(self: Any, session: Any, with_for_update: bool = False) -> Any:
        return begin(self, session, with_for_update=True)

    configuration.begin_transaction = begin_as_writer
