"""Run functions in Ray processes of the nodes that hold the images, for the tasks of a flow.

A task itself runs in the worker, which reports its states over one connection. Its work is a plain
Ray task, without Prefect: a process of Ray starts in a fraction of the time, and a Ray task takes a
millisecond instead of a tenth of a second.
"""

import math
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, ParamSpec, TypeVar

import ray
from prefect.runtime import task_run
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_sync.errors import StackError
from trinity_sync.orchestration.on_node import Outcome, call
from trinity_sync.settings import read_settings

P = ParamSpec("P")
T = TypeVar("T")


@cache
def _get_remote_call() -> Any:
    # The task requests no CPU, because it must start while the training uses all of them. Ray does
    # not retry it: Prefect does, visibly.
    return ray.remote(num_cpus=0, max_retries=0)(call)


async def run_on_node(
    node: str | None, root: str | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a function in a Ray process of a node, and return its result.

    ``node`` is a name from `list_living_nodes`, or None for any node. ``root`` is the root that the
    function works on; None if it chooses the roots itself. Its module and name identify it there.
    Meanwhile the process is named by the Prefect task, such as ``ray::persist-model``.

    Raises:
        ConfigError: The node's settings do not allow flows to work on the root.
        StackError: No node of that name is alive, for which Ray would wait forever; or Ray has
            failed, whose error is the cause.
        Exception: The error of the function, with its cause.
    """
    options: dict[str, Any] = {"name": task_run.task_name or function.__name__}
    if node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(_find(node), soft=False)
    remote_call = _get_remote_call().options(**options)
    try:
        outcome: Outcome[T] = await remote_call.remote(root, function, *args, **kwargs)
    except Exception as error:
        why = str(error).strip().rpartition("\n")[2]  # after the traceback of its process
        raise StackError(
            f"Ray cannot run {options['name']} ({type(error).__name__}: {why}). If it happens "
            "again: trinity-sync restart"
        ) from error
    return outcome.unwrap()


async def run_here(
    root: str | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a function in a Ray process of the flow run's own node, see `run_on_node`."""
    return await run_on_node(read_settings()[0].node, root, function, *args, **kwargs)


def list_living_nodes() -> dict[str, str]:
    """Map each name of each living Ray node to the node's Ray id.

    A node has three names: its Ray id, the name that Ray was started with, and its host name, which
    several nodes of one machine share.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    names = ("NodeManagerHostname", "NodeName", "NodeID")
    alive = {node[name]: node["NodeID"] for name in names for node in nodes}
    _Nodes.alive, _Nodes.listed_at = alive, time.monotonic()
    return alive


class _Nodes:
    """The living nodes when they were last listed: a save on 10,000 nodes lists them once."""

    alive: ClassVar[Mapping[str, str]] = {}
    listed_at: ClassVar[float] = -math.inf


def _find(name: str) -> str:
    """Return the Ray id of a node that was alive a second ago or later."""
    recent = time.monotonic() < _Nodes.listed_at + 1
    alive = _Nodes.alive if recent and name in _Nodes.alive else list_living_nodes()
    if name not in alive:
        raise StackError(
            f"node {name} is not in this Ray cluster (alive: {', '.join(sorted(alive))}). Start "
            "Ray there, by that name (TRINITY_SYNC_NODE), and retry the flow run."
        )
    return alive[name]
