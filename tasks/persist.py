"""The tasks of a save on few nodes: one per component and node, where the images are."""

from typing import Any, TypeAlias, get_args

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from tasks.on_ray import run_on_node
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.layout import Component
from trinity_sync.orchestration.on_node import save
from trinity_sync.pipeline.save import RETRY_DELAYS_S, is_io_error
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.save import Persisted


async def persist_component(
    request: SaveRequest,
    component: Component | None,
    shards: NodeShards,
    with_callables: bool = False,
) -> Persisted:
    """Persist the images of one component on the node that holds them."""
    arguments = (request, component, shards, with_callables)
    return await run_on_node(shards.node, save.persist_component, *arguments)


async def has_io_error(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Return whether a task failed with an I/O error, as Prefect's ``retry_condition_fn``."""
    try:
        await state.aresult()
    except Exception as error:
        return is_io_error(error)
    return False


PersistTask: TypeAlias = Task[[SaveRequest, Component | None, NodeShards, bool], Any]

PERSIST_TASKS: dict[Component | None, PersistTask] = {
    component: Task(
        persist_component,
        name=f"persist-{component or 'callable-files'}",
        description=f"Persist {component or 'the files of callable saves'} on one node",
        retries=len(RETRY_DELAYS_S),
        retry_delay_seconds=[*RETRY_DELAYS_S],
        retry_condition_fn=has_io_error,
        persist_result=False,
    )
    for component in (*get_args(Component), None)
}
"""One task per component, so that the Prefect UI shows each by its name."""
