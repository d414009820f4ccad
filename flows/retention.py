"""``retention``: remove steps that the policies let go of, once newer ones are whole."""

from datetime import datetime

from prefect import flow
from prefect_ray.context import remote_options

from flows.on_ray import NodeRayTaskRunner, gather_results, pin_to_this_node
from tasks.prune import prune


@flow(name="retention", task_runner=NodeRayTaskRunner(), persist_result=False, retries=0)
async def retention(
    root: str | None = None,
    keep: str = "",
    keep_syncs: str = "",
    dry_run: bool = False,
    now: datetime | None = None,
) -> None:
    """Remove what nobody keeps: no policy, no pin, no lease, no pointer.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed something
            on this node (or those of TRINITY_SYNC_MAINTAIN).
        keep: Which checkpoints stay, such as last=3,every=100,hourly=24,best=2:reward:max; empty
            for TRINITY_SYNC_KEEP, which keeps all unless it is set.
        keep_syncs: Which steps of weights only stay; empty for TRINITY_SYNC_KEEP_SYNCS, the last 2
            unless it is set.
        dry_run: Show what would be removed, and remove nothing.
        now: Time that policies reckon with, for a look ahead with dry_run; empty for the clock's.
    """
    with remote_options(**pin_to_this_node()):  # it sees the roots, others may not
        await gather_results([prune.submit(root, keep, keep_syncs, dry_run, now)])
