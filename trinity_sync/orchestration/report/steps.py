"""The steps of a job and its failed saves, as its files tell them: for ``ls`` and the report."""

import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trinity_sync.client.journal import Entry, Journal
from trinity_sync.client.prefect_api import FlowRun, State
from trinity_sync.errors import TrinitySyncError
from trinity_sync.layout import KINDS, Kind
from trinity_sync.orchestration.report.facts import StepRow
from trinity_sync.settings import Settings
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.storage.discovery import list_known_runs, read_step_state
from trinity_sync.storage.job_settings import is_replicated, read_required_remote
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.pins import list_steps_in_use, list_tags
from trinity_sync.storage.runs import Run, find_superseding_run
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
        nbytes=manifest.nbytes,
        components=components,
        committed_at=manifest.committed_at,
        timings=manifest.timings,
        save_functions=manifest.callables,
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


def list_failed_saves(root: Path, known: Collection[tuple[int, int, str]]) -> list[FlowRun]:
    """Return the saves that have failed by the journal, and are not committed since.

    Those ``known`` otherwise, by run, step and kind, are left out.
    """
    runs, found = list_known_runs(root), []
    for entry in read_journal(root).list_failures():
        save = entry.run, entry.step, entry.kind
        if save not in known and not is_part_of_step(root, *save):
            superseded = find_superseding_run(runs, entry.run, entry.step)
            found.append(make_failed_save(entry, "Superseded" if superseded else "Failed"))
    return found


def is_part_of_step(root: Path, run: int, step: int, kind: Kind) -> bool:
    """Return whether the step that is committed now has the files of a save."""
    manifest = read_step_state(root, step).manifest
    return manifest is not None and manifest.run == run and kind in manifest.kinds


def make_failed_save(entry: Entry, name: str = "Failed") -> FlowRun:
    """Return a save that has failed by the journal, with the name of its state."""
    state = State("FAILED", name, entry.message, entry.at)
    return make_save(entry.run, entry.step, entry.kind, state, page=entry.url)


def make_save(
    run: int, step: int, kind: Kind, state: State, *, seconds: float = 0.0, page: str = ""
) -> FlowRun:
    """Return a save as files tell it; without a ``page`` it has no flow run."""
    tags = {"run": str(run), "step": str(step), "kind": kind}
    flow_run = uuid.UUID(page.rpartition("/")[2]) if page else uuid.UUID(int=0)
    return FlowRun(flow_run, "", state, tags=tags, seconds=seconds, page=page)
