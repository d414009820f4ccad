"""What the commands print: the keys of their JSON documents, and the columns of their tables.

A document is ``{"schema": 1, "<noun>": ...}``, with a list of rows or a single object below the
noun; `DOCUMENTS` names both for each command. Keys are the fields of the dataclasses here. Times
are RFC 3339 in UTC, sizes are bytes, and a value that is unknown or does not apply is null.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

from trinity_sync.cli.output import Column, Mode, write_duration, write_size


def _write_kind(kind: str, mode: Mode) -> str:
    """Write a kind of save: a table calls a state_dict weights."""
    return "weights" if kind == "state_dict" else kind


def _write_notes(notes: list[str], mode: Mode) -> str:
    return "; ".join(" ".join(note.split()) for note in notes)


def _write_percent(value: float, mode: Mode) -> str:
    return f"{value:.2f}" if mode == "plain" else f"{value:.2f} %"


def _write_short(value: float, mode: Mode) -> str:
    return f"{value:.3g}"


# Steps


@dataclass(frozen=True)
class StepRow:
    """A step of a job, or a save that is not committed yet."""

    step: Annotated[int, Column("STEP", right=True)]
    """Number of the step."""
    run: Annotated[int | None, Column("RUN", right=True)] = None
    """Number of the run that saved it; null if it has no readable manifest."""
    kind: Annotated[str | None, Column("KIND", form=_write_kind)] = None
    """``checkpoint``, or ``state_dict`` for weights alone."""
    files: Annotated[int | None, Column("FILES", right=True, wide=True)] = None
    """Number of files."""
    bytes: Annotated[int | None, Column("SIZE", right=True, form=write_size)] = None
    """Size of all files."""
    committed_at: Annotated[datetime | None, Column("AGE", right=True)] = None
    """Time of the commit; null for a step that is not committed."""
    status: Annotated[str, Column("STATUS")] = ""
    """``valid``, ``corrupted``, ``superseded``, ``not committed`` or ``another format``; for a save
    that the Prefect server knows, ``pending``, ``writing`` or ``failed``."""
    notes: Annotated[list[str], Column("NOTES", form=_write_notes)] = field(default_factory=list)
    """What else a table shows: latest pointers, tags, pins, readers, and why it is not valid."""
    latest_of: list[str] = field(default_factory=list)
    """Kinds whose latest pointer names the step."""
    tags: list[str] = field(default_factory=list)
    """Tags of the step."""
    in_use: list[str] = field(default_factory=list)
    """Pins, tags and leases of the step, in words."""
    in_remote: bool | None = None
    """Whether the required remote has it; null if the job requires none."""
    reason: str | None = None
    """Why it is not valid."""
    url: str | None = None
    """Page of its flow run in the Prefect UI, for a save that is not committed."""


@dataclass(frozen=True)
class FileRow:
    """A file of a step."""

    path: Annotated[str, Column("FILE")]
    """Path below the step's folder."""
    bytes: Annotated[int, Column("SIZE", right=True, form=write_size)]
    """Size that the manifest names."""
    status: Annotated[str, Column("STATUS")]
    """``valid``, ``corrupted``, ``missing`` or ``truncated``; only ``verify`` reads the file."""
    digest: Annotated[str, Column("DIGEST")]
    """Digest that the manifest names."""


@dataclass(frozen=True)
class SaveFunctionRow:
    """A save function of the user whose files are in a step."""

    name: Annotated[str, Column("SAVE FUNCTION")]
    """Name of the function."""
    rank: Annotated[int, Column("RANK", right=True)]
    """Rank that called it."""
    seconds: Annotated[float, Column("TIME", right=True, form=write_duration)]
    """Time that it took."""
    files: Annotated[list[str], Column("FILES")]
    """Paths of its files below the step's folder."""


@dataclass(frozen=True)
class StallRow:
    """How long a save held a training thread."""

    role: str
    """Role of the state."""
    rank: int
    """The slowest rank."""
    seconds: float
    """Seconds for which the save call of that rank took."""


