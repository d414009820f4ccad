"""The tasks that remove steps: those of a schedule or a person, and those after a commit."""

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
from trinity_sync.retention.planner import Rules
from trinity_sync.retention.policies import All, LastN, parse_policy
from trinity_sync.retention.prune import Pruned
from trinity_sync.retention.prune import prune as prune_root
from trinity_sync.settings import Settings

logger = logging.getLogger(__name__)


@task(name="prune", persist_result=False)
def prune(
    root: str | None, keep: str, keep_syncs: str, dry_run: bool, now: datetime | None = None
) -> None:
    """Remove what policies do not keep, root by root, and show it all.

    Args:
        root: as the flow's.
        keep: policy of checkpoints; empty for that of the settings.
        keep_syncs: policy of steps of weights only; likewise.
        dry_run: show the plan and touch nothing.
        now: time that policies reckon with; the clock's by default.

    Raises:
        ConfigError: a policy cannot be understood, or was refused for a root; others are pruned.
    """
    settings = Settings()
    quarantine = parse_policy(settings.keep_quarantine)
    rules = Rules(
        parse_policy(keep or settings.keep),
        parse_policy(keep_syncs or settings.keep_syncs),
        superseded=quarantine,
        quarantine=quarantine,
    )
    at = now.timestamp() if now else time.time()
    done: list[Pruned] = []
    refused: list[str] = []
    for each in select_roots(root, settings):
        try:
            done.append(
                prune_root(
                    each,
                    rules,
                    at,
                    spool=settings.spool,
                    recycle=settings.recycle,
                    dry_run=dry_run,
                    on_removed=partial(_update_catalog, each, settings),
                )
            )
        except (TrinitySyncError, OSError) as error:
            refused.append(f"{each}: {error}")
    show(done, dry_run=dry_run)
    if refused:
        raise ConfigError("\n".join(refused))


@task(name="prune", persist_result=False)
def prune_after_commit(request: SaveRequest) -> None:
    """Remove the checkpoints that a save's ``keep`` does not cover; its own is committed by now."""
    settings = Settings()
    quarantine = parse_policy(settings.keep_quarantine)
    require_allowed(settings, request.root)
    done = prune_root(
        request.root,
        Rules(checkpoints=LastN(request.keep), syncs=All(), quarantine=quarantine),
        time.time(),
        spool=settings.spool,
        recycle=settings.recycle,
        on_removed=lambda steps: try_mirror(settings, request.root, steps),
    )
    for each, why in done.removal.spared if done.removal else ():
        logger.info("step %d in %s stays: %s", each.step, request.root, why)


def _update_catalog(root: Path, settings: Settings, _steps: Sequence[int]) -> None:
    """Have the catalog say what the files say, whoever has changed them since the last time."""
    try:
        with open_catalog(get_catalog_url(settings)) as engine:
            rebuild(engine, root)
    except Exception as error:  # whatever is wrong with it, the files are as they should be
        logger.warning("the catalog does not know of all changes of %s: %s", root, error)


def show(done: list[Pruned], *, dry_run: bool) -> None:
    """Put what became of every step into the run's page of the Prefect UI."""
    freed = sum(each.nbytes for each in done)
    steps = sum(len(each.removed) for each in done)
    create_table_artifact(
        key="retention",
        description=f"{steps} steps of {len(done)} jobs {'would be ' if dry_run else ''}removed, "
        f"{freed:,} bytes",
        table=[
            {
                "root": str(each.root),
                "step": outcome.step.step,
                "run": outcome.step.run,
                "kinds": ", ".join(outcome.step.kinds),
                "bytes": f"{outcome.step.nbytes:,}",
                "state": outcome.state,
                "why": outcome.why,
            }
            for each in done
            for outcome in each.outcomes
        ]
        + [
            {
                "root": str(each.root),
                "step": f"quarantine {name}",
                "state": "would be removed" if dry_run else "removed",
            }
            for each in done
            for name in each.quarantine
        ],
    )
