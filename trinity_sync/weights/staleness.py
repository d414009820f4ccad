"""Predicates that decide when to sync, and when a rollout is too stale to train on.

The styles are Trinity-RFT's ``sync_style``. *fixed*: trainer and explorers sync at intervals of
their own steps. *trainer_driven*: the trainer syncs at intervals, and explorers check for a new
version at intervals of theirs. *fully_async*: the trainer syncs at intervals, and explorers load
each new version in the background. *explorer_driven*: the trainer syncs when an explorer asks.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from trinity_sync.errors import ConfigError
from trinity_sync.weights.versions import Source

SyncStyle = Literal["fixed", "trainer_driven", "explorer_driven", "fully_async"]


def trainer_needs_sync(
    style: SyncStyle,
    step: int,
    *,
    interval: int,
    last_sync_step: int,
    explorer_requires: bool = False,
    method: Source = "checkpoint",
) -> bool:
    """Return whether the trainer syncs its weights after ``step``.

    Args:
        style: Trinity's ``sync_style``.
        step: last completed step of the trainer.
        interval: Trinity's ``sync_interval``, in trainer steps.
        last_sync_step: trainer step of the last sync.
        explorer_requires: answer of the Synchronizer's `explorer_requires_sync`.
        method: Trinity's ``sync_method``. A broadcast is repeated for an explorer that asks; a
            version that can be read again is not, so call `notify_no_new_model_state_dict` instead.

    Raises:
        ConfigError: the style is unknown, or the interval below 1.
    """
    _check(style, interval)
    if style == "explorer_driven":
        return explorer_requires and (last_sync_step != step or method == "nccl")
    return last_sync_step != step and step % interval == 0


def explorer_needs_sync(
    style: SyncStyle,
    step: int,
    *,
    interval: int,
    offset: int = 0,
    trainer_requires: bool | None = False,
    method: Source = "checkpoint",
) -> bool:
    """Return whether an explorer asks for weights after ``step``.

    Args:
        style: Trinity's ``sync_style``.
        step: last completed step of the explorer.
        interval: Trinity's ``sync_interval``, in explorer steps.
        offset: Trinity's ``sync_offset``: first steps that do not count.
        trainer_requires: answer of the Synchronizer's `trainer_requires_weight_sync`; used for
            trainer-driven broadcasts only, which need both sides.
        method: Trinity's ``sync_method``.

    Raises:
        ConfigError: the style is unknown, or the interval below 1.
    """
    _check(style, interval)
    if style == "fully_async" or step <= offset or (step - offset) % interval:
        return False
    return bool(trainer_requires) if (style, method) == ("trainer_driven", "nccl") else True


@dataclass(frozen=True)
class RolloutGate:
    """Accepts rollouts of weights that are at most ``max_lag`` trainer steps old.

    Args:
        max_lag: largest number of steps between rollout and training; 0 is on-policy.

    Raises:
        ConfigError: ``max_lag`` is negative.
    """

    max_lag: int

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise ConfigError(f"max_lag {self.max_lag} would let no rollout pass; 0 is on-policy")

    def accepts(self, made_by: int, trainer_step: int, *, resumed_at: int | None = None) -> bool:
        """Return whether to train at ``trainer_step`` on a rollout.

        Args:
            made_by: step of the weights that generated it.
            trainer_step: current step of the trainer.
            resumed_at: step that training resumed from, for a rollout of an earlier run (the
                ``run`` of its `Version` differs). Weights beyond that step were superseded, and
                count as being of that step.
        """
        shared = made_by if resumed_at is None else min(made_by, resumed_at)
        return trainer_step - shared <= self.max_lag


def _check(style: str, interval: int) -> None:
    if style not in get_args(SyncStyle):
        known = ", ".join(get_args(SyncStyle))
        raise ConfigError(f"sync style {style!r} is not known; pass one of {known}")
    if interval < 1:
        raise ConfigError(f"sync interval must be at least 1 step, got {interval}")
