"""Remove steps, and show in the Prefect UI what became of each step."""

from datetime import datetime

from prefect import task
from prefect.artifacts import acreate_table_artifact

from tasks.on_ray import run_here, run_on_node
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import ConfigError
from trinity_sync.orchestration.on_node import prune as on_node
from trinity_sync.orchestration.prefect_queries import RETENTION
from trinity_sync.orchestration.quantities import format_bytes, make_artifact_key
from trinity_sync.retention.prune import Pruned


@task(name="prune", persist_result=False)
async def prune(
    root: str | None, keep: str, keep_weights: str, dry_run: bool, now: datetime | None = None
) -> None:
    """Remove the steps that no policy keeps, root by root.

    Raises:
        ConfigError: A policy is invalid, or a root could not be pruned; the others were.
    """
    found = await run_here(on_node.prune, root, keep, keep_weights, dry_run, now)
    for done in found:
        if isinstance(done, Pruned):
            await create_retention_artifact(done, dry_run=dry_run)
    if failures := [each for each in found if isinstance(each, str)]:
        raise ConfigError("\n".join(failures))


@task(name="prune", persist_result=False)
async def prune_after_commit(request: SaveRequest, node: str) -> None:
    """Remove all checkpoints but the newest ``request.keep`` and what the job's policy keeps."""
    await run_on_node(node, on_node.prune_after_commit, request)


async def create_retention_artifact(done: Pruned, *, dry_run: bool) -> None:
    """Show in the Prefect UI what became of every step of a job."""
    await acreate_table_artifact(
        key=make_artifact_key(RETENTION, done.root),
        description=f"{len(done.removed)} steps of `{done.root}` "
        f"{'would be ' if dry_run else ''}removed, {format_bytes(done.nbytes)}",
        table=[
            {
                "step": outcome.step.step,
                "run": outcome.step.run,
                "kinds": ", ".join(outcome.step.kinds),
                "size": format_bytes(outcome.step.nbytes),
                "state": outcome.state,
                "why": outcome.why,
            }
            for outcome in done.outcomes
        ]
        + [
            {
                "step": f"quarantine {name}",
                "state": "would be removed" if dry_run else "removed",
            }
            for name in done.quarantine
        ],
    )
