"""The identity of a save, and of the rank that submits images for it.

Tickets, requests of flow runs and commits all name a save by the same `SaveId`. The number of a run
does not name it: a root that was restored, or fetched again, gives the number to another run.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from trinity_sync.fs.records import Count
from trinity_sync.layout import Kind, WriteConcurrency, job_id_of, step_folder

Export = Literal["", "hf_model", "hf_model with remote code"]
"""Whether a role's model is exported once the step is committed."""


class OfRun(Protocol):
    """What a run has made of a step."""

    @property
    def step(self) -> int:
        """Number of the step."""

    @property
    def run(self) -> int:
        """Number of the run."""

    @property
    def run_key(self) -> str:
        """Key of the run; empty if it is unknown."""


def is_of_other_run(one: OfRun, other: OfRun) -> bool:
    """Return whether two things are of different runs of a job; an empty key is an unknown one."""
    return one.run != other.run or len({one.run_key, other.run_key} - {""}) > 1


@dataclass(frozen=True)
class SaveId:
    """One save of a job: a step of a run, as a checkpoint or as weights for a sync."""

    root: str
    """Absolute path of the job's root."""
    run: Count
    run_key: str
    """Key of the run, which all of its processes share."""
    step: Count
    kind: Kind
    roles: tuple[str, ...]
    """Roles that the save is made of."""
    identity: str = field(default="", kw_only=True)
    """Identity of the job, see `job_identity`; empty for a root that no coordinator has opened."""
    attempt: Count = field(default=1, kw_only=True)
    """Number of the submission. A save that failed is submitted again as the next one, and a commit
    takes the images of one attempt of all roles and ranks."""

    @property
    def job(self) -> str:
        """Identifier of the job; its root is not asked."""
        return job_id_of(Path(self.root), self.identity)

    @property
    def folder(self) -> Path:
        """The step's folder."""
        return step_folder(self.root, self.step)

    @property
    def run_label(self) -> str:
        """Number of the run and digest of its key, which no other start of the job has."""
        return f"run{self.run}-{hashlib.sha256(self.run_key.encode()).hexdigest()[:8]}"

    @property
    def key(self) -> str:
        """Idempotency key: an attempt has one flow run, however often it is requested."""
        roles = "" if self.kind == "checkpoint" else f"/{'+'.join(sorted(self.roles))}"
        attempt = "" if self.attempt == 1 else f"/attempt{self.attempt}"
        return f"{self.job}/{self.run_label}/step{self.step}/{self.kind}{roles}{attempt}"

    def is_of_step(self, origin: "Origin") -> bool:
        """Return whether an image is of the same step of the same run of the same job."""
        mine = (self.root, self.identity, self.run, self.run_key, self.step)
        theirs = (origin.root, origin.identity, origin.run, origin.run_key, origin.step)
        return mine == theirs

    def owns(self, origin: "Origin") -> bool:
        """Return whether an image was submitted with this attempt of the save."""
        mine, theirs = (self.kind, self.attempt), (origin.kind, origin.attempt)
        return mine == theirs and origin.role in self.roles and self.is_of_step(origin)

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
    replicated: tuple[str, ...] = ()
    """Components that rank 0 alone saves, for all ranks."""
    replicas: dict[str, tuple[Count, ...]] = field(default_factory=dict, hash=False)
    """Ranks that have a component as this one has it, by component; the first saves it for all."""

    def count_ranks(self, component: str) -> int:
        """Return the number of ranks that save a component."""
        return 1 if component in self.replicated else self.world_size

    @property
    def save(self) -> SaveId:
        """The save that the images belong to."""
        of_run = self.root, self.run, self.run_key
        of_step = self.step, self.kind, self.roles
        return SaveId(*of_run, *of_step, identity=self.identity, attempt=self.attempt)


@dataclass(frozen=True)
class Parent:
    """A committed step from which another step was made, or a run has begun."""

    root: str
    """Real path of its root at that time."""
    identity: str
    """Identity of its root."""
    run: Count
    step: Count
    digest: str
    """`Manifest.weights_digest` of it."""
    weight: float = 1.0
    """Its share in a merge; the shares of all parents add up to 1."""

    def __str__(self) -> str:
        share = "" if self.weight == 1 else f" x {self.weight:.3g}"
        return f"step {self.step} of run {self.run} in {self.root}{share}"
