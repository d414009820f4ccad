"""The private and undocumented names of Prefect that this project uses.

Prefect renames them without notice. Each is listed here once, with its purpose and what to do if it
is gone, and is looked up when the process that needs it starts: names of the worker when this
module is imported, names of the server before it starts. A version that lacks a name is refused
there, and not in the middle of a save.

`InProcessWorker` overrides the private methods of Prefect's worker and gives its subclass public
ones.
"""

import importlib
import inspect
import logging
import pkgutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import anyio
import prefect
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.flows import Flow
from prefect.workers.base import BaseJobConfiguration, BaseVariables, BaseWorker, BaseWorkerResult

from trinity_sync.errors import MissingPackageError, UnsupportedPrefectError

SUPPORTED = ">=3.7.5,<3.10"
"""Supported versions of Prefect, as in pyproject.toml."""

logger = logging.getLogger(__name__)


def look_up(name: str, owner: object = None) -> Any:
    """Return the object that a qualified name of Prefect refers to.

    ``owner`` has the last part of the name as its attribute; it is needed if that owner is neither
    a module nor a class.

    Raises:
        UnsupportedPrefectError: The installed version lacks the name.
        MissingPackageError: A package that Prefect imports there is missing or of another version.
    """
    try:
        if owner is None:
            return pkgutil.resolve_name(name)
        return getattr(owner, name.rpartition(".")[2])
    except (ImportError, AttributeError) as error:
        if broken := _find_broken_import(name):
            raise MissingPackageError(
                f"Prefect {prefect.__version__} cannot import {name}: {broken}. Install "
                "trinity-sync[stack] again, whose packages fit",
                name=broken.name,
            ) from error
        raise UnsupportedPrefectError(
            f"Prefect {prefect.__version__} has no {name}, which trinity_sync needs; "
            f'install "prefect{SUPPORTED}"'
        ) from error


def _find_broken_import(name: str) -> ImportError | None:
    """Return the error of a module in a qualified name that is there and imports another."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        module = ".".join(parts[:end])
        try:
            importlib.import_module(module)
        except ImportError as error:
            return None if error.name == module else error
    return None


# Flows in this process

run_flow: Callable[..., Any] = look_up("prefect.flow_engine.run_flow")
"""Run a flow as a given flow run. If it is gone: see what ``Runner.execute_flow_run`` calls."""

propose_state: Callable[..., Any] = look_up("prefect.utilities.engine.propose_state")
"""Propose a state of a run to the server. If it is gone: ``client.set_flow_run_state`` without
force, whose answer says whether the server rejects or delays the state."""

FlowRunContext: Any = look_up("prefect.context.FlowRunContext")
"""Has the flow run that runs here, with its key. If it is gone: read the run of ``flow_run.id``."""

parameter_schema: Callable[[Flow[..., Any]], Any] = look_up(
    "prefect.utilities.callables.parameter_schema"
)
"""Return the JSON schema of a flow's parameters. If it is gone: see what ``Flow.deploy`` calls."""


def spare_calls_of_runs() -> None:
    """Make the flow runs of this process do without what a save does not need.

    - A connection of its own for each run, which would tell that a user suspends it. Prefect waits
      for it, and for its end, while all other runs of the process stand still: 0.3 s a run. A save
      that is suspended would keep its images in memory; it can be cancelled.
    - Asking the server for each run where results are stored, with a client of its own. No flow
      stores any, and a place that cannot be opened here would crash each run.
    - The event that a task is pending, right before the one that it runs.
    - Telling the server that the engine retries no flow here, and the digest of a flow's source.

    A name that is gone needs no replacement: runs then take longer, and nothing else changes.
    """
    engine, results = look_up("prefect.flow_engine"), look_up("prefect.results")
    if hasattr(engine, "observe_flow_run_suspension"):
        engine.observe_flow_run_suspension = lambda *_, **__: nullcontext()
    if hasattr(results, "_read_server_default_result_storage_block_id"):
        results._read_server_default_result_storage_block_id = lambda: None
    tasks = look_up("prefect.task_engine")
    if emit := getattr(tasks, "emit_task_run_state_change_event", None):
        tasks.emit_task_run_state_change_event = partial(_emit_unless_pending, emit)
    client = look_up("prefect.client.orchestration.PrefectClient")
    client.update_flow_run = _update_unless_not_retried(client.update_flow_run)


def _emit_unless_pending(
    emit: Callable[..., Any], *args: Any, validated_state: State[Any], **kwargs: Any
) -> Any:
    if validated_state.is_pending():
        return None
    return emit(*args, validated_state=validated_state, **kwargs)


def _update_unless_not_retried(update: Callable[..., Any]) -> Callable[..., Any]:
    async def update_flow_run(*client: Any, **fields: Any) -> Any:
        said = {"flow_run_id", "flow_version", "empirical_policy"}
        if fields.keys() == said and not fields["empirical_policy"].retries:
            return None
        return await update(*client, **fields)

    return update_flow_run


# The worker

for _name in (
    "_get_scheduled_flow_runs",
    "_release_limit_slot",
    "_submit_run",
    "_description",
    "_documentation_url",
):
    look_up(f"prefect.workers.base.BaseWorker.{_name}")
