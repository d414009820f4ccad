"""The steps and saves of a job, as its files tell them: for the commands and the report."""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from trinity_sync.client.journal import Entry, Journal
from trinity_sync.client.prefect_api import FlowRun, State
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.client.save_status import FAILURES, Facts, decide
from trinity_sync.errors import FormatError, TrinitySyncError
from trinity_sync.layout import KINDS, Kind
from trinity_sync.orchestration.report.facts import StepRow
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


def read_progress(settings: Settings, root: Path, save: FlowRun) -> WriteProgress | None:
    """Return how far the writes of a save are; None if it is not being written, as far as seen."""
    if save.state.type != "RUNNING":
        return None
    spool = settings.spool / job_id(root)
    return measure_progress(root, save.run, save.step, save.kind, spool, save.state.since)


def read_journal(root: Path) -> Journal:
    """Return the journal of all runs of a job, empty if it cannot be read."""
    journal = Journal(root)
    with suppress(OSError):
        journal.read()
    return journal


def list_saves(settings: Settings, root: Path) -> list[FlowRun]:
    """Return the saves that the job's files and the images of this node tell, in no order."""
    logged = {(each.run, each.step, each.timing.kind): each for each in read_saves(root)}
    journal, runs = read_journal(root), list_known_runs(root)
    found: dict[Save, _Found] = {}

    def add(request: SaveRequest, since: float, told: Entry | None, marked: str | None) -> None:
        save, known = (request.run, request.step, request.kind), None
        if save in found and found[save].attempt == request.attempt:
            known = found[save].marked
        if save not in found or found[save].attempt <= request.attempt:
            found[save] = _Found(request.attempt, told, since, marked if known is None else known)

    spool = JobSpool(settings.spool / job_id(root))
    for image in spool.tickets()[0]:
        marked = "" if image.failed else None
        with suppress(OSError):  # it is not marked, or a retry has just removed that
            marked = failure_path(image.slot).read_text()
        request = SaveRequest(**vars(image.ticket.save))
        add(request, image.ticket.sealed_at, journal.find(request.key), marked)
    for path in list_requests(spool):
        with suppress(OSError, ValidationError, FormatError):  # it has just ended
            request = SaveRequest.model_validate_json(path.read_bytes())
            add(request, path.stat().st_mtime, journal.find(request.key), None)
    for entry in journal.list_failures():
        save = entry.run, entry.step, entry.kind
        if save not in found or found[save].attempt <= entry.attempt:
            found[save] = _Found(entry.attempt, entry, entry.at, None)
    rows = []
    for save in {**logged, **found}:
        committed = find_committed(root, *save) if save in found else None
        each = found.get(save, _Found())
        status, why = decide(
            Facts(
                told=each.told,
                is_committed=save in logged or committed is not None,
                is_exported=not (committed and committed.failed_exports),
                marked=each.marked,
                is_superseded=find_superseding_run(runs, *save[:2]) is not None,
            )
        )
        if status in FAILURES:
            name = "Superseded" if status == "superseded" else "Failed"
            since = each.told.at if each.told else each.since
            page = each.told.url if each.told else ""
            rows.append(_make_save(save, State("FAILED", name, why, since), page=page))
        elif save in logged:
            state = State("COMPLETED", "Completed", since=logged[save].committed_at)
            rows.append(_make_save(save, state, seconds=logged[save].timing.total_s))
        elif not committed:  # otherwise its entry was dropped from the log
            state = State("SCHEDULED", "Scheduled", why, each.since)
            if status == "begun" and each.told:
                state = State("RUNNING", "Running", since=each.told.at)
            rows.append(_make_save(save, state))
    return rows


Save = tuple[int, int, Kind]
"""Run, step and kind."""


@dataclass(frozen=True)
class _Found:
    """What tells of a save that is not in the log."""

    attempt: int = 0
    told: Entry | None = None
    since: float = 0.0
    marked: str | None = None


def find_committed(root: Path, run: int, step: int, kind: Kind) -> Manifest | None:
    """Return the manifest of a save, if the step that is committed now has its files."""
    manifest = read_step_state(root, step).manifest
    return manifest if manifest and manifest.run == run and manifest.has_kind(kind) else None


def _make_save(save: Save, state: State, *, seconds: float = 0.0, page: str = "") -> FlowRun:
    """Return a save as files tell it; without a ``page`` it has no flow run."""
    tags = dict(zip(("run", "step", "kind"), map(str, save), strict=True))
    flow_run = uuid.UUID(page.rpartition("/")[2]) if page else uuid.UUID(int=0)
    return FlowRun(flow_run, "", state, tags=tags, seconds=seconds, page=page)
