"""``retention``: remove the steps that no retention policy keeps."""

from datetime import datetime

from prefect import flow

from tasks.prune import prune


@flow(name="retention", persist_result=False, retries=0)
async def retention(
    root: str | None = None,
    keep: str = "",
    keep_weights: str = "",
    dry_run: bool = False,
    now: datetime | None = None,
) -> None:
    """Remove every step that no policy, pin, lease or latest pointer keeps.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed a step on
            this node.
        keep: Policy for checkpoints, such as last=3,every=100,hourly=24,best=2:reward:max; empty
            for each job's own, which keeps all unless it is set.
        keep_weights: Policy for steps that hold weights only; empty for each job's own, which
            keeps the last 2 unless it is set.
        dry_run: Show what would be removed, and remove nothing.
        now: Current time for the policies, to preview a later date with dry_run; empty for the
            present.
    """
    await prune(root, keep, keep_weights, dry_run, now)
