"""Which rollouts are too old."""

import pytest

from trinity_sync.errors import ConfigError
from trinity_sync.weights.versions import RolloutGate


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


def test_a_negative_lag_is_refused() -> None:
    with pytest.raises(ConfigError, match="would let no rollout pass"):
        RolloutGate(-1)
