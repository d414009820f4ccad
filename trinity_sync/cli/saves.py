"""The saves of a job: what the Prefect server says of them, without importing Prefect.

What it does not know, and all of it without a stack, is told by the files of the job and by the
images in shared memory.
"""

import os
from pathlib import Path

from trinity_sync.client.prefect_api import ask_server
from trinity_sync.client.prefect_connection import read_local_stack
from trinity_sync.errors import PrefectApiError
from trinity_sync.orchestration.report.facts import SaveRow
from trinity_sync.orchestration.report.steps import list_saves, make_row, sort_saves
from trinity_sync.settings import Settings
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.storage.discovery import list_known_runs

QUICK_S = 2.0
"""Seconds that a command waits for a server that it could do without."""


def read_saves(
    settings: Settings, root: Path, *, step: int | None = None, answer_s: float | None = None
) -> list[SaveRow]:
    """Return the saves of a job, or of one of its steps, the newest first.

    Raises:
        PrefectApiError: A Prefect server is known, and does not answer as it should.
    """
    if not has_server(settings):
        return list_saves(settings, root, step=step)
    found = query_saves(settings, root, step=step, answer_s=answer_s)
    known = {(save.run, save.step, save.kind) for save in found}
    others = [
        save
        for save in list_saves(settings, root, step=step)  # of the saver
        if (save.run, save.step, save.kind) not in known
    ]
    return sort_saves([*found, *others])


def query_saves(
    settings: Settings, root: Path, *, step: int | None = None, answer_s: float | None = None
) -> list[SaveRow]:
    """Return the flow runs of the saves of a job, or of one of its steps, the newest first.

    Raises:
        PrefectApiError: The server does not answer as it should, or none is known.
    """
    found = ask_server(
        settings, lambda api: api.read_saves(job_id(root), step=step), answer_s=answer_s
    )
    known = list_known_runs(root) if found else ()
    return [make_row(each, known) for each in found]


def has_server(settings: Settings) -> bool:
    """Return whether the environment, or the local stack's state file, names a Prefect server."""
    return bool(os.environ.get("PREFECT_API_URL") or read_local_stack(settings.home)[0])


def try_read_saves(
    root: Path, *, step: int | None = None, answer_s: float = QUICK_S
) -> list[SaveRow]:
    """Return the newest saves of a job; what files tell if no server answers in time."""
    from trinity_sync.cli.app import read_settings

    settings = read_settings()
    try:
        return read_saves(settings, root, step=step, answer_s=answer_s)
    except PrefectApiError:
        return list_saves(settings, root, step=step)
