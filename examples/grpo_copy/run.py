"""A run: train, hand saves over, keep the explorer one interval behind; and its repetition."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from grpo_copy.explorer import Explorer
from grpo_copy.recording import Recording
from grpo_copy.trainer import Handover, TrainerGroup, environment
from trinity_sync.layout import Kind


@dataclass
class Save:
    """A save as the training loop saw it."""

    step: int
    kind: Kind
    nbytes: int
    """Of all ranks."""
    stall_s: float
    """Of the slowest rank."""
    handed_over_at: float
    """Seconds since the epoch."""


@dataclass
class History:
    """What happened in the runs of a job, by step; a step that is done again replaces itself."""

    rewards: dict[int, float] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)
    """Loss of each rank."""
    saves: list[Save] = field(default_factory=list)

    def note(self, step: int, kind: Kind, parts: list[Handover]) -> None:
        """Keep what a save cost."""
        nbytes, stall_s = sum(p.nbytes for p in parts), max(p.stall_s for p in parts)
        self.saves.append(Save(step, kind, nbytes, stall_s, time.time()))


@dataclass(frozen=True)
class Schedule:
    """When to save."""

    sync_every: int = 5
    checkpoint_every: int = 20
    """A multiple of ``sync_every``: a checkpoint serves as the sync of its step."""


def start_explorer(model: Path, root: Path) -> Any:
    """The explorer as a Ray actor."""
    actor = ray.remote(Explorer).options(num_cpus=0, runtime_env={"env_vars": environment()})
    return actor.remote(model, root)


def train(
    ranks: TrainerGroup,
    explorer: Any,
    recording: Recording,
    history: History,
    steps: range,
    schedule: Schedule,
) -> None:
    """Train ``steps`` on what the explorer samples, and return right after the last hand-over.

    While an interval is trained on, the explorer waits for the weights of the one before, so that
    neither training nor sampling stands still until a save is committed.
    """
    ranks.save_state_dict(steps.start - 1)  # the first one only says where explorers begin
    following = explorer.follow.remote(0)
    batches: dict[int, Any] = {}
    for step in steps:
        if step not in batches:
            ray.get(following)  # or a save that failed would go unnoticed
            interval = range(step, step + schedule.sync_every)
            batches = {later: explorer.sample.remote(later) for later in interval}
        batch = ray.get(batches[step])
        recording.write(step, batch)
        history.rewards[step] = batch.rewards.mean().item()
        history.losses[step] = ranks.train_on(batch)
        if step % schedule.checkpoint_every == 0:
            history.note(step, "checkpoint", ranks.save_checkpoint(step))
        elif step % schedule.sync_every == 0:
            history.note(step, "state_dict", ranks.save_state_dict(step))
        if step % schedule.sync_every == 0:
            following = explorer.follow.remote(step - schedule.sync_every)


def repeat(
    ranks: TrainerGroup, recording: Recording, steps: Iterable[int]
) -> dict[int, list[float]]:
    """Train on recorded batches without saves or interruption; returns the losses by step."""
    return {step: ranks.train_on(recording.read(step)) for step in steps}
