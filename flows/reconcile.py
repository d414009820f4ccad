"""``reconcile``: repair what crashes left in Prefect, in shared memory and on disk."""

from prefect import flow

from tasks.reconcile import repair
from trinity_sync.orchestration.recovery.reconcile import GRACE_S


@flow(name="reconcile", persist_result=False, retries=0)
async def reconcile(root: str | None = None, grace_s: float = GRACE_S) -> None:
    """Repair what crashes left: flow runs, images, latest pointers, temporary files, slots.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed a step on
            this node.
        grace_s: Minimum age in seconds of a file or slot that is removed as unused.
    """
    await repair(root, grace_s)
