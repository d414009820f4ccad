"""Faults of a training that its saves show: each is found at its step, by name."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.job import Job
from tests.unit.saver.conftest import Make, Saves
from trinity_sync import CheckpointCoordinator, Checkpoints
from trinity_sync.errors import SaveFailedError
from trinity_sync.storage.manifest import Manifest, read_manifest

LATER = "layers.1.weight"


class Training:
    """A small model that an optimizer changes in each step."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        layers = torch.nn.ModuleDict({"layers": torch.nn.Sequential(*[torch.nn.Linear(9, 9)] * 2)})
        layers.layers[1] = torch.nn.Linear(9, 9)
        self.model = layers.to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=1000)

    def step(self) -> dict[str, Any]:
        self.optimizer.zero_grad()
        inputs = torch.randn(4, 9, dtype=next(self.model.parameters()).dtype)
        self.model.layers(inputs).square().sum().backward()
        self.optimizer.step()
        self.schedule.step()
        return self.states

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        yield


def commit(saves: CheckpointCoordinator, step: int, states: dict[str, Any]) -> Manifest:
    saves.save(step, states).wait(250)
    return read_manifest(saves.root, step)


def test_a_hundred_saves_of_a_training_raise_no_alarm(
    saves: Saves, training: Training, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 101):
        saves.save(step, training.step())
    saves.wait_all(250)
    for step in range(1, 101):
        committed = read_manifest(job.root, step)
        assert committed.alarms == []
        assert [each.tensors for each in committed.health] == [4, 12]
    assert not caplog.text
    parameters = [each.detach().reshape(-1) for each in training.model.parameters()]
    norm, found = torch.cat(parameters).norm().item(), committed.health[0]
    assert found.norm == pytest.approx(norm, rel=1e-6)
    assert found.largest == torch.cat(parameters).abs().max()


def test_an_optimizer_that_does_not_step_is_named_although_its_learning_rate_changes(
    saves: Saves, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        assert not commit(saves, step, training.step()).alarms
    for step in (30, 40):
        with torch.no_grad():
            training.model.layers[0].weight.add_(1)
        training.schedule.step()
        found = commit(saves, step, training.states)
        assert found.alarms == ["actor/optim has not changed since step 20"]
        assert f"step {step} of {saves.root}: {found.alarms[0]}" in caplog.text
    assert Checkpoints(saves.root).latest_step(healthy=True) == 40  # with finite values
    assert not commit(saves, 50, training.step()).alarms


def test_a_role_or_a_component_that_is_frozen_is_no_alarm(
    coordinator: Make, training: Training
) -> None:
    saves = coordinator(job={"frozen": "critic,actor/optim"}, roles=("actor", "critic"))
    states = training.step()
    for step in (1, 2):
        saves.save(step, states, role="critic")
        found = commit(saves, step, states)
        expected = ["actor/model has not changed since step 1"] if step == 2 else []
        assert found.alarms == expected


def test_an_optimizer_without_tensors_is_no_alarm(saves: Saves) -> None:
    for step in (1, 2):
        states = {"model": {"w": torch.full((9,), float(step))}, "optim": {"lr": 0.1}}
        assert not commit(saves, step, states).alarms


@pytest.mark.parametrize("place", [0, -1])
def test_one_nan_in_one_shard_of_one_rank_is_named_and_the_step_before_is_the_healthy_one(
    coordinator: Make, training: Training, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    ranks = [coordinator(rank=rank, world_size=2, run_key="run") for rank in (0, 1)]
    for step in (1, 2):
        states = training.step()
        ranks[0].save(step, states)
        if step == 2:
            states["optim"]["state"][1]["exp_avg"][place] = float("nan")
        ranks[1].save(step, states)
        for each in ranks:
            each.wait_all(250)
    found = read_manifest(ranks[0].root, 2)
    alarm = "1 non-finite value in actor/optim of rank 1 (state.1.exp_avg)"
    assert found.alarms == [alarm]
    assert alarm in caplog.text
    assert ranks[0].latest_step() == 2
    assert ranks[0].latest_step(healthy=True) == 1
    assert Checkpoints(ranks[0].root).latest_step(healthy=True) == 1


def test_values_that_are_not_finite_fail_a_save_where_they_are_refused(
    coordinator: Make, training: Training, job: Job
) -> None:
    saves = coordinator(job={"on_nonfinite": "refuse"})
    commit(saves, 1, training.step())
    with torch.no_grad():
        training.model.layers[1].weight[:, 2] = float("nan")
    saves.save(2, training.states)
    with pytest.raises(SaveFailedError, match=rf"9 .* actor/model of rank 0 \({LATER}\)"):
        saves.wait_all(250)
    assert saves.latest_step() == 1
    assert [*Path(job.root / "global_step_2").rglob("*.pt")] == []
    saves.close()
    resumed = coordinator()
    training.model.load_state_dict(resumed.load(1)["model"])
    commit(resumed, 3, training.states)
