"""The saves of a job: what the Prefect server says of them, without importing Prefect.

What it does not know, and all of it without a stack, is told by the files of the job and by the
images in shared memory.
"""

import os
from pathlib import Path

from trinity_sync.client.prefect_api import FlowRun, ask_server
from trinity_sync.client.prefect_connection import read_local_stack
from trinity_sync.errors import PrefectApiError
from trinity_sync.orchestration.report.facts import SaveRow
from trinity_sync.orchestration.report.steps import list_saves
from trinity_sync.snapshot.job_identity import job_id

QUICK_S = 2.0
"""Seconds that a command waits for a server that it could do without."""


def read_saves(
    root: Path,
    *,
    step: int | None = None,
    answer_s: float | None = None,
    needs_server: bool = False,
) -> tuple[list[SaveRow], PrefectApiError | None]:
    """Return the saves of a job, or of one of its steps, the newest first.

    Also why its server does not answer as it should, if one is known or needed.
    """
    from trinity_sync.cli.app import read_settings

    settings, runs, unanswered = read_settings(), list[FlowRun](), None
    try:
        is_named = os.environ.get("PREFECT_API_URL") or read_local_stack(settings.home)[0]
        if needs_server or is_named:
            runs = ask_server(
                settings, lambda api: api.read_saves(job_id(root), step=step), answer_s=answer_s
            )
    except PrefectApiError as error:
        unanswered = error
    return list_saves(settings, root, step=step, runs=runs), unanswered
