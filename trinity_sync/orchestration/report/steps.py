"""The steps of a job, as its files tell them: for ``ls`` and the report."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trinity_sync.errors import TrinitySyncError
from trinity_sync.layout import KINDS
from trinity_sync.orchestration.report.facts import StepRow
from trinity_sync.storage.discovery import list_known_runs, read_step_state
from trinity_sync.storage.job_settings import is_replicated, read_required_remote
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.pins import list_steps_in_use, list_tags
from trinity_sync.storage.runs import Run


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
    )
