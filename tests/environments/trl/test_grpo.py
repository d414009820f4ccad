"""TRL's GRPO and a real vLLM server on the CPU, in an environment of their own (``make trl``)."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.environments.vllm.engines import Server, running_server
from tests.integration.test_examples import kill_after_saves, start
from trinity_sync.errors import ConfigError
from trinity_sync.layout import steps_on_disk
from trinity_sync.stack.services import StackState
from trinity_sync.storage.runs import list_runs

pytest.importorskip("trl", reason="TRL has an environment of its own; see make trl")
pytestmark = pytest.mark.timeout(600)

DIFFERENCE = "sampling/sampling_logp_difference/max"


@contextmanager
def serving(model: Path, backend: str) -> Iterator[Server]:
    """A server with the options that TRL asks for, and a back end for weights."""
    options = [f'--weight-transfer-config={{"backend": "{backend}"}}', "--no-skip-tokenizer-init"]
    options += ["--logprobs-mode=processed_logprobs", "--max-logprobs=-1"]
    with running_server(model, model / "server.log", *options, VLLM_SERVER_DEV_MODE="1") as server:
        yield server


def train(folder: Path, server: str) -> "subprocess.Popen[str]":
    """Start the example with a server."""
    return start(["env", f"VLLM_SERVER={server}", sys.executable], "trl/train.py", folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model and tokenizer that the example begins with."""
    trainer = train(tmp_path, "http://127.0.0.1:9")  # which it waits for
    assert trainer.stdout
    printed = []
    for line in trainer.stdout:
        printed.append(line)
        if line.startswith("model/ is ready"):
            break
    trainer.kill()
    trainer.wait()
    assert (tmp_path / "model").is_dir(), "".join(printed)
    return tmp_path / "model"


def trainer_class() -> Any:
    """As the guide makes it."""
    from trl import GRPOTrainer

    from trinity_sync.integrations.trl import VLLMSyncMixin

    class Trainer(VLLMSyncMixin, GRPOTrainer):
        pass

    return Trainer


def logged(output: str) -> list[dict[str, float]]:
    lines = re.findall(r"^{'loss'.*}$", output, re.MULTILINE)
    return [{name: float(n) for name, n in ast.literal_eval(line).items()} for line in lines]


def weight_version(server: Server) -> str:
    return str(httpx.get(f"{server.url}/weight_info").json()["weight_version"])


def test_the_server_generates_with_each_step_of_a_training_that_is_killed_and_resumed(
    stack: StackState, tmp_path: Path, model: Path
) -> None:
    with serving(model, "trinity_sync") as server:
        kill_after_saves(train(tmp_path, server.url), 4)
        assert int(weight_version(server)) >= 19
        second = train(tmp_path, server.url)
        output, _ = second.communicate(timeout=300)
        assert second.returncode == 0, output
        assert weight_version(server) == "39"  # the last generation is that of step 40
    resumed_from = list_runs(tmp_path / "ckpts")[-1].resumed_from
    assert f"/checkpoint-{resumed_from}\n" in output
    assert max(steps_on_disk(tmp_path / "ckpts")) == 40
    logs = logged(output)
    assert len(logs) == (40 - resumed_from) / 5
    assert all(each[DIFFERENCE] < 1e-4 for each in logs)
    assert logs[-1]["reward"] > 0.5


def test_evaluations_before_in_and_after_a_training_are_of_the_weights_of_their_step(
    stack: StackState, tmp_path: Path, model: Path
) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    from trinity_sync.integrations.huggingface import TrinitySyncCallback

    prompts = Dataset.from_list([{"prompt": f"{a} {b}"} for a in "abcd" for b in "abcd"])
    with serving(model, "trinity_sync") as server:
        trainer = trainer_class()(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            lambda completions, **_: [text.count("a") / 8 for text in completions],
            GRPOConfig(
                str(tmp_path / "out"),
                use_vllm=True,
                vllm_mode="server",
                vllm_server_base_url=server.url,
                max_steps=4,
                save_steps=2,
                eval_strategy="steps",
                eval_steps=2,
                logging_steps=1,
                per_device_train_batch_size=8,
                per_device_eval_batch_size=8,
                num_generations=4,
                num_iterations=2,
                beta=0.04,
                max_completion_length=8,
                learning_rate=1e-3,
                report_to=[],
                bf16=False,
                use_cpu=True,
            ),
            train_dataset=prompts,
            eval_dataset=prompts,
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[TrinitySyncCallback(tmp_path / "ckpts")],
        )
        trainer.evaluate()
        assert weight_version(server) == "0"
        trainer.train()
        trainer.evaluate()
        assert weight_version(server) == "4"
    assert steps_on_disk(tmp_path / "ckpts") == [2, 4]
    found = [
        value
        for logs in trainer.state.log_history
        for name, value in logs.items()
        if name.endswith(DIFFERENCE)
    ]
    assert found
    assert max(found) < 1e-4


def test_what_has_no_server_with_the_back_end_is_refused_before_training(
    tmp_path: Path, model: Path
) -> None:
    with serving(model, "nccl") as server:
        trainer = train(tmp_path, server.url)
        output, _ = trainer.communicate(timeout=300)
    assert trainer.returncode
    assert "has the weight transfer nccl; start it with" in output

    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    with pytest.raises(ConfigError, match="set use_vllm and vllm_mode='server'"):
        trainer_class()(
            str(model),
            lambda completions, **_: [0.0] * len(completions),
            GRPOConfig(str(tmp_path / "out"), bf16=False, use_cpu=True, report_to=[]),
            train_dataset=Dataset.from_list([{"prompt": "a b"}]),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
