"""Results that contain values of other packages.

A command imports them when it runs, since those packages take long to import.
"""

from dataclasses import dataclass

from trinity_sync.cli.rows import (
    FileRow,
    PrunedStep,
    SettingRow,
)
from trinity_sync.layout import Kind
from trinity_sync.remote.upload import Replicated
from trinity_sync.retention.policies import StepInfo
from trinity_sync.storage.manifest import CallableRecord
from trinity_sync.storage.save_timing import SaveTiming


@dataclass(frozen=True)
class StepDetails:
    """A committed step."""

    step: int
    run: int
    kinds: tuple[Kind, ...]
    status: str
    """As in ``ls``."""
    reason: str | None
    committed_at: float
    bytes: int
    tags: list[str]
    in_use: list[str]
    timings: tuple[SaveTiming, ...]
    """How long each save of it took; none if it was imported."""
    files: list[FileRow]
    """Its files."""
    save_functions: tuple[CallableRecord, ...]
    """Save functions of the user that wrote files of it."""


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
