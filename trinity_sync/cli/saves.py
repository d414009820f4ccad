"""The saves of a job: what the Prefect server says of them, without importing Prefect.

What it does not know, and all of it without a stack, is told by the files of the job and by the
images in shared memory.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from trinity_sync.client.prefect_api import FAILED, FlowRun, ask_server
from trinity_sync.client.prefect_connection import read_local_stack
from trinity_sync.errors import PrefectApiError
from trinity_sync.orchestration.report.steps import list_saves
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
        PrefectApiError: A Prefect server is known, and does not answer as it should.
    """
    if not has_server(settings):
        return list_saves_of_files(settings, root, step=step)
    found = query_saves(settings, root, step=step, answer_s=answer_s)
    known = {(save.run, save.step, save.kind) for save in found}
    others = [
        save
        for save in list_saves_of_files(settings, root, step=step)  # of the saver
        if (save.run, save.step, save.kind) not in known
    ]
    return _sort(found + others, step)


def query_saves(
    settings: Settings, root: Path, *, step: int | None = None, answer_s: float | None = None
) -> list[FlowRun]:
    """Return the flow runs of the saves of a job, or of one of its steps, the newest first.

    Raises:
        PrefectApiError: The server does not answer as it should, or none is known.
    """
    return ask_server(
        settings, lambda api: api.read_saves(job_id(root), step=step), answer_s=answer_s
    )


def has_server(settings: Settings) -> bool:
    """Return whether the environment, or the local stack's state file, names a Prefect server."""
    return bool(os.environ.get("PREFECT_API_URL") or read_local_stack(settings.home)[0])


def list_saves_of_files(
    settings: Settings, root: Path, *, step: int | None = None
) -> list[FlowRun]:
    """Return the saves that the job's logs and the images of this node tell, the newest first."""
    return _sort(list_saves(settings, root), step)


def _sort(saves: list[FlowRun], step: int | None) -> list[FlowRun]:
    """Return the saves of a step, or all, the newest first."""
    of_step = [save for save in saves if step is None or save.step == step]
    return sorted(of_step, key=lambda each: each.state.since, reverse=True)


def try_read_saves(root: Path) -> list[FlowRun]:
    """Return the newest saves of a job; what files tell if no server answers in `QUICK_S`."""
    from trinity_sync.cli.app import read_settings

    settings = read_settings()
    try:
        return read_saves(settings, root, answer_s=QUICK_S)
    except PrefectApiError:
        return list_saves_of_files(settings, root)


def describe_status(save: FlowRun, runs: Sequence[Run]) -> str:
    """Return the status of a save, in a word; a later run may have superseded it."""
    if save.state.type == "COMPLETED":
        return "committed"
    if save.state.type in FAILED:
        return "superseded" if find_superseding_run(runs, save.run, save.step) else "failed"
    return "pending" if save.state.type in ("SCHEDULED", "PAUSED") else "writing"
