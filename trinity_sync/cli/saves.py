"""The saves of a job: what the Prefect server says of them, without importing Prefect.

Without a stack, the files of the job and the images in shared memory tell it.
"""

import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from trinity_sync.client.prefect_api import FAILED, FlowRun, State, ask_server
from trinity_sync.client.prefect_connection import read_local_stack
from trinity_sync.errors import PrefectApiError
from trinity_sync.layout import Kind
from trinity_sync.settings import Settings
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.storage import save_timing
from trinity_sync.storage.discovery import read_step_state
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
    if has_server(settings):
        return query_saves(settings, root, step=step, answer_s=answer_s)
    found = list_saves_of_files(settings, root)
    return [save for save in found if step is None or save.step == step]


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


def list_saves_of_files(settings: Settings, root: Path) -> list[FlowRun]:
    """Return the saves that the job's log and the images of this node tell, the newest first.

    A failed save is known until its images are evicted.
    """
    saves: dict[tuple[int, int, Kind], FlowRun] = {}
    for each in save_timing.read_saves(root):
        save = each.run, each.step, each.timing.kind
        state = State("COMPLETED", "Completed", since=each.committed_at)
        saves[save] = _make_save(*save, state, each.timing.total_s)
    for image in JobSpool(settings.spool / job_id(root)).tickets()[0]:
        save = image.ticket.run, image.ticket.step, image.ticket.kind
        if save in saves and saves[save].state.type != "SCHEDULED":
            continue
        manifest = read_step_state(root, image.ticket.step).manifest
        if manifest and manifest.run == image.ticket.run and image.ticket.kind in manifest.kinds:
            continue  # its entry was dropped from the log
        reason = failure_path(image.slot).read_text() if image.failed else ""
        kind = "FAILED" if image.failed else "SCHEDULED"
        saves[save] = _make_save(
            *save, State(kind, kind.capitalize(), reason, image.ticket.sealed_at)
        )
    return sorted(saves.values(), key=lambda each: each.state.since, reverse=True)


def _make_save(run: int, step: int, kind: Kind, state: State, seconds: float = 0.0) -> FlowRun:
    """Return a save that is no flow run: its page is empty."""
    tags = {"run": str(run), "step": str(step), "kind": kind}
    return FlowRun(uuid.UUID(int=0), "", state, tags=tags, seconds=seconds)


def try_read_saves(root: Path) -> list[FlowRun]:
    """Return the newest saves of a job; none if the known server does not answer in `QUICK_S`."""
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
