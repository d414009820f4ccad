"""The identity of a save, and of the rank that submits images for it.

Tickets, requests of flow runs and commits all name a save by the same `SaveId`.
"""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from trinity_sync.fs.records import Count
from trinity_sync.layout import Kind, WriteConcurrency, step_folder

Export = Literal["", "hf_model", "hf_model with remote code"]
"""Whether a role's model is exported once the step is committed."""


@dataclass(frozen=True)
class SaveId:
    """One save of a job: a step of a run, as a checkpoint or as weights for a sync."""

    root: str
    """Absolute path of the job's root."""
    run: Count
    run_key: str
    """Distinguishes the run from one of the same number in an older root of that path."""
    step: Count
    kind: Kind
    roles: tuple[str, ...]
    """Roles that the save is made of."""

    @property
    def folder(self) -> Path:
        """The step's folder."""
        return step_folder(self.root, self.step)

    @property
    def run_label(self) -> str:
        """Number of the run and digest of its key, which no other start of the job has."""
        return f"run{self.run}-{hashlib.sha256(self.run_key.encode()).hexdigest()[:8]}"

    def owns(self, origin: "Origin") -> bool:
        """Return whether an image of the same run and step was submitted with this save."""
        return origin.kind == self.kind and origin.role in self.roles

    def __str__(self) -> str:
        return f"{self.kind} of step {self.step} (run {self.run}) in {self.root}"


@dataclass(frozen=True)
class Origin(SaveId):
    """Where images come from: a save, and one rank of one of its roles."""

    role: str
    rank: Count
    world_size: Count
    keep: Count = 0
    """Checkpoints to keep once this one is committed; 0 for all."""
    export: Export = ""
    write_concurrency: WriteConcurrency = "all"
    """The trainer's write concurrency, which all tasks of the job apply."""

    @property
    def save(self) -> SaveId:
        """The save that the images belong to."""
        return SaveId(**{field.name: getattr(self, field.name) for field in fields(SaveId)})