@dataclass(frozen=True)
class TimingRow:
    """How long a save of a step took."""

    kind: str
    """``checkpoint`` or ``state_dict``."""
    roles: list[str]
    """Roles that it saved."""
    stalls: list[StallRow]
    """The longest stall of each role."""
    submitted_at: datetime
    """Time at which the last rank had staged its state."""
    queue_s: float
    """Seconds from then until the flow run started."""
    write_s: float
    """Seconds until all files were durable."""
    commit_s: float
    """Seconds until the manifest was written."""
    bytes: int
    """Bytes that it wrote."""
    ranks: int
    """Number of ranks."""
    nodes: int
    """Number of nodes."""


@dataclass(frozen=True)
class StepDetails:
    """A committed step."""

    step: int
    """Number of the step."""
    run: int
    """Number of the run that saved it."""
    kinds: list[str]
    """``checkpoint``, ``state_dict``, or both."""
    status: str
    """As in ``ls``."""
    reason: str | None
    """Why it is not valid."""
    committed_at: datetime
    """Time of the commit."""
    bytes: int
    """Size of all files."""
    tags: list[str]
    """Tags of the step."""
    in_use: list[str]
    """Pins, tags and leases of the step, in words."""
    timings: list[TimingRow]
    """How long each save of it took; none if it was imported."""
    files: list[FileRow]
    """Its files."""
    save_functions: list[SaveFunctionRow]
    """Save functions of the user that wrote files of it."""


@dataclass(frozen=True)
class TensorRow:
    """A tensor of two steps."""

    name: Annotated[str, Column("TENSOR")]
    """Name of the tensor."""
    status: Annotated[str, Column("STATUS")]
    """``same``, ``changed``, ``new``, ``missing``, ``reshaped`` or ``retyped``."""
    shape: Annotated[str, Column("SHAPE")]
    """Shape in the later step, otherwise in the earlier one; both if they differ."""
    elements: int
    """Number of elements; 0 if they cannot be compared."""
    changed: int
    """Number of elements that are not equal."""
    changed_percent: Annotated[float | None, Column("CHANGED", right=True, form=_write_percent)]
    """Percentage of them."""
    max_abs: Annotated[float | None, Column("MAX ABS", right=True, form=_write_short)]
    """Greatest absolute difference."""
    relative_l2: Annotated[float | None, Column("RELATIVE L2", right=True, form=_write_short)]
    """L2 norm of the difference relative to the earlier tensor; null if that was zero."""
    nonfinite: Annotated[int, Column("NOT FINITE", right=True)]
    """Number of infinite or NaN elements of the later step."""


# Saves


@dataclass(frozen=True)
class SaveRow:
    """A save of a job, which is a flow run of the Prefect server."""

    step: Annotated[int, Column("STEP", right=True)]
    """Number of the step."""
    run: Annotated[int, Column("RUN", right=True)]
    """Number of the run of the job."""
    kind: Annotated[str, Column("KIND", form=_write_kind)]
    """``checkpoint`` or ``state_dict``."""
    status: Annotated[str, Column("STATUS")]
    """``pending``, ``writing``, ``committed``, ``failed``, or ``superseded`` by a later run."""
    since: Annotated[datetime | None, Column("AGE", right=True)]
    """Time since which it has this status."""
    seconds: Annotated[float | None, Column("TIME", right=True, form=write_duration)]
    """Time that the flow run took, or has taken so far."""
    attempts: Annotated[int, Column("ATTEMPTS", right=True, wide=True)]
    """Number of times that the flow run was started."""
    flow_run: Annotated[str, Column("FLOW RUN", wide=True)]
    """Id of the flow run."""
    url: Annotated[str, Column("URL", wide=True)]
    """Page of the flow run in the Prefect UI."""
    reason: Annotated[str | None, Column("REASON")]
    """Why it failed; otherwise the message of its state."""


@dataclass(frozen=True)
class WaitedSave:
    """A step that ``wait`` waited for."""

    step: int
    """Number of the step."""
    status: str
    """``valid``, as in ``ls``."""
    run: int
    """Number of the run that saved it."""
    bytes: int
    """Size of all files."""
    committed_at: datetime
    """Time of the commit."""


