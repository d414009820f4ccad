"""A stack, and the training's own Ray cluster, whose node pretends to have a GPU for each rank."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import running_stack
from trinity_sync.settings import Settings
from trinity_sync.stack.services import StackState

REPOSITORY = Path(__file__).parents[3]
RANKS = 2
ON_CPU = {
    "VERL_USE_EXTERNAL_MODULES": "tests.environments.trinity.cpu",
    "RAY_AUTH_MODE": "disabled",
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "examples/demo")]),
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
CHAT = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
Configure = Callable[..., Path]

sys.path.insert(0, str(REPOSITORY / "examples/demo"))


@pytest.fixture(scope="session")
def stack(stack_settings: Settings) -> Iterator[StackState]:
    """The stack of the session; the environment names its server, and the training's Ray."""
    with running_stack(stack_settings, ON_CPU) as state:
        from tests.support.ray_nodes import ray_cluster  # Ray reads the environment when imported

        node = {"num_cpus": 32, "num_gpus": RANKS, "object_store_memory": 200 << 20}
        with ray_cluster() as cluster:
            cluster.add_node(**node, include_dashboard=False)
            os.environ["RAY_ADDRESS"] = cluster.address
            yield state


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen2."""
    from grpo_copy import model

    return model.create_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with forty things to copy."""
    folder = tmp_path_factory.mktemp("data")
    letters = "abcdefghijkl"
    lines = [
        {"prompt": f"<copy> {letters[n % 12]}", "response": f"{letters[n % 12]} <eos>"}
        for n in range(40)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def configure(tiny: Path, data: Path, tmp_path: Path) -> Configure:
    """Writes a config of Trinity for a job; its root is ``tmp_path/tests/sft``."""

    def write(trainer: dict[str, Any], **other: Any) -> Path:
        fp32 = {f"{what}_dtype": "fp32" for what in ("param", "reduce", "buffer")}
        engine = {"mixed_precision": fp32, "use_torch_compile": False}
        config = {
            "mode": "train",
            "project": "tests",
            "name": "sft",
            "ray_namespace": str(tmp_path).strip("/"),
            "checkpoint_root_dir": str(tmp_path),
            "ignore_validator_suggestions": True,
            "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-3}},
            "model": {
                "model_path": str(tiny),
                "max_model_len": 32,
                "max_prompt_tokens": 16,
                "max_response_tokens": 16,
                "custom_chat_template": CHAT,
            },
            "cluster": {"node_num": 1, "gpu_per_node": RANKS},
            "buffer": {
                "train_batch_size": 4,
                "total_epochs": 10,
                "trainer_input": {
                    "experience_buffer": {
                        "name": "data",
                        "storage_type": "file",
                        "path": str(data),
                        "split": "train",
                        "enable_progress_bar": False,
                        "format": {
                            "prompt_type": "plaintext",
                            "prompt_key": "prompt",
                            "response_key": "response",
                        },
                    }
                },
            },
            "trainer": {
                "use_remove_padding": False,
                "use_dynamic_bsz": True,
                "trainer_config": {
                    "model": {
                        "override_config": {"attn_implementation": "sdpa"},
                        "enable_gradient_checkpointing": False,
                    },
                    "actor": {"use_torch_compile": False, "fsdp_config": engine},
                    "ref": {"use_torch_compile": False, "fsdp_config": engine},
                    "critic": {"fsdp": engine},
                },
                **trainer,
            },
            "synchronizer": {"sync_method": "checkpoint", "sync_timeout": 60},
            **other,
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tests" / "sft"
