"""Saves that the Prefect server knows: what it says of them, asked without importing Prefect."""

from collections.abc import Sequence
from pathlib import Path

from trinity_sync.client.prefect_api import (
    FAILED,
    FlowRun,
    ask_server,
)
from trinity_sync.errors import PrefectApiError
from trinity_sync.settings import Settings
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.storage.runs import Run, find_superseding_run

QUICK_S = 2.0
"""Seconds that a command waits for a server that it could do without."""


def read_saves(
    settings: Settings, root: Path, *, step: int | None = None, answer_s: float | None = None
) -> list[FlowRun]:
    """Return the saves of a job, or of one of its steps, the newest first.

    Raises:
        PrefectApiError: The server does not answer as it should.
    """
    return ask_server(
        settings, lambda api: api.read_saves(job_id(root), step=step), answer_s=answer_s
    )


def try_read_saves(root: Path) -> list[FlowRun]:
    """Return the newest saves of a job; none if no server is known or answers in `QUICK_S`."""
    from trinity_sync.cli.app import read_settings

    try:
        return read_saves(read_settings(), root, answer_s=QUICK_S)
    except PrefectApiError:
        return []


def describe_status(save: FlowRun, runs: Sequence[Run]) -> str:
    """Return the status of a save, in a word; a later run may have superseded it."""
    if save.state.type == "COMPLETED":
        return "committed"
    if save.state.type in FAILED:
        return "superseded" if find_superseding_run(runs, save.run, save.step) else "failed"
    return "pending" if save.state.type in ("SCHEDULED", "PAUSED") else "writing"
