"""``reconcile``: repair what crashes left in Prefect, in shared memory and on disk."""

from prefect import flow
from prefect_ray.context import remote_options

from flows.on_ray import NodeRayTaskRunner, gather_results, pin_to_this_node
from tasks.reconcile import repair
from trinity_sync.orchestration.recovery.reconcile import GRACE_S


@flow(name="reconcile", task_runner=NodeRayTaskRunner(), persist_result=False, retries=0)
async def reconcile(root: str | None = None, grace_s: float = GRACE_S) -> None:
    """Repair what crashes left: flow runs, images, latest pointers, temporary files, slots.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed a step on
            this node.
        grace_s: Minimum age in seconds of a file or slot that is removed as unused.
    """
    with remote_options(**pin_to_this_node()):
        await gather_results([repair.submit(root, grace_s)])
