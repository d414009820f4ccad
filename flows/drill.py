"""``restore-drill``: load the newest checkpoint for practice; fail while nothing is lost."""

from prefect import flow
from prefect_ray.context import remote_options

from flows.on_ray import OnRay, on_this_node, results
from tasks.drill import restore_newest


@flow(name="restore-drill", task_runner=OnRay(), persist_result=False, retries=0)
async def restore_drill(root: str | None = None) -> None:
    """Load the newest checkpoint as a restart would, all ranks' shards, and measure it.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed something
            on this node (or those of TRINITY_SYNC_MAINTAIN).
    """
    with remote_options(**on_this_node()):
        await results([restore_newest.submit(root)])
