"""Collect what the files of a job and the Prefect server know about it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_sync.errors import FormatError, StackError
from trinity_sync.layout import KINDS, Kind, job_id, steps_on_disk
from trinity_sync.orchestration.prefect_queries import (
    RETENTION,
    FlowRunSummary,
    find_api_url,
    open_client,
    read_job_runs,
    read_table,
)
from trinity_sync.settings import Settings
from trinity_sync.storage.discovery import list_known_runs, read_step_state
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.leases import Lease, list_leases
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.pins import Pin, list_pins
from trinity_sync.storage.quarantine import quarantine_folder
from trinity_sync.storage.runs import Run
from trinity_sync.weights.state_files import read_state


@dataclass(frozen=True)
class StepSummary:
    """A step on disk."""

    step: int
    state: str
    manifest: Manifest | None
    pointers: tuple[str, ...]
    """Kinds whose latest pointer names the step."""

    @property
    def is_loadable(self) -> bool:
        """Whether the step is committed and not corrupted."""
        return self.state in ("valid", "superseded")

    @property
    def bytes_by_component(self) -> dict[str, int]:
        """Bytes of each component, and under ``other`` of the files of save functions."""
        found: dict[str, int] = {}
        for record in self.manifest.files if self.manifest else ():
            name = record.component or "other"
            found[name] = found.get(name, 0) + record.nbytes
        return found


@dataclass(frozen=True)
class JobReport:
    """The steps, flow runs and readers of a job."""

    root: str
    job: str
    created_at: float
    """Seconds since the epoch."""
    steps: list[StepSummary]
    quarantined: list[str]
    """Steps in quarantine, as ``time/global_step_N``."""
    leases: list[Lease]
    pins: list[Pin]
    readers: dict[str, dict[str, Any]]
    """The version of the weights that each reader serves, by the reader's name."""
    runs: list[FlowRunSummary] = field(default_factory=list)
    retention: list[dict[str, Any]] = field(default_factory=list)
    server_error: str = ""
    """Why the Prefect server could not be asked; empty if it answered."""

    @property
    def failed_runs(self) -> list[FlowRunSummary]:
        """The flow runs that failed, newest first."""
        return [run for run in self.runs if run.failed]

    def list_saves(self, step: StepSummary) -> list[FlowRunSummary]:
        """Return the flow runs that committed a step."""
        if not step.manifest:
            return []
        of_step = {"step": str(step.step), "run": str(step.manifest.run)}
        return [
            run
            for run in self.runs
            if run.is_save and not run.failed and of_step.items() <= run.tags.items()
        ]


def collect_report(
    settings: Settings, root: Path, *, clock: Callable[[], float] = time.time
) -> JobReport:
    """Read the files of a job, and query the Prefect server if it answers.

    Args:
        settings: Where the Prefect server is.
        root: Root of the job.
        clock: The current time in seconds since the epoch.
    """
    root = root.resolve()
    runs, retention, server_error = _query_server(settings, root)
    iterations = {kind: read_latest_pointer(root, kind) for kind in KINDS}
    known = list_known_runs(root)
    quarantined = sorted(quarantine_folder(root).glob("*/global_step_*"))
    return JobReport(
        root=str(root),
        job=job_id(root),
        created_at=clock(),
        steps=[_summarize_step(root, step, iterations, known) for step in steps_on_disk(root)],
        quarantined=["/".join(path.parts[-2:]) for path in quarantined],
        leases=list_leases(root),
        pins=list_pins(root),
        readers=_read_readers(root),
        runs=runs,
        retention=retention,
        server_error=server_error,
    )


def _query_server(
    settings: Settings, root: Path
) -> tuple[list[FlowRunSummary], list[dict[str, Any]], str]:
    url = find_api_url(settings)
    if not url:
        return [], [], "no Prefect server is known"
    try:
        with open_client(url) as client:
            table = read_table(client, RETENTION, root)
            return read_job_runs(client, root), table.rows if table else [], ""
    except StackError as error:
        return [], [], str(error)


def _summarize_step(
    root: Path, step: int, iterations: Mapping[Kind, int | None], known: Sequence[Run]
) -> StepSummary:
    pointers = tuple(kind for kind, target in iterations.items() if target == step)
    found = read_step_state(root, step, known)
    state = found.reason if found.state == "another format" else found.state
    return StepSummary(step, state, found.manifest, pointers)


def _read_readers(root: Path) -> dict[str, dict[str, Any]]:
    """Read the readers from the Synchronizer's state file; empty if there is no readable one."""
    try:
        readers = (read_state(root) or {})["registry"]["readers"]
        return {str(name): dict(serving) for name, serving in readers.items()}
    except (OSError, FormatError, ValueError, KeyError, TypeError, AttributeError):
        return {}
