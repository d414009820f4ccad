"""A run: train, submit saves, sync weights to the explorer; and its repetition."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from grpo_copy.explorer import Explorer
from grpo_copy.recording import Recording
from grpo_copy.trainer import SaveCost, Sync, TrainerGroup, make_environment
from trinity_sync.storage.manifest import read_manifest


@dataclass
class Save:
    """A save or a sync, as measured in the training loop."""

    step: int
    kind: str
    """``checkpoint`` or ``state_dict``; for a sync without a save, its method."""
    nbytes: int
    """Sum of all ranks."""
    stall_s: float
    """Seconds that training stalled on the slowest rank."""
    submitted_at: float
    """Seconds since the epoch."""


@dataclass
class History:
    """History of a job's runs, by step; a repeated step replaces the earlier one."""

    root: Path
    """The job's root."""
    rewards: dict[int, float] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)
    """Loss of each rank."""
    lags: dict[int, int] = field(default_factory=dict)
    """Steps between the trained weights and those that sampled the batch."""
    saves: list[Save] = field(default_factory=list)
    commit_s: dict[tuple[int, str], float] = field(default_factory=dict)
    """Seconds from submission to commit of each committed save, by step and kind."""

    def record_save(self, step: int, kind: str, parts: list[SaveCost]) -> None:
        """Record the cost of a save, if it staged anything.

        Args:
            step: training step.
            kind: kind of the save, or method of the sync.
            parts: the cost on each rank.
        """
        nbytes, stall_s = sum(p.nbytes for p in parts), max(p.stall_s for p in parts)
        if nbytes:
            self.saves.append(Save(step, kind, nbytes, stall_s, time.time()))
        self.find_commits()

    def find_commits(self) -> None:
        """Record new commits; call it often, since retention removes older syncs every hour."""
        for save in self.saves:
            manifest = read_manifest(self.root, save.step)
            if manifest and manifest.serves(save.kind):
                took = manifest.committed_at - save.submitted_at
                self.commit_s[save.step, save.kind] = took


@dataclass(frozen=True)
class Schedule:
    """Steps at which to save and sync, and the method of the sync."""

    sync: Sync = "checkpoint"
    sync_every: int = 5
    checkpoint_every: int = 20
    """A multiple of ``sync_every``: a checkpoint includes the sync of its step."""

    @property
    def allowed_lag(self) -> int:
        """Steps that the explorer may lag at a sync; a commit may take one interval."""
        return self.sync_every if self.sync == "checkpoint" else 0


def start_explorer(model: Path, root: Path, state: bytes | None = None) -> Any:
    """Start the explorer as a Ray actor.

    Args:
        model: folder of the untrained model.
        root: the job's root.
        state: RNG state of an earlier explorer, to continue after it.
    """
    actor = ray.remote(Explorer).options(num_cpus=0, runtime_env={"env_vars": make_environment()})
    return actor.remote(model, root, state=state)


def train(
    ranks: TrainerGroup,
    explorer: Any,
    recording: Recording,
    history: History,
    steps: range,
    schedule: Schedule,
) -> None:
    """Train ``steps`` on the explorer's samples; return right after the last save is submitted.

    With syncs through commits, the explorer waits for the weights of one interval while the next
    one is trained, so neither training nor sampling stalls. From memory or by broadcast it gets
    them at once, and samples with the weights that are trained.

    Args:
        ranks: ranks of the trainer.
        explorer: the explorer's Ray actor.
        recording: records the batches.
        history: records rewards, losses and saves.
        steps: training steps.
        schedule: steps at which to save and sync.
    """
    kind = "state_dict" if schedule.sync == "checkpoint" else schedule.sync
    if schedule.sync == "nccl":
        ranks.form_group(explorer)
    loading = explorer.load_newest.remote(steps.start - 1)
    ranks.sync_weights(steps.start - 1, schedule.sync)
    sampled: dict[int, Any] = {}
    for step in steps:
        if step not in sampled:
            ray.get(loading)  # raises if the explorer found no new version
            interval = range(step, step + schedule.sync_every)
            sampled = {later: explorer.sample.remote() for later in interval}
        batch, explorer_state = ray.get(sampled[step])
        recording.write(step, batch)
        history.rewards[step] = batch.rewards.mean().item()
        history.lags[step] = step - 1 - batch.version
        history.losses[step] = ranks.train_on(batch)
        if step % schedule.checkpoint_every == 0:
            history.record_save(step, "checkpoint", ranks.save_checkpoint(step, explorer_state))
        if step % schedule.sync_every == 0:
            loading = explorer.load_newest.remote(step - schedule.allowed_lag)
            history.record_save(step, kind, ranks.sync_weights(step, schedule.sync))


def repeat(
    ranks: TrainerGroup, recording: Recording, steps: Iterable[int]
) -> dict[int, list[float]]:
    """Train on recorded batches without saves or interruption; return the losses by step.

    Args:
        ranks: ranks of the trainer.
        recording: the recorded batches.
        steps: training steps.
    """
    return {step: ranks.train_on(recording.read(step)) for step in steps}
