"""Where a task must run: on the node whose shared memory holds the images."""

import ray
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
