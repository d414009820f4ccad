"""The values of a report. Times are seconds since the epoch, durations seconds, sizes bytes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trinity_sync.layout import Kind
from trinity_sync.snapshot.identity import Parent
from trinity_sync.storage.manifest import CallableRecord, ComponentHealth
from trinity_sync.storage.save_timing import LoggedSave, SaveTiming

HealthStatus = Literal["ok", "late", "failed", "empty"]


@dataclass(frozen=True)
class Health:
    """Whether the job is saved now."""

    status: HealthStatus
    sentence: str
    """The status and its reason, in words."""
    interval_s: float | None
    """Median time between two commits of late; None for fewer than three."""
    problems: tuple[str, ...] = ()
    """What needs attention although saves are committed."""


@dataclass(frozen=True)
class StepRow:
    """A step of a job, or a save that is not committed yet."""

    step: int
    status: str
    """``valid``, ``corrupted``, ``superseded`` or ``not committed``; for a save in ``ls``,
    ``pending``, ``writing`` or ``failed``."""
    reason: str = ""
    run: int | None = None
    """Number of the run that saved it; None if it has no readable manifest."""
    kinds: tuple[Kind, ...] = ()
    removed: tuple[str, ...] = ()
    """Components that retention has removed from it; none if it is as it was committed."""
    left_out: tuple[str, ...] = ()
    """Components that its run did not load of the step that it resumed from."""
    parents: tuple[Parent, ...] = ()
    """Steps whose weights were merged into it, with their shares; otherwise those that its run
    began from."""
    checkpoint_run: int = 0
    """Earlier run whose checkpoint the sync of ``run`` has left in place; 0 for none."""
    nbytes: int = 0
    components: Mapping[str, int] = field(default_factory=dict)
    """Bytes by component; ``other`` for the files of save functions."""
    committed_at: float | None = None
    timings: tuple[SaveTiming, ...] = ()
    """How long each save of it took; none if it was imported."""
    save_functions: tuple[CallableRecord, ...] = ()
    """Save functions of the user that wrote files of it."""
    failed_exports: tuple[str, ...] = ()
    """Roles whose model it lacks, because the export that a save requested has failed."""
    latest_of: tuple[Kind, ...] = ()
    """Kinds whose latest pointer names the step."""
    tags: tuple[str, ...] = ()
    in_use: tuple[str, ...] = ()
    in_remote: bool | None = None
    """Whether the required remote has it; None if none is required."""
    verified_at: float | None = None
    """When its files were last read and compared, as far as the report knows from the server."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Recorded metrics."""
    health: tuple[ComponentHealth, ...] = ()
    """Values of the weights and optimizers, as far as they were looked at."""
    urls: tuple[str, ...] = ()
    """Pages of its flow runs, as far as the server was asked."""

    @property
    def is_merge(self) -> bool:
        """Whether it was merged from its parents."""
        return any(each.weight < 1 for each in self.parents)

    @property
    def is_loadable(self) -> bool:
        """Whether the step is committed and not corrupted."""
        return self.status in ("valid", "superseded")

    @property
    def alarms(self) -> list[str]:
        """What is wrong with its values, in words."""
        return [problem for each in self.health for problem in each.problems]

    @property
    def kind(self) -> str | None:
        """The kind that a table shows."""
        return "checkpoint" if "checkpoint" in self.kinds else next(iter(self.kinds), None)

    @property
    def notes(self) -> list[str]:
        """What else a table shows: latest pointers, uses, remote, why it is not valid.

        The reason is without what the row says already.
        """
        latest = "latest" if "checkpoint" in self.latest_of else "latest weights"
        remote = {True: "in remote", False: "not in remote", None: ""}[self.in_remote]
        reason = re.sub(rf"step {self.step} in .*? is corrupted: ", "", self.reason)
        reason = re.sub(rf"/\S*/global_step_{self.step}/", "", reason)
        why = "" if self.status in ("valid", "not committed") else reason
        lacks = ["weights only"] * bool(self.removed)
        lacks += [f"merge of {', '.join(str(p.step) for p in self.parents)}"] * self.is_merge
        lacks += [f"model of {role} not exported" for role in self.failed_exports]
        found = latest * bool(self.latest_of), *self.alarms, *lacks, *self.in_use, remote
        return [*filter(None, (*found, why.partition(". Choose another step")[0]))]


