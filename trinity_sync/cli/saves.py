"""Saves that the Prefect server knows: what it says of them, asked without importing Prefect."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from trinity_sync.client.prefect_api import ANSWER_S, PrefectApi, SaveRun
from trinity_sync.errors import PrefectApiError
from trinity_sync.settings import Settings
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.storage.runs import Run, find_superseding_run

T = TypeVar("T")
QUICK_S = 2.0
"""Seconds that a command waits for a server that it could do without."""
FAILED = ("FAILED", "CRASHED", "CANCELLED")
"""Types of the final states of a flow run that has not committed its step."""


def query(settings: Settings, ask: Callable[[PrefectApi], Awaitable[T]], answer_s: float) -> T:
    """Ask the Prefect server.

    Raises:
        PrefectApiError: The server does not answer as it should.
    """

    async def run() -> T:
        api = PrefectApi(settings, answer_s=answer_s)
        try:
            return await ask(api)
        finally:
            await api.close()

    return asyncio.run(run())


def read_saves(
    settings: Settings, root: Path, *, step: int | None = None, answer_s: float = ANSWER_S
) -> list[SaveRun]:
    """Return the saves of a job, or of one of its steps, the newest first.

    Raises:
        PrefectApiError: The server does not answer as it should.
    """
    return query(settings, lambda api: api.read_saves(job_id(root), step=step), answer_s)


def try_read_saves(root: Path) -> list[SaveRun]:
    """Return the newest saves of a job; none if no server is known or answers in `QUICK_S`."""
    from trinity_sync.cli.app import read_settings

    try:
        return read_saves(read_settings(), root, answer_s=QUICK_S)
    except PrefectApiError:
        return []


def describe_status(save: SaveRun, runs: Sequence[Run]) -> str:
    """Return the status of a save, in a word; a later run may have superseded it."""
    if save.state.state == "COMPLETED":
        return "committed"
    if save.state.state in FAILED:
        return "superseded" if find_superseding_run(runs, save.run, save.step) else "failed"
    return "pending" if save.state.state in ("SCHEDULED", "PAUSED") else "writing"
