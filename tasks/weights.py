"""The table of the version of the weights that each reader serves."""

import re
import time
from pathlib import Path

from prefect.artifacts import create_table_artifact

from trinity_sync.layout import job_id
from trinity_sync.weights.report import read_sync_report


def show_weights(root: str | Path) -> None:
    """Publish the readers' versions as a Prefect artifact, unless the Synchronizer was stopped."""
    found = read_sync_report(root, time.time())
    if found is None or found.lives is False or not found.readers:
        return
    job = re.sub(r"[^a-z0-9]+", "-", job_id(root).lower())
    newest = found.newest.step if found.newest else "none"
    create_table_artifact(
        key=f"weights-{job}",
        description=f"Readers of `{root}` and the versions that they serve; the newest is {newest}",
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