@dataclass(frozen=True)
class SaveRow:
    """A save of a job; with a stack, a flow run of the Prefect server."""

    step: int
    run: int
    """Number of the run of the job."""
    kind: Kind
    """``checkpoint`` or ``state_dict``."""
    status: str
    """``pending``, ``writing``, ``committed``, ``failed``, or ``superseded`` by a later run."""
    since: float | None = None
    """Time since which it has this status."""
    seconds: float | None = None
    """Time that it took, or has taken so far."""
    attempts: int | None = None
    """Number of times that the flow run was started."""
    flow_run: str | None = None
    url: str | None = None
    reason: str | None = None
    """Why it failed; otherwise the message of its state."""
    cause: str | None = None
    """Name of its state if it failed: ``Failed``, ``Crashed``, ``Superseded``, ``Evicted``, ..."""
    retry: str | None = None
    """Command that saves it again, if it has failed, and its images are in the memory of this node,
    or a stack has its flow run."""

    @property
    def save(self) -> tuple[int, int, Kind]:
        """Run, step and kind."""
        return self.run, self.step, self.kind

    @property
    def is_in_flight(self) -> bool:
        """Whether it may still commit without a retry."""
        return self.status in ("pending", "writing")

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without a commit, or without what follows it."""
        return self.status in ("failed", "superseded")


@dataclass(frozen=True)
class Failure:
    """A save, or a flow run of another kind, that did not succeed."""

    cause: str
    message: str
    at: float
    """When it ended."""
    url: str | None
    save: tuple[int, int, str] | None
    """Run, step and kind; None for a flow run of another kind."""
    name: str = ""
    """Name of the flow run."""
    retry: str | None = None
    """Command that saves it again."""


@dataclass(frozen=True)
class RunRow:
    """A start of the training."""

    number: int
    resumed_from: int
    """Step that it started from; 0 for a fresh start."""
    began_at: float | None
    """When it started."""
    nodes: tuple[str, ...]
    """Nodes of its ranks, as far as their placement is recorded."""
    left_out: tuple[str, ...] = ()
    """Components of that step that it did not load, such as ``actor/optim``."""


@dataclass(frozen=True)
class InFlight:
    """A save that is submitted and not committed."""

    step: int
    kind: str
    phase: str
    """What it waits for, or does, in words."""
    since: float
    """Time of its first image on this node, or of its flow run's state."""
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
    """Number of flow runs, or of saves."""
    steps: tuple[int, ...]
    """Steps in order; empty for runs that are not about a step."""
    saved_since: int
    """How many of the steps are committed by now."""
    first_at: float
    """Time of the first."""
    last_at: float
    """Time of the newest."""
    remedy: str
    """What to do, in words."""
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
    """Where the bytes are, and how much room is left."""

    nbytes: int
    """All committed steps."""
    quarantine_bytes: int
    """Steps in quarantine."""
    spare_bytes: int
    """Files of removed steps that the next saves write over."""
    free_bytes: int
    """Free on the file system."""
    total_bytes: int
    """Size of the file system."""


@dataclass(frozen=True)
class Memory:
    """The spool of this node."""

    pending: int
    """Sealed images of the job."""
    used_bytes: int
    """Bytes of the job's slots."""
    free_bytes: int
    """Free on the file system."""
    total_bytes: int
    """Size of the file system."""


@dataclass(frozen=True)
class Use:
    """A pin, lease or reader that uses a step."""

    step: int | None
    kind: str
    name: str
    since: float | None
    """Time since which it uses the step; null if it is unknown."""
    behind: int | None = None
    """Steps that a reader is behind the newest version of the weights."""


@dataclass(frozen=True)
class JobReport:
    """All that is known about a job."""

    root: str
    job: str
    """Identifier of the job, which tags its flow runs."""
    created_at: float
    """Time of the report."""
    health: Health
    """Whether the job is saved now."""
    steps: tuple[StepRow, ...] = ()
    """By step."""
    saves: tuple[LoggedSave, ...] = ()
    """Committed saves in order of time, also of steps removed since; the newest thousand."""
    runs: tuple[RunRow, ...] = ()
    """Starts of the training."""
    in_flight: tuple[InFlight, ...] = ()
    """Saves that are submitted and not committed."""
    failures: tuple[FailureGroup, ...] = ()
    """What did not succeed, by cause."""
    disk: Disk | None = None
    """Where the bytes are."""
    memory: Memory | None = None
    """The spool of this node; null if there is none."""
    keep: str = ""
    """Policy for checkpoints that is in force."""
    uses: tuple[Use, ...] = ()
    """Pins, leases and readers."""
    quarantined: tuple[str, ...] = ()
    """Steps in quarantine, as ``time/global_step_N``."""
    remote: str = ""
    """URL of the job's folder in the remote; empty for none."""
    verified_at: float | None = None
    """When steps were last read and compared."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of packages."""
    ui_url: str = ""
    """The job's flow runs in the Prefect UI; empty if there is no server."""
    server_error: str = ""
    """Why the Prefect server could not be asked; empty if it answered."""
    server_limit: int = 0
    """Number of newest flow runs that were read."""
