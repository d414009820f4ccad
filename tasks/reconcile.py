"""The task of a reconciliation, and its report."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client

from tasks.weights import show_weights
from trinity_sync.orchestration.job_registry import roots_of
from trinity_sync.orchestration.reconcile import GRACE_S, reconcile
from trinity_sync.settings import Settings
from trinity_sync.storage.gc import Finding


@task(name="mend", persist_result=False)
def mend_what_was_left(root: str | None, grace_s: float = GRACE_S) -> None:
    """Mend what was left half done on this node, and show what was done and what was not."""
    settings = Settings()
    roots = roots_of(root, settings)
    show(asyncio.run(_reconcile(settings, roots, grace_s)))
    for each in roots:
        show_weights(each)


async def _reconcile(settings: Settings, roots: Sequence[Path], grace_s: float) -> list[Finding]:
    async with get_client() as client:
        return await reconcile(settings, roots, client, grace_s=grace_s)


def show(found: Sequence[Finding]) -> None:
    """Put what was found into the run's page of the Prefect UI; nothing if all was well."""
    if not found:
        return
    mended = sum(finding.state == "mended" for finding in found)
    create_table_artifact(
        key="reconciled",
        description=f"{mended} mended, {len(found) - mended} left",
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
