"""When to sync, and when a rollout is too old to train on: predicates on numbers, no loops.

The styles are Trinity-RFT's ``sync_style``. *fixed*: both sides sync every so many of their own
steps. *trainer_driven* and *fully_async*: the trainer does; explorers look when it suits them, or a
watcher of their own takes what is new. *explorer_driven*: the trainer syncs when an explorer asks.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from trinity_sync.errors import ConfigError
from trinity_sync.weights.version import Source

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
    """Whether the trainer hands its weights over after ``step``.

    Args:
        style: Trinity's ``sync_style``.
        step: trainer step that has ended.
        interval: Trinity's ``sync_interval``, in trainer steps.
        last_sync_step: trainer step of the last sync.
        explorer_requires: answer of the Synchronizer's `explorer_requires_sync`.
        method: a broadcast is repeated for an explorer that asks, what can be read again is not:
            tell it so with `notify_no_new_model_state_dict`.

    Raises:
        ConfigError: an unknown style, or an interval below 1.
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
    """Whether an explorer asks for weights after ``step``.

    Args:
        style: Trinity's ``sync_style``.
        step: explorer step that has ended.
        interval: Trinity's ``sync_interval``, in explorer steps.
        offset: Trinity's ``sync_offset``: steps that it goes ahead before it counts.
        trainer_requires: answer of the Synchronizer's `trainer_requires_weight_sync`; counts where
            the trainer drives a broadcast, which only comes to be when both are there.
        method: of the sync.

    Raises:
        ConfigError: an unknown style, or an interval below 1.
    """
    _check(style, interval)
    if style == "fully_async" or step <= offset or (step - offset) % interval:
        return False
    return bool(trainer_requires) if (style, method) == ("trainer_driven", "nccl") else True


def version_lag(newest: int, served: int) -> int:
    """Steps by which a version is behind; 0 for one that is ahead of a run that went back."""
    return max(0, newest - served)


@dataclass(frozen=True)
class RolloutGate:
    """Lets rollouts pass whose weights are at most ``max_lag`` steps old.

    Raises:
        ConfigError: a negative bound, which nothing would pass.
    """

    max_lag: int

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise ConfigError(f"max_lag {self.max_lag} would let no rollout pass; 0 is on-policy")

    def accepts(self, made_by: int, trainer_step: int, *, resumed_at: int | None = None) -> bool:
        """Whether to train at ``trainer_step`` on a rollout that version ``made_by`` made.

        Args:
            made_by: step of the weights.
            trainer_step: step of the training.
            resumed_at: of a rollout from before a restart (its `Version` has another ``run``): the
                step that training resumed from. Later weights than that were abandoned, so they
                count as that old.
        """
        shared = made_by if resumed_at is None else min(made_by, resumed_at)
        return version_lag(trainer_step, shared) <= self.max_lag


def _check(style: str, interval: int) -> None:
    if style not in get_args(SyncStyle):
        known = ", ".join(get_args(SyncStyle))
        raise ConfigError(f"sync style {style!r} is not known; pass one of {known}")
    if interval < 1:
        raise ConfigError(f"a sync interval of {interval} steps cannot be; pass 1 or more")
