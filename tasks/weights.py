"""Artifact: which version of the weights each reader serves."""

import time
from pathlib import Path

from prefect.artifacts import acreate_table_artifact

from trinity_sync.orchestration.quantities import make_artifact_key
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.weights.report import read_sync_report


async def create_weights_artifact(root: str | Path) -> None:
    """Show in the Prefect UI which version each reader serves, if the job has a Synchronizer."""
    found = await run_in_thread(read_sync_report, root, time.time())
    if found is None or found.lives is False or not found.readers:
        return
    newest = found.newest.step if found.newest else "none"
    await acreate_table_artifact(
        key=make_artifact_key("weights", root),
        description=f"Version of `{root}` that each reader serves; the newest is {newest}",
        table=[
            {
                "reader": reader.name,
                "version": reader.step,
                "steps behind": reader.behind,
                "stale for": f"{reader.stale_s:.0f} s",
            }
            for reader in found.readers
        ],
    )
