"""Overlapped staging of real FSDP models and Adam: what is saved is the state at the save."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.fsdp.commits import CommitsHere
from tests.integration.fsdp.models import Trained
from tests.support.states import copied, differences
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.errors import ImageError
from trinity_sync.layout import shard_file, step_folder
from trinity_sync.snapshot.stager import Staged, StagePlan


@pytest.fixture(params=[1, 2], ids=["fsdp1", "fsdp2"])
def trained(request: pytest.FixtureRequest, one_rank: None, tiny: Path) -> Trained:
    one = Trained(tiny, request.param)
    one.step()
    return one


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[CheckpointCoordinator]:
    settings = Settings(spool=tmp_path / "spool", overlap=True)
    coordinator = CheckpointCoordinator(tmp_path / "job", settings=settings, trigger=CommitsHere())
    yield coordinator
    coordinator.close()


def test_steps_that_follow_at_once_do_not_reach_the_files(
    trained: Trained, saves: CheckpointCoordinator
) -> None:
    manager = trained.manager(saves)
    expected = {}
    for step in (1, 2, 3):
        expected[step] = trained.state()
        manager.save_checkpoint(str(step_folder(saves.root, step) / "actor"), step)
        trained.step()
    manager.wait_on_save_thread()
    for step, components in expected.items():
        for component, state in components.items():
            file = step_folder(saves.root, step) / "actor" / shard_file(component, 1, 0)
            written = copied(torch.load(file, weights_only=False))
            assert differences(state, written) == []


def test_a_step_that_does_not_wait_is_noticed(
    trained: Trained, saves: CheckpointCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = saves._stager.copy

    def after_the_step(plan: StagePlan) -> Staged:
        trained.step()
        return copy(plan)

    monkeypatch.setattr(saves._stager, "copy", after_the_step)
    saves.save(1, {"optim": trained.optimizer.state_dict()}, overlap=True)
    with pytest.raises(ImageError, match=r"state\.\w+\.exp_avg"):
        saves.wait_staged()
