"""What the commands print and no other package has a type for: rows and results.

Times are seconds since the epoch. A value that is unknown or does not apply is None.
"""

from dataclasses import dataclass

from trinity_sync.orchestration.report.facts import StepRow

# Steps


@dataclass(frozen=True)
class FileRow:
    """A file of a step."""

    path: str
    """Path below the step's folder."""
    bytes: int
    """Size that the manifest names."""
    status: str
    """``valid``, ``corrupted``, ``missing`` or ``truncated``; only ``verify`` reads the file."""
    digest: str
    """Digest that the manifest names."""


@dataclass(frozen=True)
class StepDetails(StepRow):
    """A committed step."""

    files: tuple[FileRow, ...] = ()
    """Its files."""


# Jobs


@dataclass(frozen=True)
class JobRow:
    """A job in the catalog, or without a stack one that has saved on this node."""

    root: str
    job: str
    """Identifier of the job, which tags its flow runs."""
    steps: int
    """Number of committed steps."""
    newest: int | None
    """The newest step, by run and number."""
    bytes: int
    """Size of all steps."""
    updated_at: float
    """Time of the last update of the catalog, or without a stack of this list."""


@dataclass(frozen=True)
class ForgottenJob:
    """A job that was removed from the catalog."""

    root: str
    """Root of the job; its files stay."""


# Keep and remove


@dataclass(frozen=True)
class PrunedStep:
    """A step, and whether it was removed."""

    step: int
    bytes: int
    status: str
    """``kept``, ``reduced to weights`` or ``removed``; in a dry run ``would be removed``."""
    reason: str | None
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
    name: str
    """Name of the metric."""
    value: float
    """Its value."""


@dataclass(frozen=True)
class Unpinned:
    """A pin that was removed."""

    step: int | None
    """Number of the step; null if the file of the pin was torn."""
    removed: bool
    """Whether there was such a pin."""
    tags: list[str]
    """Tags that still keep the step."""


# The stack


@dataclass(frozen=True)
class StoppedStack:
    """Result of ``down``."""

    home: str
    """Folder of the stack."""
    stopped: bool
    """Whether there was a stack."""


@dataclass(frozen=True)
class SettingRow:
    """A setting of a job, of this process or of the stack, without a password."""

    name: str
    """Name of a job's setting, ``section.key`` in the stack's file, or the variable of a setting of
    the process."""
    value: str | float | bool | None
    """Its value; null for an empty text."""
    default: str | float | bool | None
    """Its default."""
    source: str
    """Where the value is from: ``default``, ``job``, a variable, or the path of the file."""


@dataclass(frozen=True)
class DeploymentRow:
    """A deployment of the Prefect server."""

    name: str
    """Its name."""
    pool: str
    """Its work pool."""


@dataclass(frozen=True)
class UiReport:
    """The Prefect UI."""

    url: str
    """Its address."""
    password: str | None
    """What its login asks for; null if it needs none, or the server is external."""
