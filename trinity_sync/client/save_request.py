"""What a trainer asks of the ``save-step`` flow: small, typed, the same at any scale."""

import hashlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from trinity_sync.errors import FormatError
from trinity_sync.layout import SPOOL_FORMAT, Component, Kind, check_name, job_id
from trinity_sync.snapshot.save_id import SaveId

SAVE_DEPLOYMENT = "save-step/save-step"
QUEUES: dict[Kind, str] = {"state_dict": "syncs", "checkpoint": "checkpoints"}
"""Work queues of the pool that saves wait in; explorers wait for a sync, so it goes first."""


class SaveRequest(BaseModel):
    """One step's save: what must be among it.

    It carries no state and names no nodes or ranks: the tickets in the nodes' memory and the
    placements in the root do (see ``storage.placement``). So it is the same whoever asks, and as
    small for thousands of ranks as for one.

    Raises:
        FormatError: a trainer of another release has made it, whatever else is in it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = Field(
        default=SPOOL_FORMAT, description="Of the request and of the images that it is about."
    )
    root: str = Field(description="The job's root folder (Trinity's checkpoint_job_dir), absolute.")
    step: int = Field(ge=0, description="Training step that is saved.")
    run: int = Field(ge=1, description="Which run of the job: 1 for the first, a resume adds one.")
    run_key: str = Field(
        default="", description="What tells this run from one of the same number in an older root."
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
        description="What is to be written; a role need not have them all. Empty where all that "
        "the step saves comes from the user's own functions.",
    )
    expected: int = Field(
        default=0, ge=0, description="At least so many images and receipts (0: what was staged)."
    )
    keep: int = Field(
        default=0,
        ge=0,
        description="Checkpoints that are left after the commit, this one included (0: all). "
        "Pinned, leased and pointed-at steps stay besides.",
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
        return str(Path(root).resolve())

    @field_validator("roles")
    @classmethod
    def _names(cls, roles: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_name("role", role) for role in roles)

    @property
    def save(self) -> SaveId:
        """The save, as tickets and commits name it."""
        return SaveId(self.root, self.run, self.run_key, self.step, self.kind, self.roles)

    @property
    def job(self) -> str:
        """Name of the job, derived from its root."""
        return job_id(self.root)

    @property
    def key(self) -> str:
        """Idempotency key: one flow run a save, however often triggered; a sync is of one role."""
        run = f"run{self.run}-{hashlib.sha256(self.run_key.encode()).hexdigest()[:8]}"
        roles = "" if self.kind == "checkpoint" else f"/{'+'.join(sorted(self.roles))}"
        return f"{self.job}/{run}/step{self.step}/{self.kind}{roles}"

    @property
    def run_name(self) -> str:
        """Name of the flow run in the Prefect UI, e.g. ``save actor+critic step 40``."""
        what = "save" if self.kind == "checkpoint" else "sync"
        return f"{what} {'+'.join(self.roles)} step {self.step}"

    @property
    def tags(self) -> list[str]:
        """Tags of the flow run: job, run, step and kind."""
        return [f"job:{self.job}", f"run:{self.run}", f"step:{self.step}", f"kind:{self.kind}"]

    @property
    def flow_run(self) -> dict[str, Any]:
        """What the save's flow run is created with, by whomever."""
        return {
            "parameters": {"request": self.model_dump(mode="json")},
            "name": self.run_name,
            "tags": self.tags,
            "idempotency_key": self.key,
            "work_queue_name": QUEUES[self.kind],
        }
