"""The steps and saves of a job, as its files tell them: for the commands and the report."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from trinity_sync.client.prefect_api import AT_LIMIT, FAILED, FlowRun
from trinity_sync.client.prefect_connection import knows_server
from trinity_sync.errors import FormatError
from trinity_sync.fs.atomic import read_file
from trinity_sync.layout import KINDS, Kind
from trinity_sync.orchestration.report.facts import SaveRow, StepRow
from trinity_sync.saves.journal import STATES_OF_RUNS, Entry, Journal
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import Facts, SaveStatus, decide
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import job_id
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.storage.discovery import list_known_runs, read_latest_pointer, read_step_state
from trinity_sync.storage.job_settings import is_replicated, read_job_settings
from trinity_sync.storage.manifest import Manifest, read_run_head, read_run_manifest
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.runs import Run, find_superseding_run
from trinity_sync.storage.save_functions import list_requests
from trinity_sync.storage.save_timing import LoggedSave, read_saves
from trinity_sync.storage.steps_in_use import list_steps_in_use, list_tags


def read_steps(root: Path, steps: Iterable[int], known: Sequence[Run]) -> Iterator[StepRow]:
    """Yield the given steps. ``known`` are the runs of the job."""
    pointers = {kind: read_latest_pointer(root, kind) for kind in KINDS}
    in_use, tags = list_steps_in_use(root), list_tags(root).values()
    has_remote = bool(read_job_settings(root).required_remote)
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
            run = next((run for run in known if run.number == row.run), None)
            row = replace(
                row,
                left_out=run.left_out if run else (),
                parents=row.parents or (run.parents if run else ()),
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
        removed=manifest.removed,
        parents=manifest.parents,
        checkpoint_run=manifest.checkpoint_run,
        nbytes=manifest.nbytes,
        components=components,
        committed_at=manifest.committed_at,
        timings=manifest.timings,
        save_functions=manifest.callables,
        failed_exports=manifest.failed_exports,
        health=manifest.health,
    )


Save = tuple[int, int, Kind]
"""Run, step and kind."""
_SHOWN: dict[SaveStatus, str] = {
    "submitted": "pending",
    "left": "pending",
    "begun": "writing",
    "superseded": "superseded",
    "not exported": "failed",
    "not replicated": "failed",
    "failed": "failed",
}
"""What lists call a status; all others are committed."""


def _make_row(
    save: Save, facts: Facts, since: float, log: LoggedSave | None, run: FlowRun | None
) -> SaveRow | None:
    (status, why), told = decide(facts), facts.told
    shown = _SHOWN.get(status, "committed")
    done = log if shown == "committed" else None
    if shown == "committed" and not (log or run):
        return None  # its entry was dropped from the log
    url = run.page if run else told.url if told else ""
    reason = why or (run and run.state.message) or None
    if shown == "failed" and facts.is_committed:
        reason = ": ".join(filter(None, (f"the step is committed, and {status}", reason)))
    row = SaveRow(
        save[1], save[0], save[2], shown,
        since=done.committed_at if done else (told and told.at) or since or None,
        seconds=(run and run.seconds) or (done.timing.total_s if done else None),
        attempts=run.attempts if run else None,
        flow_run=str(run.id) if run else url.rpartition("/")[2] or None,
        url=url or None,
        reason=reason,
    )  # fmt: skip
    cause = "Superseded" if shown == "superseded" else _name_cause(run)
    return replace(row, cause=cause) if row.has_failed else row


def list_saves(
    settings: Settings, root: Path, *, step: int | None = None, runs: Sequence[FlowRun] = ()
) -> list[SaveRow]:
    """Return the saves that files, images of this node and flow runs tell, the newest first.

    ``runs`` are those of the last attempts, as far as a server was asked.
    """
    logged = {(each.run, each.step, each.timing.kind): each for each in read_saves(root)}
    journal, known, has_stack = Journal(root), list_known_runs(root), knows_server(settings)
    has_remote = bool(read_job_settings(root).required_remote)
    with suppress(OSError):  # it tells nothing
        journal.read()
    found: dict[Save, tuple[int, float, Facts]] = {}  # of the last attempt that is known

    def add(request: SaveRequest, since: float, marked: str | None = None) -> None:
        save = request.run, request.step, request.kind
        attempt, _, facts = found.get(save, (0, 0.0, Facts()))
        if attempt == request.attempt and facts.marked is not None:
            marked = facts.marked
        if attempt <= request.attempt:
            facts = Facts(told=journal.find(request.key), marked=marked)
            found[save] = request.attempt, since, facts

    def look_up(save: Save, run: FlowRun | None = None) -> SaveRow | None:
        log, (_, since, facts) = logged.get(save), found.get(save, (0, 0.0, Facts()))
        if run:
            since, facts = run.state.since, Facts(told=_tell(run, journal.find(run.key)))
        manifest = read_run_head(root, *save[:2]) if run or save in found else None
        here = manifest if manifest and manifest.has_kind(save[2]) else None
        must_copy = has_remote and save[2] == "checkpoint"
        facts = replace(
            facts,
            is_committed=bool(log or here),
            counts=not (here and must_copy) or is_replicated(root, here),
            is_exported=not (here and _lacks_models(root, here, facts.told)),
            is_gone=facts.marked is None,  # what has completed was committed
            is_superseded=find_superseding_run(known, *save[:2]) is not None,
        )
        row = _make_row(save, facts, since, log, run)
        if row and row.status == "failed" and (facts.marked is not None or (row.url and has_stack)):
            command = f"trinity-sync retry {shlex.quote(str(root))} {row.step}"
            row = replace(row, retry=command)
        return row

    spool = JobSpool(settings.spool / job_id(root))
    for image in spool.tickets()[0]:
        marked = "" if image.failed else None
        with suppress(OSError):  # it is not marked, or a retry has just removed that
            marked = read_file(failure_path(image.slot)).decode()
        add(SaveRequest(**vars(image.ticket.save)), image.ticket.sealed_at, marked)
    for path in list_requests(spool):
        with suppress(OSError, ValidationError, FormatError):  # it has just ended
            add(SaveRequest.model_validate_json(read_file(path)), path.stat().st_mtime)
    for entry in journal.list_failures():
        save = entry.run, entry.step, entry.kind
        if found.get(save, (0,))[0] < entry.attempt:
            found[save] = entry.attempt, entry.at, Facts(told=entry)
    asked = {each.save for each in runs}
    others = [save for save in {**logged, **found} if save not in asked]
    rows = [look_up(each.save, each) for each in runs if step in (None, each.step)]
    rows += [look_up(save) for save in others if step in (None, save[1])]
    return sorted(filter(None, rows), key=lambda row: row.since or 0.0, reverse=True)


def _lacks_models(root: Path, manifest: Manifest, told: Entry | None) -> bool:
    """Return whether the export of a model has failed, or could not even be tried."""
    if manifest.failed_exports or not (manifest.exports and told and told.has_failed):
        return bool(manifest.failed_exports)
    with suppress(OSError):  # the next look may tell
        with_models = read_run_manifest(root, manifest.run, manifest.step, ranks={0})
        return bool(with_models and with_models.list_missing_exports())
    return False


def _tell(run: FlowRun, known: Entry | None) -> Entry | None:
    """Return what a flow run tells of its save, or the journal if a saver has taken it over."""
    state = "left" if run.state.message == AT_LIMIT else STATES_OF_RUNS.get(run.state.type)
    is_retried = state is None and known is not None and known.at < run.state.since
    if known and known.takes_over and known.start >= run.attempts and not is_retried:
        return known
    return state and Entry(
        key=run.key, run=run.run, step=run.step, kind=run.kind, attempt=1,
        start=run.attempts, takes_over=False, state=state, message=run.state.message,
        url=run.page, at=run.state.since,
    )  # fmt: skip


def _name_cause(run: FlowRun | None) -> str:
    if run is None or run.state.type not in FAILED:
        return "Failed"
    return "Crashed" if run.state.type == "CRASHED" else run.state.name
