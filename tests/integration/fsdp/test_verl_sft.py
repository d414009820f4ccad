"""What veRL's SFT trainer does around a checkpoint, with ours: its real handler, in one process.

The trainer itself, on two ranks, is in ``tests/environments/verl``.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from grpo_copy.policy import Policy
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.checkpoint import CheckpointHandler, OrchestrationMode
from verl.utils.checkpoint import checkpoint_manager as verl_manager
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlManager

from tests.conftest import environment
from tests.integration.fsdp.commits import CommitsHere, CommitsWhenTold, Fails
from tests.integration.fsdp.models import manager_of
from trinity_sync import CheckpointCoordinator, ConfigError, SaveFailedError
from trinity_sync.integrations.verl.driver import wrap_find_latest_ckpt_path
from trinity_sync.integrations.verl.fsdp.manager import TrainerCheckpointManager
from trinity_sync.integrations.verl.sft import (
    wrap_destroy_global_process_group,
    wrap_determine_resume_path,
    wrap_save_checkpoint,
)
from trinity_sync.layout import step_folder
from trinity_sync.storage.discovery import read_latest_pointer, require_committed
from trinity_sync.storage.runs import list_runs


class Handler(CheckpointHandler):
    """veRL's, as `integrations.verl.switch` changes it."""

    save_checkpoint = wrap_save_checkpoint(CheckpointHandler.save_checkpoint)
    _determine_resume_path = wrap_determine_resume_path(CheckpointHandler._determine_resume_path)


@wrap_destroy_global_process_group
def end() -> None:
    """What follows the end of all saves."""


@pytest.fixture(autouse=True)
def switched_on(spool_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ours = wrap_find_latest_ckpt_path(verl_manager.find_latest_ckpt_path)
    monkeypatch.setattr(verl_manager, "find_latest_ckpt_path", ours)
    with environment({"TRINITY_SYNC_SPOOL": str(spool_folder)}):
        yield


Start = Callable[..., Any]


@pytest.fixture
def start(policy: Policy, root: Path) -> Iterator[Start]:
    """Makes what a new run of the trainer has when it comes to its checkpoints."""

    @contextmanager
    def running(kind: type = Handler, trigger: CommitsHere | None = None) -> Iterator[Any]:
        with closing(CheckpointCoordinator(root, trigger=trigger or CommitsHere())) as saves:
            policy.engine.checkpoint_manager = manager_of(
                TrainerCheckpointManager, policy.engine, coordinator=saves
            )
            loader = StatefulDataLoader(list(range(100)), batch_size=1)
            yield kind(policy.engine, loader, default_local_dir=str(root))

    return running


def train_to(handler: Any, step: int) -> None:
    """Draw ``step`` batches, and save."""
    batches = iter(handler.train_dataloader)
    for _ in range(step):
        next(batches)
    handler.save_checkpoint(step)


def require_resumed(handler: Any, policy: Policy, fingerprint: dict[str, str]) -> None:
    """Load the newest step, 3, and require its weights and position."""
    assert handler.load_checkpoint() == 3
    assert policy.fingerprint() == fingerprint
    assert next(iter(handler.train_dataloader)).item() == 3


def test_the_iteration_file_is_left_to_the_commit_and_the_trainer_ends_after_it(
    start: Start, root: Path
) -> None:
    trigger = CommitsWhenTold()
    with start(trigger=trigger) as handler:
        train_to(handler, 3)
        assert not step_folder(root, 3).exists()
        assert read_latest_pointer(root, "checkpoint") is None
        trigger.go()
        end()
        assert read_latest_pointer(root, "checkpoint") == 3


def test_the_trainer_ends_with_the_failure_of_a_save(start: Start) -> None:
    with start(trigger=Fails()) as handler:
        train_to(handler, 3)
        with pytest.raises(SaveFailedError, match="the disk is full"):
            end()


def test_a_resumed_training_has_the_position_of_the_dataloader(
    start: Start, root: Path, policy: Policy
) -> None:
    with start() as handler:
        train_to(handler, 3)
        end()
    before = policy.fingerprint()
    assert require_committed(root, 3).find_file("data_0.pt")
    with start() as handler:
        require_resumed(handler, policy, before)


def test_a_step_that_ends_an_epoch_is_followed_by_the_whole_next_one(start: Start) -> None:
    for _ in range(2):
        with start() as handler:
            handler.train_dataloader = StatefulDataLoader([0, 1, 2], batch_size=1)
            if not handler.load_checkpoint():
                train_to(handler, 3)
                end()
    assert [batch.item() for batch in handler.train_dataloader] == [0, 1, 2]


def test_a_training_that_verl_began_alone_goes_on_with_us(
    start: Start, root: Path, policy: Policy
) -> None:
    with start(CheckpointHandler) as handler:
        policy.engine.checkpoint_manager = manager_of(VerlManager, policy.engine)
        train_to(handler, 2)
    with start() as handler:
        assert handler.load_checkpoint() == 2
        assert next(iter(handler.train_dataloader)).item() == 2
        train_to(handler, 4)
        end()
    assert list_runs(root)[-1].resumed_from == 2
    assert read_latest_pointer(root, "checkpoint") == 4


def test_verl_alone_goes_on_once_the_files_are_where_it_looks(
    start: Start, root: Path, policy: Policy
) -> None:
    with start() as handler:
        train_to(handler, 3)
        end()
    before, folder = policy.fingerprint(), step_folder(root, 3)
    shutil.copytree(folder / "actor", folder, dirs_exist_ok=True)
    with start(CheckpointHandler) as handler:
        policy.engine.checkpoint_manager = manager_of(VerlManager, policy.engine)
        require_resumed(handler, policy, before)


@pytest.mark.parametrize("mode", ["resume_path", "auto"])
def test_a_step_of_another_job_is_an_initial_state_and_begins_no_run_there(
    start: Start, root: Path, policy: Policy, tmp_path: Path, mode: str
) -> None:
    with start() as handler:
        train_to(handler, 3)
        end()
    before, own = policy.fingerprint(), tmp_path / "own"
    with start() as handler:
        manager = policy.engine.checkpoint_manager
        manager._coordinator = None  # as veRL makes it
        handler.default_local_dir, handler.resume_mode = str(own), mode
        handler.resume_from_path = str(step_folder(root, 3))
        require_resumed(handler, policy, before)
        manager.save_checkpoint(str(step_folder(own, 4)), global_step=4)
        manager._coordinator.close(timeout=0)
    assert len(list_runs(root)) == 1
    assert [(run.number, run.resumed_from) for run in list_runs(own)] == [(1, 0)]


def test_a_resume_on_another_number_of_ranks_is_refused(start: Start, policy: Policy) -> None:
    with start() as handler:
        train_to(handler, 3)
        end()
    with start() as handler:
        policy.engine.checkpoint_manager.world_size = 2
        with pytest.raises(ConfigError, match="saved by 1 ranks, and this training has 2"):
            handler.load_checkpoint()


def test_the_trainer_whose_workers_are_rays_is_refused(start: Start, root: Path) -> None:
    with start() as handler:
        handler.mode = OrchestrationMode.RAY
        with pytest.raises(ConfigError, match="sft_trainer_ray does not work"):
            handler.load_checkpoint()
        with pytest.raises(ConfigError, match="sft_trainer_ray does not work"):
            handler.save_checkpoint(3)