@dataclass(frozen=True)
class Retried:
    """A failed save that is run again."""

    step: int
    """Number of the step."""
    run: int
    """Number of the run of the job."""
    flow_run: str
    """Id of the flow run."""
    url: str
    """Page of the flow run in the Prefect UI."""


# Readers


@dataclass(frozen=True)
class ReaderRow:
    """The version of the weights that a reader serves."""

    name: Annotated[str, Column("READER")]
    """Name of the reader."""
    step: Annotated[int, Column("VERSION", right=True)]
    """Step of the weights."""
    run: Annotated[int, Column("RUN", right=True)]
    """Run that saved them."""
    behind: Annotated[int, Column("STEPS BEHIND", right=True)]
    """Steps to the newest version."""
    since: Annotated[datetime, Column("SINCE", right=True)]
    """Time at which it began to serve that step."""
    stale_s: Annotated[float, Column("STALE FOR", right=True, form=write_duration)]
    """Seconds from the appearance of a newer version to ``as_of``; 0 if there is none."""


@dataclass(frozen=True)
class ReadersReport:
    """State of a job's Synchronizer."""

    version: int | None
    """Step of the newest version; null if there is none."""
    run: int | None
    """Run that saved it."""
    source: str | None
    """Where it comes from, such as ``memory`` or ``checkpoint``."""
    running: bool | None
    """Whether the Synchronizer runs; null if it is on another host."""
    as_of: datetime
    """Time for which this holds: now if it runs, otherwise that of its last change."""
    trainer: str
    """Status of the trainer."""
    explorers: dict[str, str]
    """Status of each explorer, by name."""
    readers: list[ReaderRow]
    """The readers."""


# Jobs


@dataclass(frozen=True)
class JobRow:
    """A job in the catalog."""

    root: Annotated[str, Column("ROOT")]
    """Root of the job."""
    job: Annotated[str, Column("JOB", wide=True)]
    """Identifier of the job, which tags its flow runs."""
    steps: Annotated[int, Column("STEPS", right=True)]
    """Number of committed steps."""
    newest: Annotated[int | None, Column("NEWEST", right=True)]
    """The newest step."""
    weights: Annotated[int | None, Column("WEIGHTS", right=True, wide=True)]
    """Step of the newest version of the weights."""
    bytes: Annotated[int, Column("SIZE", right=True, form=write_size)]
    """Size of all steps."""
    would_free: Annotated[int, Column("WOULD FREE", wide=True, right=True, form=write_size)]
    """Bytes that the retention policy of checkpoints would free."""
    updated_at: Annotated[datetime, Column("UPDATED", right=True)]
    """Time of the last update of the catalog."""


@dataclass(frozen=True)
class CatalogStep:
    """A step in the catalog."""

    step: Annotated[int, Column("STEP", right=True)]
    """Number of the step."""
    run: Annotated[int, Column("RUN", right=True)]
    """Run that saved it."""
    kinds: Annotated[list[str], Column("KINDS")]
    """``checkpoint``, ``state_dict``, or both."""
    bytes: Annotated[int, Column("SIZE", right=True, form=write_size)]
    """Size of all files."""
    committed_at: Annotated[datetime, Column("AGE", right=True)]
    """Time of the commit."""
    metrics: dict[str, float]
    """Metrics of the step."""
    held: Annotated[list[str], Column("HELD BY")]
    """Pins, tags and leases, in words."""
    reason: str | None
    """Why it is corrupted."""
    superseded_by: int | None
    """Run that superseded it."""
    flow_run: str | None
    """Id of the flow run that committed it."""


@dataclass(frozen=True)
class WeightVersionRow:
    """A version of the weights in the catalog."""

    step: int
    """Number of the step."""
    run: int
    """Run that saved it."""
    source: str
    """Where it comes from."""
    published_at: datetime
    """Time at which it was published."""


@dataclass(frozen=True)
class JobSettingRow:
    """A setting of a job."""

    name: Annotated[str, Column("SETTING")]
    """Name of the setting."""
    value: Annotated[str | float | bool | None, Column("VALUE")]
    """Its value; null for an empty text."""
    default: Annotated[str | float | bool | None, Column("DEFAULT")]
    """Its default."""
    is_set: Annotated[bool, Column("SET")]
    """Whether it was set, rather than left at its default."""


