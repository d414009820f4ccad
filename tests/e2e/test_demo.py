"""The main job, whole: train with veRL on two ranks, kill them, resume, bit-equal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import iter_committed_steps, require_committed
from trinity_sync.weights.state_files import read_state

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sync", ["checkpoint", "memory", "nccl"])
def test_a_training_that_was_killed_after_submitting_goes_on_bit_equal(
    stack: StackState, tmp_path: Path, sync: str
) -> None:
    paths = os.pathsep.join([str(REPOSITORY / "examples/demo"), str(REPOSITORY)])
    told = subprocess.run(
        [sys.executable, "-m", "grpo_copy.story", str(tmp_path), sync],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "prompts of all steps: equal to the last bit" in told.stdout
    assert "optimizer: equal to the last bit" in told.stdout
    (root,) = tmp_path.glob("job-*")
    steps = [manifest.step for manifest in iter_committed_steps(root)]
    every = 5 if sync == "checkpoint" else 20
    assert steps == list(range(every, 141, every))
    killed_at = require_committed(root, 80)
    assert killed_at.kinds == ("checkpoint", "state_dict")
    assert killed_at.find_file("attachments/explorer.rng") is not None
    state = read_state(root)
    assert state is None or state.registry.versions[-1][0].step == 140
    assert (tmp_path / "demo.png").stat().st_size > 10_000