_names = inspect.unwrap(BaseWorker.__init__).__code__.co_names  # also of attributes that it sets
for _name in (
    "_limiter",
    "_prefetch_seconds",
    "_runs_task_group",
    "_scheduled_task_scopes",
    "_submitting_flow_run_ids",
    "_work_pool_name",
):
    look_up(f"prefect.workers.base.BaseWorker.{_name}", SimpleNamespace(**dict.fromkeys(_names)))


if TYPE_CHECKING:
    _Worker = BaseWorker[BaseJobConfiguration, BaseVariables, BaseWorkerResult]
else:
    _Worker = object  # Prefect registers each subclass of BaseWorker as a worker type


class InProcessWorker(_Worker):
    """A mixin before ``BaseWorker``, for workers that run flows in their own process.

    A subclass implements `select_runs`, `acquire_run`, `execute_run` and the methods whose names
    begin with ``on_``. If a method that is overridden here is gone, see what
    ``get_and_submit_flow_runs`` of ``BaseWorker`` calls instead: the worker must neither take a run
    without `acquire_run`, nor end when one cannot be started.
    """

    job_configuration = BaseJobConfiguration
    job_configuration_variables = BaseVariables
    _description = "Runs trinity_sync's flows in a warm process that has joined Ray already."
    _documentation_url = "https://docs.prefect.io/v3/concepts/workers"

    @classmethod
    def get_default_base_job_template(cls) -> dict[str, Any]:
        """Return the template of a new pool, without variables: there is nothing to set them for.

        The server validates variables at each run, those of an infrastructure for 7 ms.
        """
        return {"job_configuration": {"env": {}}, "variables": {"properties": {}}}

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

    async def execute_run(self, flow_run: FlowRun) -> None:
        """Run the flow of an acquired run until its end."""
        raise NotImplementedError

    def on_ended(self, flow_run_id: UUID) -> None:
        """Handle that a run has ended, or was not acquired."""
        raise NotImplementedError

    async def on_capacity_free(self) -> None:
        """Start another run after one has ended."""
        raise NotImplementedError

    @property
    def pool_name(self) -> str:
        """Name of the work pool."""
        return self._work_pool_name

    @property
    def has_limit(self) -> bool:
        """Whether the number of concurrent runs is limited, as by ``prefect worker --limit``."""
        return self._limiter is not None

    def is_active(self, flow_run_id: UUID) -> bool:
        """Return whether this worker is acquiring or executing a run."""
        return flow_run_id in self._submitting_flow_run_ids

    def set_prefetch(self, seconds: float) -> None:
        """Set how many seconds before their scheduled time runs are started."""
        self._prefetch_seconds = seconds

    def start_service(self, service: Callable[[anyio.CancelScope], Any]) -> None:
        """Run an async function until the worker stops, which cancels the scope passed to it."""
        assert self._runs_task_group is not None  # made by setup
        scope = anyio.CancelScope()
        self._scheduled_task_scopes.add(scope)
        self._runs_task_group.start_soon(service, scope)

    async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
        before = datetime.now(UTC) + timedelta(seconds=int(self._prefetch_seconds))
        due = await self.complete_due_runs(await super()._get_scheduled_flow_runs(), before)
        return self.select_runs(due)

    async def _submit_run(self, flow_run: FlowRun) -> None:
        """Acquire and execute a run; an error must not cancel the other runs of the task group.

        Prefect's method reads deployment and flow, builds the configuration of an infrastructure,
        records its id and sends two events: five calls a run that a run in this process needs not.
        """
        acquired = False
        try:
            acquired = await self.acquire_run(flow_run)
            # Prefect cancels runs only before they have started; `execute_run` cancels its own
            if observer := getattr(self, "_cancelling_observer", None):
                observer.remove_in_flight_flow_run_id(flow_run.id)
            if acquired:
                await self.execute_run(flow_run)
        except Exception as error:
            logger.warning("cannot execute flow run %s: %r", flow_run.name, error)
        finally:
            self._release_limit_slot(flow_run.id)
            self._submitting_flow_run_ids.discard(flow_run.id)
            self.on_ended(flow_run.id)
        if acquired:  # a run that is refused would be taken and refused without a pause
            await self.on_capacity_free()


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

    A session that is opened within a transaction begins none: it would wait for that lock until
    SQLite's time-out.

    If it is gone, and ``test_prefects_own_transactions_refuse_the_slower_writer`` fails: remove it.
    """
    configuration = look_up("prefect.server.database.configurations.AioSqliteConfiguration")
    begin = look_up(
        "prefect.server.database.configurations.AioSqliteConfiguration.begin_transaction"
    )
    mode = look_up("prefect.server.database.configurations.SQLITE_BEGIN_MODE")

    @asynccontextmanager
    async def begin_as_writer(self: Any, session: Any, **_: bool) -> AsyncIterator[Any]:
        async with begin(self, session, with_for_update=True) as transaction:
            await session.connection()
            mode.set(None)
            yield transaction

    configuration.begin_transaction = begin_as_writer


def persist_events_if(is_kept: Callable[[str], bool]) -> None:
    """Store only events whose names ``is_kept`` accepts; triggers and subscribers still get all.

    If the name is gone: all are stored, 0.4 MB a save.
    """
    persister = look_up("prefect.server.events.services.event_persister")
    if write := getattr(persister, "write_events", None):

        async def write_kept(session: Any, events: Sequence[Any]) -> None:
            if kept := [event for event in events if is_kept(event.event)]:
                await write(session=session, events=kept)

        persister.write_events = write_kept