@dataclass(frozen=True)
class JobDetails:
    """A job in the catalog, with its steps."""

    root: str
    """Root of the job."""
    job: str
    """Identifier of the job, which tags its flow runs."""
    bytes: int
    """Size of all steps."""
    would_free: int
    """Bytes that the retention policy of checkpoints would free."""
    updated_at: datetime
    """Time of the last update of the catalog."""
    settings: list[JobSettingRow]
    """Its settings; empty if its root does not exist here."""
    steps: list[CatalogStep]
    """Its committed steps, newest first."""
    versions: list[WeightVersionRow]
    """Versions of its weights, newest first."""


@dataclass(frozen=True)
class CheckedJob:
    """Comparison of the catalog with the files of a job."""

    root: Annotated[str, Column("ROOT")]
    """Root of the job."""
    status: Annotated[str, Column("STATUS")]
    """``ok``, or ``differs``."""
    differences: Annotated[list[str], Column("NOTES", form=_write_notes)]
    """How the catalog differs from the files."""


@dataclass(frozen=True)
class ReindexedJob:
    """A job whose rows were read again from its files."""

    root: Annotated[str, Column("ROOT")]
    """Root of the job."""
    steps: Annotated[int, Column("STEPS", right=True)]
    """Number of committed steps."""


@dataclass(frozen=True)
class ForgottenJob:
    """A job that was removed from the catalog."""

    root: str
    """Root of the job; its files stay."""


# Keep and remove


@dataclass(frozen=True)
class PrunedStep:
    """A step, and whether it was removed."""

    step: Annotated[int, Column("STEP", right=True)]
    """Number of the step."""
    bytes: Annotated[int, Column("SIZE", right=True, form=write_size)]
    """Size of all files."""
    status: Annotated[str, Column("STATUS")]
    """``kept``, ``removed``, or ``would be removed``."""
    reason: Annotated[str | None, Column("KEPT BY")]
    """Why it is kept."""


@dataclass(frozen=True)
class PruneReport:
    """Result of ``prune``."""

    dry_run: bool
    """Whether nothing was removed."""
    bytes: int
    """Bytes that were or would be freed."""
    steps: list[PrunedStep]
    """All steps, newest first."""
    quarantine: list[str]
    """Folders in quarantine that were or would be removed."""


@dataclass(frozen=True)
class MetricRow:
    """A metric of a step."""

    step: int
    """Number of the step."""
    name: str
    """Name of the metric."""
    value: float
    """Its value."""


@dataclass(frozen=True)
class PinRow:
    """A pin or tag of a step."""

    step: int
    """Number of the step."""
    tag: str | None
    """The tag; null for a pin."""
    reason: str | None
    """Why it is kept."""
    pinned_at: datetime
    """Time at which it was pinned or tagged."""


@dataclass(frozen=True)
class TagRow:
    """A tag of a job."""

    tag: Annotated[str, Column("TAG")]
    """The tag."""
    step: Annotated[int, Column("STEP", right=True)]
    """Its step."""
    pinned_at: Annotated[datetime, Column("AGE", right=True)]
    """Time at which the step was tagged."""
    reason: Annotated[str | None, Column("REASON")]
    """Why the step is kept."""


@dataclass(frozen=True)
class Unpinned:
    """A step that was unpinned, or whose tag was removed."""

    step: int | None
    """Number of the step; null if the file of the tag was torn."""
    removed: bool
    """Whether there was such a pin or tag."""
    tags: list[str]
    """Tags that still keep the step."""


@dataclass(frozen=True)
class RewindReport:
    """Result of ``rewind``."""

    step: int
    """The newest step from now on."""
    dry_run: bool
    """Whether nothing was changed."""
    run: int | None
    """Number of the run that resumes from it; null for a dry run."""
    quarantined: list[int]
    """Steps that were or would be quarantined, newest first."""
    folder: str | None
    """Folder that contains them."""


# Look after steps


