"""Repair what crashes left on a node, and show the findings."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import acreate_table_artifact
from prefect.client.orchestration import get_client

from tasks.on_ray import run_here
from tasks.weights import create_weights_artifact
from trinity_sync.orchestration.job_registry import select_roots
from trinity_sync.orchestration.quantities import make_artifact_key
from trinity_sync.orchestration.recovery.reconcile import GRACE_S, reconcile
from trinity_sync.settings import Settings
from trinity_sync.storage.gc import Finding


@task(name="repair", persist_result=False)
async def repair(root: str | None, grace_s: float = GRACE_S) -> None:
    """Repair what crashes left on this node, and show what was repaired and what was left."""
    roots, found = await run_here(repair_on_node, root, grace_s)
    await create_findings_artifacts(found, Settings())
    for each in roots:
        await create_weights_artifact(each)


def repair_on_node(root: str | None, grace_s: float) -> tuple[list[Path], list[Finding]]:
    """Repair jobs in a process of Ray, which imports Prefect for this, and return them."""
    settings = Settings()
    roots = select_roots(root, settings)
    return roots, asyncio.run(_reconcile(settings, roots, grace_s))


async def _reconcile(settings: Settings, roots: Sequence[Path], grace_s: float) -> list[Finding]:
    async with get_client() as client:
        return await reconcile(settings, roots, client, grace_s=grace_s)


async def create_findings_artifacts(found: Sequence[Finding], settings: Settings) -> None:
    """Show the findings in the Prefect UI: those of each job, and those of the node's spool."""
    own = f"reconciled-node-{re.sub(r'[^a-z0-9]+', '-', settings.node.lower())}"
    groups: dict[str, list[Finding]] = {}
    for finding in found:
        where = Path(finding.where)
        is_root = where.is_absolute() and settings.spool not in where.parents
        key = make_artifact_key("reconciled", finding.where) if is_root else own
        groups.setdefault(key, []).append(finding)
    for key, findings in groups.items():
        repaired = sum(finding.state == "repaired" for finding in findings)
        await acreate_table_artifact(
            key=key,
            description=f"{repaired} repaired, {len(findings) - repaired} left",
            table=[
                {
                    "state": finding.state,
                    "what": finding.what,
                    "why": finding.why,
                    "where": finding.where,
                }
                for finding in findings
            ],
        )
