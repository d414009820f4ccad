"""Run tasks on the Ray node that holds the images, and detect tasks whose process died."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any, TypeVar
from uuid import UUID, uuid4

import httpx
import ray
from prefect import Task
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.states import Crashed
from prefect_ray.task_runners import PrefectRayFuture, RayTaskRunner
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_sync.errors import StackError
from trinity_sync.orchestration.prefect_compat import (
    get_options_context,
    get_task_body,
    serialize_context,
)
from trinity_sync.settings import Settings

_TASK_BODY = get_task_body()
_OPTIONS = get_options_context()
_Result = TypeVar("_Result")


@cache
def _get_remote(function: Callable[..., Any]) -> Any:
    return ray.remote(function)


class NodeRayTaskRunner(RayTaskRunner):
    """Prefect's Ray task runner with a single remote function for all tasks.

    Prefect's own runner defines a remote function per task run. Ray keeps each of them until the
    worker exits: its code in the head node, its imports in each process, and a scheduling class in
    every raylet.
    """

    def submit(
        self,
        task: Task[..., Any],
        parameters: dict[str, Any],
        wait_for: Any = None,
        dependencies: Any = None,
    ) -> PrefectRayFuture[Any]:
        """Submit a task to Ray with the Ray options of the current context.

        Args:
            task: The task to run.
            parameters: Its arguments by name. They must be values, not futures.
            wait_for: Futures to wait for, as in Prefect's task runners.
            dependencies: Upstream task runs by parameter, for the task run's graph.
        """
        run_id = uuid4()
        submitted = (
            _get_remote(_TASK_BODY)
            .options(name=task.name, **_OPTIONS.get().current_remote_options)
            .remote(
                task=task,
                task_run_id=run_id,
                parameters=parameters,
                wait_for=wait_for,
                dependencies=dependencies,
                context=serialize_context(),
            )
        )
        return PrefectRayFuture[Any](task_run_id=run_id, wrapped_future=submitted)


def list_living_nodes() -> dict[str, str]:
    """Map each name of each living Ray node to the node's Ray id.

    A node has three names: its Ray id, the name that Ray was started with, and its host name, which
    several nodes of one machine share.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    names = ("NodeManagerHostname", "NodeName", "NodeID")
    return {node[name]: node["NodeID"] for name in names for node in nodes}


def pin_to_node(name: str, alive: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return Ray options that pin a task to a node.

    The task requests no CPU, because it must start while the training uses all of them. Ray does
    not retry it: Prefect does, visibly.

    Args:
        name: A name of the node, see `list_living_nodes`.
        alive: The living nodes; by default Ray is asked.

    Raises:
        StackError: No node of that name is alive. Ray would wait for it forever.
    """
    alive = list_living_nodes() if alive is None else alive
    if name not in alive:
        raise StackError(
            f"node {name} is not in this Ray cluster (alive: {', '.join(sorted(alive))}). Start "
            "Ray there, by that name (TRINITY_SYNC_NODE), and retry the flow run."
        )
    pinned = NodeAffinitySchedulingStrategy(alive[name], soft=False)
    return {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": pinned}


def pin_to_this_node() -> dict[str, object]:
    """Return Ray options that pin a task to the node of the flow run, see `pin_to_node`."""
    return pin_to_node(Settings().node)


async def run_on_node(
    node: str, alive: Mapping[str, str], function: Callable[..., _Result], *arguments: Any
) -> _Result:
    """Run a function on a Ray node and return its result, without a task run in Prefect.

    No thread waits for it: ten thousand of these may be awaited at a time. All that flows do on Ray
    without Prefect goes through here.

    Args:
        node: A name of the node.
        alive: The living nodes, see `list_living_nodes`.
        function: A function of a module. The node's process imports that module.
        arguments: Its arguments.

    Raises:
        StackError: No node of that name is alive.
        RayError: The node, or the process there, died.
        Exception: The error of the function.
    """
    options = {"name": function.__name__, **pin_to_node(node, alive)}
    submitted = _get_remote(function).options(**options).remote(*arguments)
    try:
        result: _Result = await submitted
        return result
    except RayTaskError as error:  # which is of the class of the function's error, too
        raise error.cause from None


@cache
def _get_result_threads() -> ThreadPoolExecutor:
    """Threads that wait for task results.

    The event loop's own pool is small and shared. This pool starts a thread on demand only, so it
    may be as large as the number of tasks in flight.
    """
    return ThreadPoolExecutor(1000, "task-result")


async def gather_results(futures: Sequence[PrefectFuture[Any]]) -> list[Any]:
    """Wait until every task has ended, and return their results in order.

    Other flow runs of the worker continue meanwhile.

    Raises:
        Exception: The error of the first task that failed.
    """
    outcomes = await gather_outcomes(futures)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


async def gather_outcomes(futures: Sequence[PrefectFuture[Any]]) -> list[Any]:
    """Wait until every task has ended, and return the result or error of each in order.

    A task run whose Ray process died would stay Running in the API, so it is set to Crashed here.
    """
    loop = asyncio.get_running_loop()
    waiting = [
        loop.run_in_executor(_get_result_threads(), copy_context().run, future.result)
        for future in futures
    ]
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    for future, outcome in zip(futures, outcomes, strict=True):
        if isinstance(outcome, RayError):
            await _crash_task_run(future.task_run_id, f"Its Ray process died: {outcome}")
    return outcomes


async def _crash_task_run(task_run_id: UUID, message: str) -> None:
    state: State[Any] = Crashed(message=message)
    async with get_client() as client:
        try:
            await client.set_task_run_state(task_run_id, state, force=True)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 404:  # the process died before it created the task run
                raise
