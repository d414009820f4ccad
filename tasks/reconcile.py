"""Repair what crashes left on a node, and show the findings."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client

from tasks.weights import create_weights_artifact
from trinity_sync.orchestration.job_registry import select_roots
from trinity_sync.orchestration.recovery.reconcile import GRACE_S, reconcile
from trinity_sync.settings import Settings
from trinity_sync.storage.gc import Finding


@task(name="repair", persist_result=False)
def repair(root: str | None, grace_s: float = GRACE_S) -> None:
    """Repair what crashes left on this node, and show what was repaired and what was left.

    Args:
        root: Root of the job; None for all known jobs.
        grace_s: Minimum age in seconds of a file or slot that is removed as unused.
    """
    settings = Settings()
    roots = select_roots(root, settings)
    create_findings_artifact(asyncio.run(_reconcile(settings, roots, grace_s)))
    for each in roots:
        create_weights_artifact(each)


async def _reconcile(settings: Settings, roots: Sequence[Path], grace_s: float) -> list[Finding]:
    async with get_client() as client:
        return await reconcile(settings, roots, client, grace_s=grace_s)


def create_findings_artifact(found: Sequence[Finding]) -> None:
    """Show the findings in the Prefect UI, if there are any."""
    if not found:
        return
    repaired = sum(finding.state == "repaired" for finding in found)
    create_table_artifact(
        key="reconciled",
        description=f"{repaired} repaired, {len(found) - repaired} left",
        table=[
            {
                "state": finding.state,
                "what": finding.what,
                "why": finding.why,
                "where": finding.where,
            }
            for finding in found
        ],
    )
