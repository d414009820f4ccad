"""The values of a report. Times are seconds since the epoch, durations seconds, sizes bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from trinity_sync.layout import Kind
from trinity_sync.storage.save_timing import LoggedSave, SaveTiming

HealthStatus = Literal["ok", "late", "failed", "empty"]


@dataclass(frozen=True)
class Health:
    """Whether the job is saved now."""

    status: HealthStatus
    sentence: str
    interval_s: float | None
    """Median time between two commits of late; None for fewer than three."""
    problems: tuple[str, ...] = ()
    """What needs attention although saves are committed."""


@dataclass(frozen=True)
class StepRow:
    """A step on disk."""

    step: int
    status: str
    """``valid``, ``superseded``, ``corrupted``, ``not committed`` or ``another format``."""
    reason: str
    """Why it is not valid; empty for a valid step."""
    run: int | None = None
    kinds: tuple[Kind, ...] = ()
    nbytes: int = 0
    components: Mapping[str, int] = field(default_factory=dict)
    """Bytes by component; ``other`` for the files of save functions."""
    committed_at: float | None = None
    timings: tuple[SaveTiming, ...] = ()
    callables: tuple[str, ...] = ()
    """Save functions, with rank and seconds."""
    pointers: tuple[Kind, ...] = ()
    """Kinds whose latest pointer names the step."""
    tags: tuple[str, ...] = ()
    replicated: bool | None = None
    """Whether the required remote has it; None if none is required."""
    verified_at: float | None = None
    """When its files were last read and compared, as far as the Prefect server knows."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    urls: tuple[str, ...] = ()
    """Pages of its flow runs."""

    @property
    def is_loadable(self) -> bool:
        """Whether the step is committed and not corrupted."""
        return self.status in ("valid", "superseded")


@dataclass(frozen=True)
class RunRow:
    """A start of the training."""

    number: int
    resumed_from: int
    """Step that it started from; 0 for a fresh start."""
    began_at: float | None
    nodes: tuple[str, ...]
    """Nodes of its ranks, as far as their placement is recorded."""


@dataclass(frozen=True)
class InFlight:
    """A save that is submitted and not committed."""

    step: int
    kind: str
    phase: str
    since: float
    images: int
    """Its images in the memory of this node."""
    waiting_for: str
    """Ranks of this node that have not submitted it; empty if none is missing."""
    url: str = ""


@dataclass(frozen=True)
class FailureGroup:
    """Saves and other flow runs that did not succeed for the same reason."""

    cause: str
    """Name of the final state: ``Failed``, ``Crashed``, ``Superseded``, ``Evicted``, ..."""
    message: str
    """The newest message."""
    count: int
    steps: tuple[int, ...]
    """Steps in order; empty for runs that are not about a step."""
    saved_since: int
    """How many of the steps are committed by now."""
    first_at: float
    last_at: float
    remedy: str
    command: str
    """What to type; empty if nothing is to be done."""
    url: str
    """Page of the newest run; empty if there is none."""

    @property
    def is_open(self) -> bool:
        """Whether something is left to do."""
        return bool(self.command) and self.saved_since < max(self.count, len(self.steps))


@dataclass(frozen=True)
class Disk:
    """Where the bytes are, and when there is no room left."""

    nbytes: int
    """All committed steps."""
    quarantine_bytes: int
    spare_bytes: int
    """Files of removed steps that the next saves write over."""
    free_bytes: int
    total_bytes: int
    growth_per_day: float | None
    """Bytes that saves add a day under the policy in force; None if it is unknown."""
    full_at: float | None
    """When the file system is full at that rate; None for never."""


@dataclass(frozen=True)
class Memory:
    """The spool of this node."""

    pending: int
    """Sealed images of the job."""
    used_bytes: int
    """Bytes of the job's slots."""
    free_bytes: int
    total_bytes: int
    evicted: int
    """Images of the job that were evicted before they were committed."""


@dataclass(frozen=True)
class PolicyEffect:
    """What retention with a policy for checkpoints would remove now."""

    policy: str
    in_force: bool
    kept: int
    removed: tuple[int, ...]
    """Steps, oldest first."""
    freed_bytes: int
    error: str = ""
    """Why the policy cannot be applied; empty if it can."""


@dataclass(frozen=True)
class Use:
    """A pin, lease or reader that uses a step."""

    step: int | None
    kind: str
    name: str
    since: float | None
    behind: int | None = None
    """Steps that a reader is behind the newest version of the weights."""


@dataclass(frozen=True)
class Mark:
    """A save that was not committed, for charts."""

    step: int
    at: float
    """Time of its final state; 0 if it is unknown."""
    state: str
    """Name of its final state."""


@dataclass(frozen=True)
class JobReport:
    """All that is known about a job."""

    root: str
    job: str
    created_at: float
    health: Health
    steps: tuple[StepRow, ...] = ()
    """By step."""
    saves: tuple[LoggedSave, ...] = ()
    """Committed saves in order of time, also of steps removed since; the newest thousand."""
    runs: tuple[RunRow, ...] = ()
    in_flight: tuple[InFlight, ...] = ()
    failures: tuple[FailureGroup, ...] = ()
    marks: tuple[Mark, ...] = ()
    disk: Disk | None = None
    memory: Memory | None = None
    policies: tuple[PolicyEffect, ...] = ()
    uses: tuple[Use, ...] = ()
    quarantined: tuple[str, ...] = ()
    """Steps in quarantine, as ``time/global_step_N``."""
    remote: str = ""
    """URL of the job's folder in the remote; empty for none."""
    verified_at: float | None = None
    """When steps were last read and compared."""
    versions: Mapping[str, str] = field(default_factory=dict)
    ui_url: str = ""
    """The job's flow runs in the Prefect UI; empty if there is no server."""
    server_error: str = ""
    """Why the Prefect server could not be asked; empty if it answered."""
    server_limit: int = 0
    """Number of newest flow runs that were read."""


def to_json(report: JobReport) -> dict[str, Any]:
    """Return a report as values of JSON.

    Sizes are ``bytes``, times RFC 3339 in UTC to the second; what is unknown is null.
    """
    found: dict[str, Any] = _convert(report)
    return found


def _convert(value: Any, name: str = "") -> Any:
    if is_dataclass(value):
        return {
            each.name.replace("nbytes", "bytes"): _convert(getattr(value, each.name), each.name)
            for each in fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _convert(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_convert(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, float) and (name.endswith("_at") or name in ("at", "since")):
        return _format_time(value)
    if isinstance(value, Path):
        return str(value)
    return None if value == "" else value


def _format_time(seconds: float) -> str | None:
    """Return a time as RFC 3339; None for 0, which is no time, and after the year 9999."""
    try:
        when = datetime.fromtimestamp(seconds, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
    return when.isoformat(timespec="seconds").replace("+00:00", "Z") if seconds else None
