"""The parallel tasks of a save: one per component and node, on the node that holds the images."""

from typing import Any, TypeAlias, get_args

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from trinity_sync.client.save_request import SaveRequest
from trinity_sync.fs.rate_limit import RateLimit
from trinity_sync.layout import Component
from trinity_sync.orchestration.job_registry import require_allowed
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.snapshot.spool import get_job_spool
from trinity_sync.storage.callable_saves import await_callable_saves, sync_callable_files
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.save import Persisted


def make_save(request: SaveRequest) -> SaveId:
    """Return the save of a request, once this node's settings allow flows to work on its root.

    Raises:
        ConfigError: this node's settings do not allow flows to work there.
    """
    require_allowed(request.root)
    return request.save


def persist_component(
    request: SaveRequest,
    component: Component | None,
    shards: NodeShards,
    with_callables: bool = False,
) -> Persisted:
    """Persist the images of one component on one node, durably and under temporary names.

    Args:
        request: The save.
        component: The component; None if the node has callable saves only.
        shards: The shards that this node holds.
        with_callables: Also wait for the callable saves of this node, and sync their files.
    """
    stack, save = StackSettings(), make_save(request)
    spool = get_job_spool(shards.spool, save.root)  # refuses another job's, before anything is read
    rate = stack.io.max_mb_per_s * 1e6
    options = WriteOptions(
        limit=RateLimit(spool.folder.parent / ".write_rate", rate) if rate else None,
        rank_timeout_s=read_job_settings(save.root).rank_timeout_s,
        nice=stack.worker.nice,
    )
    written = persist(shards, save, component, options) if component else []
    statuses = await_callable_saves(spool, save) if with_callables else []
    sync_callable_files(save, statuses)
    return Persisted(written, statuses)


async def is_io_error(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Return whether a task failed with an I/O error, as Prefect's ``retry_condition_fn``.

    An I/O error may be transient. A missing, corrupted or superseded image stays so.

    Args:
        state: The Failed state of the task run.
    """
    try:
        await state.aresult()
    except Exception as error:
        return isinstance(error.__cause__ or error, OSError)
    return False


PersistTask: TypeAlias = Task[[SaveRequest, Component | None, NodeShards, bool], Persisted]

PERSIST_TASKS: dict[Component | None, PersistTask] = {
    component: Task(
        persist_component,
        name=f"persist-{component or 'callable-files'}",
        description=f"Persist {component or 'the files of callable saves'} on one node",
        retries=3,
        retry_delay_seconds=[1, 5, 15],
        retry_condition_fn=is_io_error,
        persist_result=False,
    )
    for component in (*get_args(Component), None)
}
"""One task per component, so that the Prefect UI shows each by its name."""
