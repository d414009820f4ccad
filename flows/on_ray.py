"""Tasks on Ray: on the node whose shared memory holds the images, and never lost sight of."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any

import ray
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.states import Crashed
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_sync.errors import StackError


def on_node(name: str) -> dict[str, object]:
    """Ray options that pin a task to the node of that host name.

    A task asks for no CPU: it must start while the training holds them all. Ray must not repeat it
    by itself either, Prefect's retries are the ones that can be seen.

    Raises:
        StackError: no such node is alive; Ray would wait for ever.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    for node in nodes:
        if node["NodeManagerHostname"] == name:
            pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            return {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": pinned}
    alive = ", ".join(sorted(node["NodeManagerHostname"] for node in nodes))
    raise StackError(
        f"node {name}, which holds the images, is not in this Ray cluster (alive: {alive}). "
        "Start Ray there, and retry the flow run."
    )


@cache
def _waiters() -> ThreadPoolExecutor:
    """Threads that do nothing but wait for tasks: the loop's own are few, and are others', too.

    They are made when they are needed, so that there may be as many as there are tasks.
    """
    return ThreadPoolExecutor(1000, "waits-for-a-task")


async def results(futures: Sequence[PrefectFuture[Any]]) -> list[Any]:
    """All results, once every task has ended; the worker's other flows go on meanwhile.

    Raises:
        Exception: the first failure. A task whose Ray process died would be shown as running for
            ever, so it is marked as crashed here.
    """
    loop = asyncio.get_running_loop()
    waiting = [
        loop.run_in_executor(_waiters(), copy_context().run, future.result) for future in futures
    ]
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    for future, result in zip(futures, ended, strict=True):
        if isinstance(result, RayError):
            async with get_client() as client:
                state: State[Any] = Crashed(message=f"Its Ray process died: {result}")
                await client.set_task_run_state(future.task_run_id, state, force=True)
    for result in ended:
        if isinstance(result, BaseException):
            raise result
    return ended