@dataclass(frozen=True)
class VerifiedRow:
    """A step whose files were read."""

    step: Annotated[int, Column("STEP", right=True)]
    """Number of the step."""
    files: Annotated[int, Column("FILES", right=True)]
    """Number of files that were read."""
    bytes: Annotated[int, Column("SIZE", right=True, form=write_size)]
    """Bytes that were read."""
    seconds: Annotated[float | None, Column("TIME", right=True, form=write_duration)]
    """Time of reading, summed over the files."""
    status: Annotated[str, Column("STATUS")]
    """``valid``, ``corrupted``, ``restored`` (valid again) or ``replaced`` meanwhile."""
    reason: Annotated[str | None, Column("NOTES")]
    """What is corrupted."""


@dataclass(frozen=True)
class LoadedRow:
    """The newest checkpoint, which was loaded as a restart would."""

    step: int
    """Number of the step."""
    files: int
    """Number of files."""
    bytes: int
    """Size of all files."""
    seconds: float
    """Time of loading."""
    checked: bool
    """Whether digests were compared; without a manifest there are none."""


@dataclass(frozen=True)
class FindingRow:
    """A leftover or broken file that ``reconcile`` found."""

    where: Annotated[str, Column("WHERE", wide=True)]
    """Root of the job, or its folder in shared memory."""
    status: Annotated[str, Column("STATUS")]
    """``repaired`` or ``left``."""
    what: Annotated[str, Column("WHAT")]
    """What was found."""
    reason: Annotated[str, Column("NOTES")]
    """What was done, or why nothing was done."""


# Copies


@dataclass(frozen=True)
class PushedStep:
    """A step that was copied to a remote."""

    step: int
    """Number of the step."""
    run: int
    """Run that saved it."""
    url: str
    """URL of the job in the remote."""
    uploaded: int
    """Number of files that were uploaded; the others were there."""
    bytes: int
    """Bytes of those files."""
    seconds: float
    """Time of the upload."""
    remote: list[PrunedStep]
    """With ``--keep-last``, all steps in the remote, newest first."""


@dataclass(frozen=True)
class CommittedStep:
    """A step that was pulled or imported."""

    step: int
    """Number of the step."""
    run: int
    """Run that saved it."""
    root: str
    """Root of the job."""
    bytes: int
    """Size of all files."""
    added: bool
    """False if the root had the step already."""


@dataclass(frozen=True)
class ExportedModel:
    """A model in the Hugging Face format."""

    folder: str
    """Its folder."""
    files: list[str]
    """Paths below the folder."""
    bytes: int
    """Size of all files."""


@dataclass(frozen=True)
class ExportedDcp:
    """A checkpoint in PyTorch's DCP format."""

    folder: str
    """Its folder."""
    components: list[str]
    """``model``, ``optim``, or both."""
    tensors: int
    """Number of tensors."""
    bytes: int
    """Size of all files."""


# The stack


@dataclass(frozen=True)
class ServiceRow:
    """A service of the stack."""

    name: Annotated[str, Column("SERVICE")]
    """``server``, ``ray`` or ``worker``."""
    status: Annotated[str, Column("STATUS")]
    """``running`` or ``dead`` for the stack's own, ``external`` or ``away`` for an external one,
    otherwise ``absent``."""
    pid: Annotated[int | None, Column("PID", right=True)]
    """Process id."""
    url: Annotated[str | None, Column("ADDRESS")]
    """Its address."""
    log: Annotated[str | None, Column("LOG", wide=True)]
    """File with its output."""


@dataclass(frozen=True)
class StackReport:
    """The stack of this node."""

    home: str
    """Its folder."""
    pool: str
    """Prefect work pool of the deployments."""
    workers_online: int | None
    """Number of online workers; null if no server answers."""
    waiting_runs: int | None
    """Due flow runs that no worker has acquired."""
    reason: str | None
    """Why the server does not answer."""
    changed: list[str]
    """Settings that the running stack does not have, as ``server.port: 4200, now 5000``."""
    overrides: list[str]
    """A sentence for each service that the environment overrides."""
    services: list[ServiceRow]
    """The services."""


@dataclass(frozen=True)
class StoppedStack:
    """Result of ``down``."""

    home: str
    """Folder of the stack."""
    stopped: bool
    """Whether there was a stack."""
    images: list["JobImages"]
    """Images that stay in shared memory."""


