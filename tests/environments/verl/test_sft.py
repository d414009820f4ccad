"""veRL's SFT trainer itself on two ranks: killed in mid-run, and started again by the same command.

What veRL lacks on a CPU is in ``tests.environments.verl.cpu``; what has it save with us is the
variable alone.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.environments.verl.sft import ALONE, WITH_US, Launch, Losses, make_world
from tests.integration.fsdp.merged import merged
from trinity_sync import Checkpoints
from trinity_sync.layout import step_folder
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import read_latest_pointer
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import list_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, SAVE_EVERY = 30, 4
SCHEDULE = (f"trainer.save_freq={SAVE_EVERY}", "trainer.total_epochs=6")


@dataclass
class Story:
    """A training by veRL alone, and one with us that was killed and resumed."""

    alone: Path
    root: Path
    all_losses: Losses
    killed: Losses
    resumed: Losses


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    make_world(folder)
    return folder


@pytest.fixture(scope="module")
def story(stack: StackState, world: Path) -> Story:
    alone, root = world / "alone", world / "ckpts"
    uninterrupted = Launch(world, "alone", alone, ALONE, *SCHEDULE)
    uninterrupted.to_its_end()
    ours = (*SCHEDULE, "trainer.max_ckpt_to_keep=2")
    first = Launch(world, "first", root, WITH_US, *ours)
    with first.running() as launcher:
        while max(first.losses, default=0) <= 2 * SAVE_EVERY:
            assert launcher.poll() is None, first.output[-6000:]
            time.sleep(0.02)
    resumed = Launch(world, "second", root, WITH_US, *ours)
    resumed.to_its_end()
    return Story(alone, root, uninterrupted.losses, first.losses, resumed.losses)


def test_a_killed_training_resumes_at_the_last_step_that_it_submitted(story: Story) -> None:
    begun = list_runs(story.root)[-1].resumed_from
    assert begun == min(story.resumed) - 1
    assert 2 * SAVE_EVERY <= begun < STEPS
    assert max(story.killed) - SAVE_EVERY <= begun <= max(story.killed)


def test_its_losses_are_those_of_an_uninterrupted_training(story: Story) -> None:
    assert list(story.all_losses) == list(range(1, STEPS + 1))
    assert story.killed == {step: story.all_losses[step] for step in story.killed}
    assert story.resumed == {step: story.all_losses[step] for step in story.resumed}
    assert max(story.resumed) == STEPS


def test_what_it_logs_of_a_saved_step_counts_in_policies(story: Story) -> None:
    metrics = Checkpoints(story.root).metrics(STEPS)
    assert metrics["train/loss"] == pytest.approx(story.all_losses[STEPS][0])


def test_it_ends_once_its_last_step_is_committed_and_verl_finds_that(story: Story) -> None:
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    assert read_latest_pointer(story.root, "checkpoint") == STEPS
    assert find_latest_ckpt_path(str(story.root)) == str(step_folder(story.root, STEPS))


@pytest.mark.skipif(
    os.environ.get("STRATEGY") == "veomni", reason="veRL's merger does not know VeOmni's meshes"
)
def test_verls_merger_makes_of_it_what_the_uninterrupted_training_had(
    story: Story, tmp_path: Path
) -> None:
    merge = [*(sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp")]
    role = step_folder(story.root, STEPS) / "actor"
    merge += ["--local_dir", str(role), "--target_dir", str(tmp_path)]
    done = subprocess.run(merge, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-6000:]
    whole = load_file(tmp_path / "model.safetensors")
    expected = merged(step_folder(story.alone, STEPS))
    assert whole.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(whole[name], tensor.to(whole[name].dtype)), name


@pytest.mark.skipif(
    os.environ.get("STRATEGY") == "veomni", reason="VeOmni's engine trains no adapters"
)
def test_an_adapter_of_a_model_that_is_offloaded_resumes_with_the_losses_of_the_run_before(
    stack: StackState, world: Path
) -> None:
    root = world / "ckpts-adapter"  # of no other run: veRL begins each adapter at random
    options = ["model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=all-linear"]
    options += ["engine.param_offload=True", "engine.optimizer_offload=True"]
    options += ["trainer.save_freq=3", "trainer.total_epochs=2", "trainer.total_training_steps=6"]
    losses = []
    for name in ("adapter", "adapter-again"):
        launch = Launch(world, name, root, WITH_US, *options)
        launch.to_its_end()
        losses.append(launch.losses)
        rewind(root, 3)
    before, again = losses
    assert list(before) == [1, 2, 3, 4, 5, 6]
    assert again == {step: before[step] for step in (4, 5, 6)}
