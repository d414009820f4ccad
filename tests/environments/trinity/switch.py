"""Trinity-RFT 0.6 itself, as it was installed, with one variable set: the whole switch.

Run by ``make trinity`` in an environment of its own, and for that named unlike a file of tests:
Trinity and veRL 0.9 need different versions of transformers.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.environments.trinity.conftest import Configure
from trinity_sync import Checkpoints
from trinity_sync.integrations.trinity.switch import PLUGINS
from trinity_sync.layout import step_folder, steps_on_disk
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import read_latest_pointer
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.restore import load_bytes
from trinity_sync.storage.runs import list_runs

TRINITY = Path(sys.executable).with_name("trinity")


def launch(config: Path) -> None:
    """``trinity run``, with the switch."""
    done = subprocess.run(
        [str(TRINITY), "run", "--config", str(config)],
        env=os.environ | {"TRINITY_PLUGIN_DIRS": str(PLUGINS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def position(root: Path, step: int) -> Any:
    """How many samples the trainer had taken when it saved."""
    return json.loads(load_bytes(root, step, "attachments/trainer_meta.json"))


@pytest.mark.timeout(1200)
def test_a_training_by_trinitys_own_launcher_is_committed_pruned_exported_and_resumed(
    stack: StackState, configure: Configure, root: Path
) -> None:
    trainer = {
        "save_interval": 2,
        "total_steps": 3,
        "max_checkpoints_to_keep": 1,
        "save_strategy": "single_process",
        "save_hf_checkpoint": "last",
    }
    launch(configure(trainer))
    assert steps_on_disk(root) == [3]
    assert read_latest_pointer(root, "checkpoint") == read_latest_pointer(root, "state_dict") == 3
    manifest = read_manifest(root, 3)
    assert manifest is not None
    shards = [(f.component, f.rank) for f in manifest.files if f.path.endswith(".pt")]
    assert sorted(shards) == [(c, r) for c in ("extra_state", "model", "optim") for r in (0, 1)]
    assert position(root, 3)["sample_strategy_state"] == {"current_index": 12}
    metrics = Checkpoints(root).metrics(3)  # what the trainer's monitor has logged of the step
    assert {"actor/lr", "sample/task_count"} <= metrics.keys()
    whole = step_folder(root, 3) / "actor" / "huggingface"
    transformers.AutoModelForCausalLM.from_pretrained(whole)

    launch(configure(trainer | {"total_steps": 5}))
    assert steps_on_disk(root) == [5]
    assert list_runs(root)[-1].resumed_from == 3
    assert position(root, 5)["sample_strategy_state"] == {"current_index": 20}


def write_pairs(folder: Path) -> dict[str, Any]:
    """Write answers to compare; return the buffer of a training that reads them."""
    pairs = [{"prompt": "<copy> a", "chosen": f"{c} <eos>", "rejected": "l <eos>"} for c in "abcd"]
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in 5 * pairs))
    keys = {f"{key}_key": key for key in pairs[0]}
    return {
        "name": "pairs",
        "storage_type": "file",
        "path": str(folder),
        "format": {"prompt_type": "plaintext", **keys},
    }


def write_experiences(folder: Path) -> dict[str, Any]:
    """Write rollouts with Trinity's own storage; return the buffer of a training of them."""
    from trinity.buffer.storage.sql import SQLExperienceStorage
    from trinity.common.config import ExperienceBufferConfig
    from trinity.common.experience import EID, Experience

    folder.mkdir()
    buffer = {"name": "rollouts", "storage_type": "sql", "path": f"sqlite:///{folder}/buffer.db"}
    storage = SQLExperienceStorage(
        ExperienceBufferConfig(**buffer, schema_type="experience").to_storage_config()
    )
    rollouts = [
        Experience(
            eid=EID(batch=0, task=n, run=0),
            tokens=torch.tensor([1, 4 + n % 12, 3, 4 + n % 12, 5 + n % 7, 2]),
            prompt_length=3,
            logprobs=torch.full((3,), -2.7),
            reward=float(n % 2),
        )
        for n in range(40)
    ]
    asyncio.run(storage.write(rollouts))
    return buffer


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("algorithm", "write", "roles"),
    [("ppo", write_experiences, {"actor", "critic"}), ("dpo", write_pairs, {"actor"})],
)
def test_other_algorithms_are_committed_and_resumed_with_all_their_models(
    stack: StackState,
    configure: Configure,
    root: Path,
    tmp_path: Path,
    algorithm: str,
    write: Callable[[Path], dict[str, Any]],
    roles: set[str],
) -> None:
    buffer = {
        "train_batch_size": 4,
        "total_epochs": 10,
        "trainer_input": {"experience_buffer": write(tmp_path / "buffer")},
    }
    other = {"algorithm": {"algorithm_type": algorithm, "optimizer": {"lr": 1e-3}}}
    trainer = {"save_interval": 1, "total_steps": 2, "save_hf_checkpoint": "never"}
    launch(configure(trainer, buffer=buffer, **other))
    launch(configure(trainer | {"total_steps": 3}, buffer=buffer, **other))
    assert steps_on_disk(root) == [1, 2, 3]
    for step in (1, 2, 3):
        manifest = read_manifest(root, step)
        assert manifest is not None
        found = {(f.role, f.component, f.rank) for f in manifest.files if f.path.endswith(".pt")}
        components = ("extra_state", "model", "optim")
        assert found == {(role, c, rank) for role in roles for c in components for rank in (0, 1)}
    assert list_runs(root)[-1].resumed_from == 2
