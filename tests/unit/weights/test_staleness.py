"""When to sync, in Trinity's styles, and which rollouts are too old."""

from typing import Any

import pytest

from trinity_sync.errors import ConfigError
from trinity_sync.weights.staleness import RolloutGate, explorer_needs_sync, trainer_needs_sync


@pytest.mark.parametrize(
    ("style", "step", "other", "needed"),
    [
        ("fixed", 10, {}, True),
        ("fixed", 11, {}, False),
        ("fixed", 10, {"last_sync_step": 10}, False),
        ("trainer_driven", 10, {}, True),
        ("fully_async", 20, {}, True),
        ("fully_async", 21, {}, False),
        ("explorer_driven", 10, {}, False),
        ("explorer_driven", 11, {"explorer_requires": True}, True),
        ("explorer_driven", 11, {"explorer_requires": True, "last_sync_step": 11}, False),
        (
            "explorer_driven",
            11,
            {"explorer_requires": True, "last_sync_step": 11, "method": "nccl"},
            True,
        ),
    ],
)
def test_when_a_trainer_syncs(style: Any, step: int, other: dict[str, Any], needed: bool) -> None:
    given = {"interval": 10, "last_sync_step": 0, **other}
    assert trainer_needs_sync(style, step, **given) is needed


@pytest.mark.parametrize(
    ("style", "step", "other", "needed"),
    [
        ("fixed", 10, {}, True),
        ("fixed", 12, {}, False),
        ("fixed", 5, {"offset": 5}, False),
        ("fixed", 15, {"offset": 5}, True),
        ("explorer_driven", 10, {}, True),
        ("trainer_driven", 10, {}, True),
        ("trainer_driven", 10, {"method": "nccl"}, False),
        ("trainer_driven", 10, {"method": "nccl", "trainer_requires": None}, False),
        ("trainer_driven", 10, {"method": "nccl", "trainer_requires": True}, True),
        ("trainer_driven", 11, {"method": "nccl", "trainer_requires": True}, False),
        ("fully_async", 10, {}, False),
    ],
)
def test_when_an_explorer_syncs(style: Any, step: int, other: dict[str, Any], needed: bool) -> None:
    assert explorer_needs_sync(style, step, **{"interval": 10, **other}) is needed


@pytest.mark.parametrize(("made_by", "accepted"), [(10, True), (8, True), (7, False), (12, True)])
def test_a_rollout_may_lag_by_max_lag_steps(made_by: int, accepted: bool) -> None:
    assert RolloutGate(max_lag=2).accepts(made_by, trainer_step=10) is accepted


@pytest.mark.parametrize(
    ("made_by", "resumed_at", "accepted"),
    [(12, 9, True), (12, 8, True), (12, 7, False), (8, 9, True)],
)
def test_a_rollout_of_superseded_weights_is_as_old_as_the_step_of_the_resume(
    made_by: int, resumed_at: int, accepted: bool
) -> None:
    gate = RolloutGate(max_lag=2)
    assert gate.accepts(made_by, trainer_step=10, resumed_at=resumed_at) is accepted


@pytest.mark.parametrize(
    "ask",
    [
        lambda: RolloutGate(-1),
        lambda: explorer_needs_sync("sometimes", 1, interval=1),  # type: ignore[arg-type]
        lambda: trainer_needs_sync("fixed", 1, interval=0, last_sync_step=0),
    ],
)
def test_impossible_settings_are_refused(ask: Any) -> None:
    with pytest.raises(ConfigError):
        ask()
