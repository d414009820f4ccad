"""Tasks on Ray: on the node whose shared memory holds the images, and never lost sight of."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import cache
from typing import Any
from uuid import uuid4

import ray
from prefect import Task
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture
from prefect.states import Crashed
from prefect_ray.task_runners import PrefectRayFuture, RayTaskRunner
from ray.exceptions import RayError
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


@cache
def _run_task() -> Any:
    return ray.remote(_TASK_BODY)


class NodeRayTaskRunner(RayTaskRunner):
    """Runs tasks on Ray as Prefect's runner does, all of them by one remote function.

    Prefect's makes one a task. Ray keeps each for as long as the worker lives: its code in the head
    node, what each process has imported, a class of tasks of its own in every scheduler.
    """

    def submit(
        self,
        task: Task[..., Any],
        parameters: dict[str, Any],
        wait_for: Any = None,
        dependencies: Any = None,
    ) -> PrefectRayFuture[Any]:
        """Hand a task to Ray with the options of the context; its parameters are values."""
        run_id = uuid4()
        started = (
            _run_task()
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
        return PrefectRayFuture[Any](task_run_id=run_id, wrapped_future=started)


def list_living_nodes() -> dict[str, str]:
    """Ray's ids of the nodes that are alive, by each of their names.

    Those are the id itself, the name that Ray was started with there, and the host name, which
    several nodes on one machine share.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    names = ("NodeManagerHostname", "NodeName", "NodeID")
    return {node[name]: node["NodeID"] for name in names for node in nodes}


def pin_to_node(name: str, alive: Mapping[str, str] | None = None) -> dict[str, object]:
    """Ray options that pin a task to a node.

    A task asks for no CPU: it must start while the training holds them all. Ray must not repeat it
    by itself either, Prefect's retries are the ones that can be seen.

    Args:
        name: one of the names of `list_living_nodes`.
        alive: those, where they were asked for already.

    Raises:
        StackError: no such node is alive; Ray would wait for ever.
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
    """As `pin_to_node`, of the node that the flow runs on."""
    return pin_to_node(Settings().node)


@cache
def _waiters() -> ThreadPoolExecutor:
    """Threads that do nothing but wait for tasks: the loop's own are few, and are others', too.

    They are made when they are needed, so that there may be as many as there are tasks.
    """
    return ThreadPoolExecutor(1000, "waits-for-a-task")


async def gather_results(futures: Sequence[PrefectFuture[Any]]) -> list[Any]:
    """All results, once every task has ended; the worker's other flows go on meanwhile.

    Raises:
        Exception: the first failure.
    """
    ended = await gather_outcomes(futures)
    for result in ended:
        if isinstance(result, BaseException):
            raise result
    return ended


async def gather_outcomes(futures: Sequence[PrefectFuture[Any]]) -> list[Any]:
    """As `gather_results`, with what failed in the place of its result.

    A task whose Ray process died would be shown as running for ever, so it is marked as crashed
    here.
    """
    loop = asyncio.get_running_loop()
    waiting = [
        loop.run_in_executor(_waiters(), copy_context().run, future.result) for future in futures
    ]
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    for future, result in zip(futures, ended, strict=True):
        if isinstance(result, RayError):
            state: State[Any] = Crashed(message=f"Its Ray process died: {result}")
            async with get_client() as client:
                with suppress(ObjectNotFound):  # it died before it had begun
                    await client.set_task_run_state(future.task_run_id, state, force=True)
    return ended
