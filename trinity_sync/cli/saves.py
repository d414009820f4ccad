"""The saves of a job: what the Prefect server says of them, without importing Prefect.

What it does not know, and all of it without a stack, is told by the files of the job and by the
images in shared memory.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from trinity_sync.client.journal import Entry
from trinity_sync.client.prefect_api import FAILED, FlowRun, State, ask_server
from trinity_sync.client.prefect_connection import read_local_stack
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import FormatError, PrefectApiError
from trinity_sync.layout import Kind
from trinity_sync.orchestration.report.steps import (
    is_part_of_step,
    list_failed_saves,
    make_failed_save,
    make_save,
    read_journal,
)
from trinity_sync.settings import Settings
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.storage import save_timing
from trinity_sync.storage.runs import Run, find_superseding_run
from trinity_sync.storage.save_functions import list_requests

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
    saves: dict[tuple[int, int, Kind], FlowRun] = {}
    for each in save_timing.read_saves(root):
        save = each.run, each.step, each.timing.kind
        state = State("COMPLETED", "Completed", since=each.committed_at)
        saves[save] = make_save(*save, state, seconds=each.timing.total_s)
    journal = read_journal(root)
    spool = JobSpool(settings.spool / job_id(root))
    for image in spool.tickets()[0]:
        ticket = image.ticket
        save = ticket.run, ticket.step, ticket.kind
        if save in saves and saves[save].state.type in ("COMPLETED", "FAILED"):
            continue
        if is_part_of_step(root, *save):
            continue  # its entry was dropped from the log
        entry = journal.find(SaveRequest(**vars(ticket.save)).key)
        if entry and entry.state == "failed":
            saves[save] = make_failed_save(entry)
        elif image.failed:
            reason = ""
            with suppress(OSError):  # a retry has just removed it
                reason = failure_path(image.slot).read_text()
            saves[save] = make_save(*save, State("FAILED", "Failed", reason, ticket.sealed_at))
        else:
            saves[save] = _make_waiting_save(save, entry, ticket.sealed_at)
    for path in list_requests(spool):
        with suppress(OSError, ValidationError, FormatError):  # it has just ended
            request = SaveRequest.model_validate_json(path.read_bytes())
            save, entry = (request.run, request.step, request.kind), journal.find(request.key)
            if (entry and entry.has_ended) or is_part_of_step(root, *save):
                continue
            saves.setdefault(save, _make_waiting_save(save, entry, path.stat().st_mtime))
    return _sort([*saves.values(), *list_failed_saves(root, saves)], step)


def _make_waiting_save(save: tuple[int, int, Kind], entry: Entry | None, since: float) -> FlowRun:
    begun = State("RUNNING", "Running", since=entry.at) if entry else None
    return make_save(*save, begun or State("SCHEDULED", "Scheduled", since=since))


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
