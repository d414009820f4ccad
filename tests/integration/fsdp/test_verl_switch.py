"""veRL's trainer, worker groups and engines, with one variable set: the whole switch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.layout import steps_on_disk
from trinity_sync.orchestration.parts import StackState
from trinity_sync.storage.iteration import read_iteration
from trinity_sync.storage.manifest import read_manifest

HERE = Path(__file__).parent
SWITCH = {"VERL_USE_EXTERNAL_MODULES": "trinity_sync.integrations.verl"}


def run(root: Path, model: Path) -> dict[str, Any]:
    """A launch of the driver; it joins no Ray but its own, as veRL does."""
    paths = os.pathsep.join(map(str, (HERE.parents[2], HERE, HERE.parents[2] / "examples")))
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, str(HERE / "verl_run.py"), str(root), str(model)],
        env=own | SWITCH | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
def test_actor_and_critic_of_verls_trainer_are_committed_together_and_resumed_bit_equal(
    stack: StackState, tiny: Path, tmp_path: Path
) -> None:
    root = tmp_path / "ckpts"
    first = run(root, tiny)
    assert first["began"] == 0
    assert steps_on_disk(root) == [1, 2]
    assert read_iteration(root, "checkpoint") == 2
    manifest = read_manifest(root, 2)
    assert manifest is not None
    shards = {(f.role, f.component, f.rank) for f in manifest.files if f.path.endswith(".pt")}
    assert len({each for each in shards if each[1] == "optim"}) == 4
    assert "attachments/data.pt" in {f.path for f in manifest.files}

    second = run(root, tiny)
    assert second["began"] == 2
    assert second["loaded"] == first["saved"]
    assert (first["first"], second["first"]) == (0, 2)
    assert read_iteration(root, "checkpoint") == 4
