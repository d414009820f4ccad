"""Which rollouts are too old."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.path_calls import watch_path_calls
from trinity_sync.errors import ConfigError
from trinity_sync.storage.runs import open_run
from trinity_sync.weights.versions import RolloutGate, Version


@pytest.mark.parametrize(
    ("made_by", "resumed_at", "accepted"),
    [
        *((12, None, False), (10, None, True), (8, None, True), (7, None, False)),
        *((12, 9, True), (12, 8, True), (12, 7, False), (8, 9, True)),  # superseded: of the resume
    ],
)
def test_a_rollout_may_lag_by_max_lag_steps(
    made_by: int, resumed_at: int | None, accepted: bool
) -> None:
    gate = RolloutGate(max_lag=2)
    assert gate.accepts(made_by, trainer_step=10, resumed_at=resumed_at) is accepted
    with pytest.raises(ConfigError, match="would let no rollout pass"):
        RolloutGate(-1)


def test_of_a_rollout_that_lived_through_updates_the_tokens_of_old_weights_are_refused() -> None:
    spans = [(7, 0, 2), (8, 3, 3), (10, 4, 5), (11, 6, 6)]
    selected = RolloutGate(max_lag=2).select_tokens(spans, trainer_step=10)
    assert selected == [False] * 3 + [True] * 3 + [False]


@pytest.mark.parametrize(
    ("run", "step", "shared"),
    [(1, 57, 40), (1, 30, 30), (2, 90, 80), (2, 60, 60), (3, 81, 81), (3, 82, None), (7, 80, None)],
)
def test_a_version_is_as_old_as_what_it_shares_with_the_run_after_any_number_of_restarts(
    root: Path, run: int, step: int, shared: int | None
) -> None:
    open_run(root, "first", 0)
    open_run(root, "second", 40, 1)
    open_run(root, "third", 80, 2)
    version = Version(step, run, "memory", str(root))
    accepted = [lag for lag in range(60) if RolloutGate(lag).accepts(version, trainer_step=81)]
    assert accepted == ([] if shared is None else [*range(81 - shared, 60)])


def test_a_gate_sees_a_run_that_begins_later_and_one_that_goes_back_behind_a_mistake(
    root: Path,
) -> None:
    gate = RolloutGate(max_lag=0)
    open_run(root, "first", 0)
    weights, mistaken = (
        Version(step, run, "memory", str(root)) for step, run in ((57, 1), (45, 2))
    )
    assert gate.accepts(weights, trainer_step=57)
    open_run(root, "by mistake", 40, 1)
    assert not gate.accepts(weights, trainer_step=57)
    assert gate.accepts(weights, trainer_step=40)
    open_run(root, "back", 57, 1)  # annuls the run before
    assert gate.accepts(weights, trainer_step=57)
    assert not gate.accepts(mistaken, trainer_step=45)
    open_run(root, "anew", 0)
    assert not gate.accepts(weights, trainer_step=57)


def test_a_rollout_of_another_job_is_refused(root: Path) -> None:
    open_run(root, "first", 0)
    gate = RolloutGate(max_lag=9)
    assert not gate.accepts(Version(5, 1, "memory", str(root), identity="other"), trainer_step=5)
    with pytest.raises(ConfigError, match="elsewhere has no runs"):
        gate.accepts(Version(5, 1, "memory", str(root / "elsewhere")), trainer_step=5)


def test_a_rollout_of_a_run_that_a_restored_root_has_lost_is_refused(root: Path) -> None:
    gate = RolloutGate(max_lag=9)
    open_run(root, "first", 0)
    backup = shutil.copytree(root, root.with_name("backup"))
    lost = open_run(root, "lost", 40, 1)
    rollout = Version(45, lost.number, "memory", str(root), run_key=lost.key)
    calls: list[tuple[str, str]] = []
    with watch_path_calls(lambda *call: calls.append(call), root):
        assert gate.accepts(rollout, trainer_step=46)
    runs = root / ".trinity_sync/runs"
    assert [calls.count(("open", str(runs / f"{number}.json"))) for number in (1, 2)] == [1, 1]
    shutil.rmtree(root)
    backup.rename(root)
    found = open_run(root, "restored", 40, 1)
    assert found.number == lost.number
    assert not gate.accepts(rollout, trainer_step=46)
    assert gate.accepts(replace(rollout, run_key=found.key), trainer_step=46)