@dataclass(frozen=True)
class JobImages:
    """Images of a job in shared memory."""

    root: str | None
    """Root of the job; null if it is unknown."""
    folder: str
    """Folder of the images."""
    bytes: int
    """Their size."""
    uncommitted: int
    """Number of images that are not committed yet."""


@dataclass(frozen=True)
class SettingRow:
    """A setting of this process or of the stack, without a password."""

    name: Annotated[str, Column("SETTING")]
    """``section.key`` in the file, or the variable of a setting of the process."""
    value: Annotated[str | None, Column("VALUE")]
    """Its value; null for an empty text."""
    default: Annotated[str | None, Column("DEFAULT", wide=True)]
    """Its default."""
    source: Annotated[str, Column("SOURCE")]
    """Where the value is from: ``default``, a variable, or the path of the file."""


@dataclass(frozen=True)
class CheckRow:
    """A check of ``doctor``."""

    name: str
    """What was checked."""
    status: str
    """``ok``, ``warn`` or ``fail``."""
    message: str
    """What was found."""
    hint: str | None
    """What to do."""


@dataclass(frozen=True)
class DeploymentRow:
    """A deployment of the Prefect server."""

    name: Annotated[str, Column("DEPLOYMENT")]
    """Its name."""
    pool: Annotated[str, Column("WORK POOL")]
    """Its work pool."""


@dataclass(frozen=True)
class UiReport:
    """The Prefect UI."""

    url: str
    """Its address."""
    password: str | None
    """What its login asks for; null if it needs none, or the server is external."""


@dataclass(frozen=True)
class VersionReport:
    """This installation."""

    version: str
    """Version of trinity-sync."""
    path: str
    """Folder of the package."""
    python: str
    """Version of Python."""
    executable: str
    """Path of Python."""
    packages: dict[str, str | None]
    """Version of each package that matters; null if it is not installed."""
    formats: dict[str, int]
    """Formats of the records in the root and the spool that this release reads and writes."""


DOCUMENTS: dict[str, tuple[str, Any]] = {
    "ls": ("steps", list[StepRow]),
    "show": ("step", StepDetails),
    "diff": ("tensors", list[TensorRow]),
    "runs": ("saves", list[SaveRow]),
    "retry": ("save", Retried),
    "wait": ("steps", list[WaitedSave]),
    "readers": ("readers", ReadersReport | None),
    "jobs ls": ("jobs", list[JobRow]),
    "jobs show": ("job", JobDetails),
    "jobs set": ("settings", list[JobSettingRow]),
    "jobs check": ("jobs", list[CheckedJob]),
    "jobs reindex": ("jobs", list[ReindexedJob]),
    "jobs forget": ("job", ForgottenJob),
    "prune": ("prune", PruneReport),
    "metrics": ("metrics", list[MetricRow]),
    "pin": ("pin", PinRow),
    "unpin": ("pin", Unpinned),
    "tag": ("pin", PinRow),
    "tag --list": ("tags", list[TagRow]),
    "untag": ("pin", Unpinned),
    "rewind": ("rewind", RewindReport),
    "verify": ("steps", list[VerifiedRow]),
    "verify --load": ("loaded", LoadedRow | None),
    "reconcile": ("findings", list[FindingRow]),
    "remote push": ("push", PushedStep),
    "remote pull": ("step", CommittedStep),
    "export hf": ("export", ExportedModel),
    "export dcp": ("export", ExportedDcp),
    "import dcp": ("step", CommittedStep),
    "up": ("stack", StackReport),
    "restart": ("stack", StackReport),
    "join": ("stack", StackReport),
    "status": ("stack", StackReport),
    "down": ("stack", StoppedStack),
    "doctor": ("checks", list[CheckRow]),
    "deploy": ("deployments", list[DeploymentRow]),
    "ui": ("ui", UiReport),
    "config show": ("settings", list[SettingRow]),
    "version": ("version", VersionReport),
}
"""Noun and content of the JSON document of each command that has ``-o``, but of report: its keys
are the fields of `trinity_sync.orchestration.report.facts.JobReport`."""
