"""The tasks that remove steps: those of a schedule or a person, and those after a commit."""

import logging
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact

from trinity_sync.catalog.database import opened, url_of
from trinity_sync.catalog.mirror import rebuild, try_mirror
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import ConfigError, TrinitySyncError
from trinity_sync.orchestration.job_registry import require_allowed, roots_of
from trinity_sync.retention.policies import All, LastN, parse_policy
from trinity_sync.retention.prune import (
    Plan,
    Removal,
    Rules,
    carry_out,
    plan,
    survey,
    verdicts,
)
from trinity_sync.retention.quarantine import let_go_of_aside
from trinity_sync.settings import Settings
from trinity_sync.storage.block_reuse import recycles

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pruned:
    """What retention made of a root."""

    root: Path
    plan: Plan
    removal: Removal | None
    """None where only the plan was asked for."""
    aside: list[str] = field(default_factory=list)
    """Folders of earlier rewinds that go, too."""


@task(name="prune", persist_result=False)
def prune(
    root: str | None, keep: str, keep_syncs: str, dry_run: bool, now: datetime | None = None
) -> None:
    """Remove what policies let go of, root by root, and show it all.

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
    rules = Rules(
        parse_policy(keep or settings.keep),
        parse_policy(keep_syncs or settings.keep_syncs),
        parse_policy(settings.keep_aside),
    )
    at = now.timestamp() if now else time.time()
    done: list[Pruned] = []
    refused: list[str] = []
    for each in roots_of(root, settings):
        try:
            done.append(prune_root(each, rules, settings, at, dry_run=dry_run))
            if not dry_run:
                _look_again(each, settings)
        except (TrinitySyncError, OSError) as error:
            refused.append(f"{each}: {error}")
    show(done, dry_run=dry_run)
    if refused:
        raise ConfigError("\n".join(refused))


@task(name="prune", persist_result=False)
def prune_after_commit(request: SaveRequest) -> None:
    """Remove the checkpoints that a save's ``keep`` lets go of; its own is committed by now."""
    rules = Rules(checkpoints=LastN(request.keep), syncs=All())
    require_allowed(Settings(), request.root)
    done = prune_root(Path(request.root), rules, Settings(), time.time())
    removed = [each.step for each in done.plan.removed]
    try_mirror(Settings(), request.root, removed)
    for each, why in done.removal.spared if done.removal else ():
        logger.info("step %d in %s stays: %s", each.step, request.root, why)


def prune_root(
    root: Path, rules: Rules, settings: Settings, now: float, *, dry_run: bool = False
) -> Pruned:
    """Plan, and carry it out unless it is for show."""
    made = plan(survey(root), rules, now)
    policy = parse_policy(settings.keep_aside)
    aside = let_go_of_aside(root, policy, now, dry_run=dry_run)
    if dry_run:
        return Pruned(root, made, None, aside)
    recycle = recycles(root, settings.recycle)
    done = carry_out(root, made, spool=settings.spool, recycle=recycle)
    return Pruned(root, made, done, aside)


def _look_again(root: Path, settings: Settings) -> None:
    """Have the catalog say what the files say, whoever has changed them since the last time."""
    try:
        with opened(url_of(settings)) as engine:
            rebuild(engine, root)
    except Exception as error:  # whatever is wrong with it, the files are as they should be
        logger.warning("the catalog does not know of all changes of %s: %s", root, error)


def show(done: list[Pruned], *, dry_run: bool) -> None:
    """Put what became of every step into the run's page of the Prefect UI."""
    freed = sum((each.removal or each.plan).nbytes for each in done)
    steps = sum(len((each.removal or each.plan).removed) for each in done)
    create_table_artifact(
        key="retention",
        description=f"{steps} steps of {len(done)} jobs {'would be ' if dry_run else ''}removed, "
        f"{freed:,} bytes",
        table=[
            {
                "root": str(each.root),
                "step": verdict.step.step,
                "run": verdict.step.run,
                "kinds": ", ".join(verdict.step.kinds),
                "bytes": f"{verdict.step.nbytes:,}",
                "state": verdict.state,
                "why": verdict.why,
            }
            for each in done
            for verdict in verdicts(each.plan, each.removal)
        ]
        + [
            {
                "root": str(each.root),
                "step": f"set aside {name}",
                "state": "would be removed" if dry_run else "removed",
            }
            for each in done
            for name in each.aside
        ],
    )
