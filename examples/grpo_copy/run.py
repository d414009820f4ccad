"""A run: train, hand saves over, let the explorer have the weights; and its repetition."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from grpo_copy.explorer import Explorer
from grpo_copy.recording import Recording
from grpo_copy.trainer import Handover, Sync, TrainerGroup, environment
from trinity_sync.storage.manifest import read_manifest


@dataclass
class Save:
    """A save or a sync as the training loop saw it."""

    step: int
    kind: str
    """``checkpoint`` or ``state_dict``; where nothing was saved, the way that weights were sent."""
    nbytes: int
    """Of all ranks."""
    stall_s: float
    """Of the slowest rank."""
    handed_over_at: float
    """Seconds since the epoch."""


@dataclass
class History:
    """What happened in the runs of a job, by step; a step that is done again replaces itself."""

    root: Path
    """Of the job."""
    rewards: dict[int, float] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)
    """Loss of each rank."""
    lags: dict[int, int] = field(default_factory=dict)
    """Steps between the weights that were trained and those that had sampled the batch."""
    saves: list[Save] = field(default_factory=list)
    commit_s: dict[tuple[int, str], float] = field(default_factory=dict)
    """Seconds from hand-over to manifest, by step and kind, of what is known to be committed."""

    def note(self, step: int, kind: str, parts: list[Handover]) -> None:
        """Keep what a save cost, if anything was left to do for it."""
        nbytes, stall_s = sum(p.nbytes for p in parts), max(p.stall_s for p in parts)
        if nbytes:
            self.saves.append(Save(step, kind, nbytes, stall_s, time.time()))
        self.look_for_commits()

    def look_for_commits(self) -> None:
        """Look now and then: the hourly retention removes older steps of weights."""
        for save in self.saves:
            manifest = read_manifest(self.root, save.step)
            if manifest and save.kind in manifest.kinds:
                took = manifest.committed_at - save.handed_over_at
                self.commit_s[save.step, save.kind] = took


@dataclass(frozen=True)
class Schedule:
    """When to save, and how the explorer gets the weights."""

    sync: Sync = "checkpoint"
    sync_every: int = 5
    checkpoint_every: int = 20
    """A multiple of ``sync_every``: a checkpoint serves as the save of its step's weights."""

    @property
    def behind(self) -> int:
        """Steps that the explorer may lag at a sync; a commit has an interval to come about."""
        return self.sync_every if self.sync == "checkpoint" else 0


def start_explorer(model: Path, root: Path, sync: Sync, state: bytes | None = None) -> Any:
    """The explorer as a Ray actor; with ``state``, it goes on where an earlier one was."""
    actor = ray.remote(Explorer).options(num_cpus=0, runtime_env={"env_vars": environment()})
    return actor.remote(model, root, state=state, deltas=sync == "delta")


def train(
    ranks: TrainerGroup,
    explorer: Any,
    recording: Recording,
    history: History,
    steps: range,
    schedule: Schedule,
) -> None:
    """Train ``steps`` on what the explorer samples, and return right after the last hand-over.

    By commits, the explorer waits for the weights of one interval while the next is trained on, so
    that neither training nor sampling stands still. From memory or by broadcast it gets them at
    once, and samples with those that are trained.
    """
    kind = "state_dict" if schedule.sync == "checkpoint" else schedule.sync
    if schedule.sync == "nccl":
        ranks.meet(explorer)
    following = explorer.follow.remote(steps.start - 1)
    ranks.sync_weights(steps.start - 1, schedule.sync)
    sampled: dict[int, Any] = {}
    for step in steps:
        if step not in sampled:
            ray.get(following)  # or a save that failed would go unnoticed
            interval = range(step, step + schedule.sync_every)
            sampled = {later: explorer.sample.remote() for later in interval}
        batch, explorer_state = ray.get(sampled[step])
        recording.write(step, batch)
        history.rewards[step] = batch.rewards.mean().item()
        history.lags[step] = step - 1 - batch.version
        history.losses[step] = ranks.train_on(batch)
        if step % schedule.checkpoint_every == 0:
            history.note(step, "checkpoint", ranks.save_checkpoint(step, explorer_state))
        if step % schedule.sync_every == 0:
            following = explorer.follow.remote(step - schedule.behind)
            history.note(step, kind, ranks.sync_weights(step, schedule.sync))


def repeat(
    ranks: TrainerGroup, recording: Recording, steps: Iterable[int]
) -> dict[int, list[float]]:
    """Train on recorded batches without saves or interruption; returns the losses by step."""
    return {step: ranks.train_on(recording.read(step)) for step in steps}
