"""The steps and saves of a job, as its files tell them: for the commands and the report."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from trinity_sync.client.prefect_api import FAILED, FlowRun
from trinity_sync.errors import FormatError, TrinitySyncError
from trinity_sync.layout import KINDS, Kind
from trinity_sync.orchestration.report.facts import SaveRow, StepRow
from trinity_sync.saves.journal import Journal
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import FAILURES, Facts, decide
from trinity_sync.settings import Settings
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.storage.discovery import list_known_runs, read_step_state
from trinity_sync.storage.job_settings import is_replicated, read_required_remote
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.pins import list_steps_in_use, list_tags
from trinity_sync.storage.runs import Run, find_superseding_run
from trinity_sync.storage.save_functions import list_requests
from trinity_sync.storage.save_timing import read_saves
from trinity_sync.storage.write_progress import WriteProgress, measure_progress


def read_steps(root: Path, steps: Iterable[int], known: Sequence[Run]) -> Iterator[StepRow]:
    """Yield the given steps. ``known`` are the runs of the job."""
    pointers = {kind: read_latest_pointer(root, kind) for kind in KINDS}
    in_use, tags = list_steps_in_use(root), list_tags(root).values()
    try:
        has_remote = bool(read_required_remote(root))
    except TrinitySyncError:  # reported by the command
        has_remote = False
    for step in steps:
        found = read_step_state(root, step, known)
        row = StepRow(
            step,
            found.state,
            found.reason,
            latest_of=tuple(kind for kind, target in pointers.items() if target == step),
            tags=tuple(tag.name for tag in tags if tag.step == step),
            in_use=tuple(in_use[step]),
        )
        if found.manifest:
            row = add_manifest(row, found.manifest)
            row = replace(
                row,
                in_remote=is_replicated(root, found.manifest) if has_remote else None,
                metrics=read_metrics(root, found.manifest.run, step),
            )
        yield row


def read_step(root: Path, step: int) -> StepRow:
    """Return one step."""
    return next(read_steps(root, [step], list_known_runs(root)))


def add_manifest(row: StepRow, manifest: Manifest) -> StepRow:
    """Return a row with what the manifest of its step says."""
    components: dict[str, int] = {}
    for file in manifest.files:
        name = file.component or "other"
        components[name] = components.get(name, 0) + file.nbytes
    return replace(
        row,
        run=manifest.run,
        kinds=manifest.kinds,
        checkpoint_run=manifest.checkpoint_run,
        nbytes=manifest.nbytes,
        components=components,
        committed_at=manifest.committed_at,
        timings=manifest.timings,
        save_functions=manifest.callables,
        failed_exports=manifest.failed_exports,
        health=manifest.health,
    )


def read_progress(settings: Settings, root: Path, save: SaveRow) -> WriteProgress | None:
    """Return how far the writes of a save are; None if it is not being written, as far as seen."""
    if save.status != "writing":
        return None
    spool = settings.spool / job_id(root)
    return measure_progress(root, save.run, save.step, save.kind, spool, save.since or 0.0)


def read_journal(root: Path) -> Journal:
    """Return the journal of all runs of a job, empty if it cannot be read."""
    journal = Journal(root)
    with suppress(OSError):
        journal.read()
    return journal


def list_saves(settings: Settings, root: Path, *, step: int | None = None) -> list[SaveRow]:
    """Return the saves that the job's files and the images of this node tell, the newest first."""
    logged = {(each.run, each.step, each.timing.kind): each for each in read_saves(root)}
    journal, runs = read_journal(root), list_known_runs(root)
    found: dict[Save, tuple[int, float, Facts]] = {}  # of the last attempt that is known

    def add(request: SaveRequest, since: float, marked: str | None = None) -> None:
        save = request.run, request.step, request.kind
        attempt, _, facts = found.get(save, (0, 0.0, Facts()))
        if attempt == request.attempt and facts.marked is not None:
            marked = facts.marked
        if attempt <= request.attempt:
            facts = Facts(told=journal.find(request.key), marked=marked)
            found[save] = request.attempt, since, facts

    spool = JobSpool(settings.spool / job_id(root))
    for image in spool.tickets()[0]:
        marked = "" if image.failed else None
        with suppress(OSError):  # it is not marked, or a retry has just removed that
            marked = failure_path(image.slot).read_text()
        add(SaveRequest(**vars(image.ticket.save)), image.ticket.sealed_at, marked)
    for path in list_requests(spool):
        with suppress(OSError, ValidationError, FormatError):  # it has just ended
            add(SaveRequest.model_validate_json(path.read_bytes()), path.stat().st_mtime)
    for entry in journal.list_failures():
        save = entry.run, entry.step, entry.kind
        if found.get(save, (0,))[0] <= entry.attempt:
            found[save] = entry.attempt, entry.at, Facts(told=entry)
    rows = []
    for save in {**logged, **found}:
        if step not in (None, save[1]):
            continue
        _, since, facts = found.get(save, (0, 0.0, Facts()))
        committed = find_committed(root, *save) if save in found else None
        facts = replace(
            facts,
            is_committed=save in logged or committed is not None,
            is_exported=not (committed and committed.failed_exports),
            is_superseded=save in found and find_superseding_run(runs, *save[:2]) is not None,
        )
        status, why = decide(facts)
        row = SaveRow(save[1], save[0], save[2], "committed", since=since)
        if status in FAILURES:
            cause = "Superseded" if status == "superseded" else "Failed"
            row = replace(row, status=cause.lower(), cause=cause, reason=why)
            if told := facts.told:
                page = told.url or None
                run = page and page.rpartition("/")[2]
                row = replace(row, since=told.at, url=page, flow_run=run)
        elif save in logged:
            took = logged[save].timing.total_s
            row = replace(row, since=logged[save].committed_at, seconds=took)
        elif committed:
            continue  # its entry was dropped from the log
        elif status == "begun" and facts.told:
            row = replace(row, status="writing", since=facts.told.at)
        else:
            row = replace(row, status="pending", reason=why)
        rows.append(row)
    return sort_saves(rows)


def sort_saves(rows: Iterable[SaveRow]) -> list[SaveRow]:
    """Return saves with the newest first."""
    return sorted(rows, key=lambda row: row.since or 0.0, reverse=True)


Save = tuple[int, int, Kind]
"""Run, step and kind."""


def find_committed(root: Path, run: int, step: int, kind: Kind) -> Manifest | None:
    """Return the manifest of a save, if the step that is committed now has its files."""
    manifest = read_step_state(root, step).manifest
    return manifest if manifest and manifest.run == run and manifest.has_kind(kind) else None


def make_row(run: FlowRun, known: Sequence[Run]) -> SaveRow:
    """Return a flow run of a save as a row; one of the ``known`` runs may have superseded it."""
    state, status = run.state, "committed"
    if has_failed := state.type in FAILED:
        superseding = find_superseding_run(known, run.run, run.step)
        status = "superseded" if superseding else "failed"
    elif state.type != "COMPLETED":
        status = "pending" if state.type in ("SCHEDULED", "PAUSED") else "writing"
    return SaveRow(
        run.step,
        run.run,
        cast(Kind, run.kind),
        status,
        since=state.since or None,
        seconds=run.seconds or None,
        attempts=run.attempts or None,
        flow_run=str(run.id),
        url=run.page,
        reason=state.message,
        cause=("Crashed" if state.type == "CRASHED" else state.name) if has_failed else None,
    )
