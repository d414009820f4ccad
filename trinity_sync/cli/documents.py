"""Results that contain values of other packages.

A command imports them when it runs, since those packages take long to import.
"""

from dataclasses import dataclass

from trinity_sync.cli.rows import (
    FileRow,
    PrunedStep,
    SettingRow,
)
from trinity_sync.orchestration.report.facts import StepRow
from trinity_sync.remote.upload import Replicated
from trinity_sync.retention.policies import StepInfo


@dataclass(frozen=True)
class StepDetails(StepRow):
    """A committed step."""

    files: tuple[FileRow, ...] = ()
    """Its files."""


@dataclass(frozen=True)
class JobDetails:
    """A job in the catalog, with its steps."""

    root: str
    job: str
    """Identifier of the job, which tags its flow runs."""
    bytes: int
    """Size of all steps."""
    updated_at: float
    """Time of the last update of the catalog."""
    settings: list[SettingRow]
    """Its settings; empty if its root does not exist here."""
    steps: tuple[StepInfo, ...]
    """Its committed steps, newest first."""
    flow_runs: dict[int, str]
    """Id of the flow run that committed a step, as far as it is known."""


@dataclass(frozen=True)
class PushedStep(Replicated):
    """A step that was copied to a remote."""

    remote: list[PrunedStep]
    """With ``--keep-last``, all steps in the remote, newest first."""
