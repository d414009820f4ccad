"""All that is known of a job, for a page to show: its files, and what Prefect remembers of it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_sync.errors import FormatError, StackError
from trinity_sync.layout import KINDS, Kind, job_id, steps_on_disk
from trinity_sync.orchestration.prefect_queries import (
    RunFacts,
    find_api_url,
    open_client,
    read_job_runs,
    read_retention,
)
from trinity_sync.settings import Settings
from trinity_sync.storage.discovery import known_runs, step_state
from trinity_sync.storage.latest_pointer import read_iteration
from trinity_sync.storage.leases import Lease, list_leases
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.pins import Pin, list_pins
from trinity_sync.storage.quarantine import quarantine_folder
from trinity_sync.storage.runs import Run
from trinity_sync.weights.state_files import read_state


@dataclass(frozen=True)
class StepFacts:
    """One step on disk."""

    step: int
    state: str
    manifest: Manifest | None
    pointers: tuple[str, ...]

    @property
    def by_component(self) -> dict[str, int]:
        """Bytes of each component; of what functions wrote under ``other``."""
        found: dict[str, int] = {}
        for record in self.manifest.files if self.manifest else ():
            name = record.component or "other"
            found[name] = found.get(name, 0) + record.nbytes
        return found


@dataclass(frozen=True)
class JobFacts:
    """What `gather` found."""

    root: str
    job: str
    made_at: float
    steps: list[StepFacts]
    quarantined: list[str]
    """Steps in quarantine, as ``time/global_step_N``."""
    leases: list[Lease]
    pins: list[Pin]
    readers: dict[str, dict[str, Any]]
    """Who serves which version of the weights, by name."""
    runs: list[RunFacts] = field(default_factory=list)
    retention: list[dict[str, Any]] = field(default_factory=list)
    no_server: str = ""
    """Why nothing of Prefect is known."""


def gather(settings: Settings, root: Path, *, clock: Callable[[], float] = time.time) -> JobFacts:
    """Read the job's files, and ask the Prefect server if one answers."""
    root = root.resolve()
    runs, retention, problem = _asked(settings, root)
    pointers = {kind: read_iteration(root, kind) for kind in KINDS}
    known = known_runs(root)
    quarantined = sorted(quarantine_folder(root).glob("*/global_step_*"))
    return JobFacts(
        root=str(root),
        job=job_id(root),
        made_at=clock(),
        steps=[_step(root, step, pointers, known) for step in steps_on_disk(root)],
        quarantined=["/".join(path.parts[-2:]) for path in quarantined],
        leases=list_leases(root),
        pins=list_pins(root),
        readers=_readers(root),
        runs=runs,
        retention=retention,
        no_server=problem,
    )


def _asked(settings: Settings, root: Path) -> tuple[list[RunFacts], list[dict[str, Any]], str]:
    url = find_api_url(settings)
    if not url:
        return [], [], "no Prefect server is known"
    try:
        with open_client(url) as client:
            return read_job_runs(client, root), read_retention(client, root), ""
    except StackError as error:
        return [], [], str(error)


def _step(
    root: Path, step: int, iterations: Mapping[Kind, int | None], known: Sequence[Run]
) -> StepFacts:
    pointers = tuple(kind for kind, target in iterations.items() if target == step)
    found = step_state(root, step, known)
    state = found.reason if found.state == "another format" else found.state
    return StepFacts(step, state, found.manifest, pointers)


def _readers(root: Path) -> dict[str, dict[str, Any]]:
    """Of the Synchronizer's state file; empty where there is none, or another format."""
    try:
        readers = (read_state(root) or {})["registry"]["readers"]
        return {str(name): dict(serving) for name, serving in readers.items()}
    except (OSError, FormatError, ValueError, KeyError, TypeError, AttributeError):
        return {}
