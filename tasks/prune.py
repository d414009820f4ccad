"""Remove steps: on a schedule, on request, or after a commit."""

import logging
import time
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact

from trinity_sync.catalog.database import get_catalog_url, open_catalog
from trinity_sync.catalog.mirror import rebuild, try_mirror
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import ConfigError, TrinitySyncError
from trinity_sync.orchestration.job_registry import require_allowed, select_roots
from trinity_sync.orchestration.prefect_queries import RETENTION
from trinity_sync.orchestration.quantities import format_bytes, make_artifact_key
from trinity_sync.orchestration.root_threads import OTHERS_WAIT_S, RootVisits
from trinity_sync.retention.planner import Rules
from trinity_sync.retention.policies import All, LastN, parse_policy
from trinity_sync.retention.prune import Pruned
from trinity_sync.retention.prune import prune as prune_root
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.storage.job_settings import read_job_settings

logger = logging.getLogger(__name__)


@task(name="prune", persist_result=False)
def prune(
    root: str | None, keep: str, keep_weights: str, dry_run: bool, now: datetime | None = None
) -> None:
    """Remove the steps that no policy keeps, root by root, and show what became of each step.

    Args:
        root: Root of the job; None for all known jobs.
        keep: Policy for checkpoints; empty for each job's own.
        keep_weights: Policy for steps that hold weights only; empty for each job's own.
        dry_run: Show what would be removed, and remove nothing.
        now: Current time for the policies; by default the present.

    Raises:
        ConfigError: A policy is invalid, or a root could not be pruned; the others were.
    """
    settings = Settings()

    def prune_one(each: Path) -> Pruned | str:
        try:
            return prune_root(
                each,
                Rules.of_job(read_job_settings(each), keep=keep, keep_weights=keep_weights),
                now.timestamp() if now else time.time(),
                spool=settings.spool,
                recycle=StackSettings().io.reuse_files,
                dry_run=dry_run,
                on_removed=partial(_update_catalog, each, settings),
            )
        except (TrinitySyncError, OSError) as error:
            return f"{each}: {error}"

    roots = select_roots(root, settings)
    found = RootVisits("retention").visit(roots, prune_one, each_s=OTHERS_WAIT_S).values()
    for done in found:
        if isinstance(done, Pruned):
            create_retention_artifact(done, dry_run=dry_run)
    if failures := [each for each in found if isinstance(each, str)]:
        raise ConfigError("\n".join(failures))


@task(name="prune", persist_result=False)
def prune_after_commit(request: SaveRequest) -> None:
    """Remove all checkpoints but the newest ``request.keep``, after the save is committed."""
    settings = Settings()
    require_allowed(request.root)
    done = prune_root(
        request.root,
        Rules(
            checkpoints=LastN(request.keep),
            syncs=All(),
            quarantine=parse_policy(read_job_settings(request.root).keep_quarantine),
        ),
        time.time(),
        spool=settings.spool,
        recycle=StackSettings().io.reuse_files,
        on_removed=lambda steps: try_mirror(settings, request.root, steps),
    )
    for step, why in done.removal.spared if done.removal else ():
        logger.info("keeping step %d in %s: %s", step.step, request.root, why)


def _update_catalog(root: Path, settings: Settings, _steps: Sequence[int]) -> None:
    """Rebuild the catalog from the files of the root."""
    try:
        with open_catalog(get_catalog_url(settings)) as engine:
            rebuild(engine, root)
    except Exception as error:  # the catalog is best effort, the files count
        logger.warning("cannot update the catalog for %s: %s", root, error)


def create_retention_artifact(done: Pruned, *, dry_run: bool) -> None:
    """Show in the Prefect UI what became of every step of a job.

    Args:
        done: The result.
        dry_run: Whether it is a preview.
    """
    create_table_artifact(
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
