"""The parameters of the ``save-step`` flow."""

import hashlib
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from trinity_sync.errors import FormatError
from trinity_sync.layout import SPOOL_FORMAT, Component, Kind, check_name, name_job
from trinity_sync.snapshot.identity import SaveId
from trinity_sync.storage.manifest import Manifest, read_run_head

SAVE_DEPLOYMENT = "save-step/save-step"
QUEUES: dict[Kind, str] = {"state_dict": "syncs", "checkpoint": "checkpoints"}
"""Work queues of saves, by kind; rollout workers wait for syncs, so these have priority."""


class SaveRequest(BaseModel):
    """The request to persist and commit one save.

    It carries no state and names no nodes or ranks: the tickets in the nodes' memory and the
    placements in the root do (see ``storage.placement``). So every rank and worker makes the same
    request, which is as small for thousands of ranks as for one.

    Raises:
        FormatError: another release has made the request.
    """

    model_config = ConfigDict(frozen=True)  # a newer client may add values

    format: int = Field(
        default=SPOOL_FORMAT, description="Format of the request and of its images."
    )
    root: str = Field(
        description="Real path of the job's root folder (Trinity's checkpoint_job_dir)."
    )
    step: int = Field(ge=0, description="Training step.")
    run: int = Field(ge=1, description="Number of the run: 1 for the first, a resume adds one.")
    run_key: str = Field(default="", description="Key that all processes of the run share.")
    identity: str = Field(
        default="",
        pattern="^[0-9a-f]*$",
        max_length=64,
        description="Distinguishes the job from an older or a later one at the same path.",
    )
    attempt: int = Field(
        default=1, ge=1, description="Number of the submission: a save that failed adds one."
    )
    kind: Kind = Field(
        default="checkpoint",
        description="checkpoint: all components; state_dict: model weights for a sync.",
    )
    roles: tuple[str, ...] = Field(
        default=("actor",), min_length=1, description="Roles that this commit must contain."
    )
    components: tuple[Component, ...] = Field(
        default=("model", "optim", "extra_state", "metadata"),
        description="Components to write; a role need not have all of them. Empty if only save "
        "functions of the user write files.",
    )
    expected: int = Field(
        default=0,
        ge=0,
        description="Least number of images and save functions to wait for (0: what was staged).",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_this_release(cls, values: Any) -> Any:
        found = values.get("format", SPOOL_FORMAT) if isinstance(values, dict) else SPOOL_FORMAT
        if type(found) is int and found != SPOOL_FORMAT:
            raise FormatError.between(
                f"the request for the save of step {values.get('step')} in {values.get('root')}",
                found,
                SPOOL_FORMAT,
                writer="the trainer's environment",
                reader="the stack's environment",
            )
        return values

    @field_validator("root")
    @classmethod
    def _absolute(cls, root: str) -> str:
        if not Path(root).is_absolute():
            raise ValueError(f"root {root!r} is not absolute; pass the full path of the job's root")
        return os.path.normpath(root)  # its file system may hang, which must not hold up others

    @field_validator("roles")
    @classmethod
    def _names(cls, roles: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_name("role", role) for role in roles)

    @property
    def save(self) -> SaveId:
        """The save, as tickets and commits name it."""
        of_run = self.root, self.run, self.run_key
        of_step = self.step, self.kind, self.roles
        return SaveId(*of_run, *of_step, identity=self.identity, attempt=self.attempt)

    def is_in(self, manifest: Manifest | None) -> bool:
        """Return whether a step is committed with this save, of all roles, by its run."""
        roles = self.roles if self.components else ()  # save functions have none
        return (
            manifest is not None
            and manifest.run == self.run
            and manifest.has_kind(self.kind, roles)
        )

    @property
    def is_committed(self) -> bool:
        """Whether its run has committed it; it has not if the manifest cannot be read.

        Raises:
            FormatError: another release has committed the step.
        """
        return self.is_in(read_run_head(self.root, self.run, self.step))

    @property
    def job(self) -> str:
        """Identifier of the job; its root is not asked."""
        return self.save.job

    @property
    def key(self) -> str:
        """The `SaveId.key`, with which the flow run is created."""
        return self.save.key

    @property
    def key_digest(self) -> str:
        """Digest of the key, for names of files."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:32]

    @property
    def run_name(self) -> str:
        """Name of the save in messages, e.g. ``save actor+critic step 40``."""
        what = "save" if self.kind == "checkpoint" else "sync"
        return f"{what} {'+'.join(self.roles)} step {self.step}"

    @property
    def flow_run_name(self) -> str:
        """Name of the flow run in the Prefect UI, e.g. ``exp1/ckpts: save actor step 40``."""
        return f"{name_job(Path(self.root))}: {self.run_name}"

    @property
    def tags(self) -> list[str]:
        """Tags of the flow run: job, run, step and kind, and the attempt from the second one on."""
        tags = [f"job:{self.job}", f"run:{self.run}", f"step:{self.step}", f"kind:{self.kind}"]
        return [*tags, f"attempt:{self.attempt}"] if self.attempt > 1 else tags

    @property
    def flow_run(self) -> dict[str, Any]:
        """Fields with which the save's flow run is created."""
        return {
            "parameters": {"request": self.model_dump(mode="json")},
            "name": self.flow_run_name,
            "tags": self.tags,
            "idempotency_key": self.key,
            "work_queue_name": QUEUES[self.kind],
        }
