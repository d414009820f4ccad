"""A real vLLM serves each version of an adapter, and its base model is never sent."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from tests.environments.vllm.engines import (
    Server,
    expect,
    generate,
    make_model,
    running_engine,
    running_server,
)
from trinity_sync import CheckpointCoordinator, WeightFolder, WeightReader, WeightSyncError
from trinity_sync.integrations.vllm.adapter import VLLMAdapter
from trinity_sync.weights.folder.published import PublishedVersion

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "v_proj", "down_proj")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A base model, and next to it the config of an adapter as PEFT writes it."""
    make_model(0).save_pretrained(tmp_path / "model")
    (tmp_path / "adapter").mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    return tmp_path / "model"


class Adapter:
    """A LoRA adapter in training, with the names of ``peft.get_peft_model_state_dict``."""

    def __init__(self) -> None:
        self.state: dict[str, torch.Tensor] = {}
        for name, linear in make_model(0).named_modules():
            if isinstance(linear, nn.Linear) and name.endswith(TARGETS):
                prefix = f"base_model.model.{name}"
                self.state[f"{prefix}.lora_A.weight"] = torch.randn(RANK, linear.in_features)
                self.state[f"{prefix}.lora_B.weight"] = torch.zeros(linear.out_features, RANK)

    def train(self, step: int) -> None:
        random = torch.Generator().manual_seed(step)
        for tensor in self.state.values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=random)

    def merge(self) -> Any:
        """Return the base model with the adapter merged into it."""
        merged = make_model(0)
        for name, weight in merged.named_parameters():
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{prefix}.lora_A.weight" in self.state:
                a, b = (self.state[f"{prefix}.lora_{each}.weight"] for each in "AB")
                weight.data += ALPHA / RANK * b @ a
        return merged


def follow(
    trainer: CheckpointCoordinator, adapter: Adapter, folder: WeightFolder
) -> Iterator[PublishedVersion]:
    """Train, upload and publish the adapter, four times."""
    with WeightReader(root=trainer.root, name="folder") as reader:
        for step in range(1, 5):
            adapter.train(step)
            trainer.upload(step, lambda: adapter.state)
            published = folder.publish(reader)
            assert published.step == step
            yield published


def require_adapter_alone(published: PublishedVersion, adapter: Adapter) -> None:
    """Nothing but the adapter is in the files of a version."""
    sizes = {path.name: path.stat().st_size for path in published.folder.iterdir()}
    assert {*sizes} == {"adapter_model.safetensors", "adapter_config.json", "version.json"}
    expected = sum(tensor.nbytes for tensor in adapter.state.values())
    assert expected <= sizes["adapter_model.safetensors"] < expected + 4000


@pytest.fixture
def llm(model: Path) -> Iterator[Any]:
    with running_engine(model, enable_lora=True, max_lora_rank=RANK, max_loras=2) as engine:
        yield engine


def test_vllm_answers_as_transformers_with_the_merged_adapter(
    trainer: CheckpointCoordinator, tmp_path: Path, model: Path, llm: Any
) -> None:
    base = generate(llm)
    assert base == expect(make_model(0))
    for path in model.glob("*.safetensors"):
        path.unlink()  # nothing can be read from the base model
    adapter, served = Adapter(), VLLMAdapter(llm)
    folder = WeightFolder(tmp_path / "out", tmp_path / "adapter")
    answers, last = [base], None
    for published in follow(trainer, adapter, folder):
        require_adapter_alone(published, adapter)
        request = served.load(published)
        answers.append(generate(llm, request))
        assert answers[-1] == expect(adapter.merge())
        assert generate(llm) == base
        if last:  # what began with the last version ends with it
            assert generate(llm, last) == answers[-2]
        last = request
    assert len({str(answer) for answer in answers}) == 5

    torn = published.folder / "adapter_model.safetensors"
    content = torn.read_bytes()
    for altered in (content[: len(content) // 2], content[:-1] + b"!"):
        torn.write_bytes(altered)
        with pytest.raises(WeightSyncError, match="weight_v000004"):
            served.load(published)
    with pytest.raises(WeightSyncError, match="is a delta"):
        served.load(replace(published, base=3))
    assert generate(llm, last) == answers[-1]


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    options = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2")
    log = tmp_path / "server.log"
    with running_server(model, log, *options, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as server:
        yield server


def test_a_vllm_server_serves_each_version_under_its_name(
    trainer: CheckpointCoordinator, tmp_path: Path, server: Server
) -> None:
    adapter, served = Adapter(), VLLMAdapter(server.url)
    folder = WeightFolder(tmp_path / "out", tmp_path / "adapter")
    answers = {}
    for published in follow(trainer, adapter, folder):
        name = served.load(published)
        answers[name] = expect(adapter.merge())
        assert server.ask_all(name) == answers[name]
    names = [*answers]
    assert [name[: len("policy-1-")] for name in names] == [f"policy-{n}-" for n in range(1, 5)]

    def offered() -> list[str]:
        models = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
        return [each["id"] for each in models[1:]]

    assert offered() == names[2:]
    assert server.ask_all(names[2]) == answers[names[2]]
    restarted = VLLMAdapter(server.url)
    assert restarted.load(published) == names[3]
    assert offered() == names[2:]

    torn = published.folder / "adapter_model.safetensors"
    content = torn.read_bytes()
    torn.write_bytes(content[:-1] + b"!")
    with pytest.raises(WeightSyncError, match="weight_v000004 is corrupted"):
        served.load(published)
    torn.write_bytes(content)
    (tmp_path / "elsewhere").mkdir()
    moved = replace(published, folder=published.folder.rename(tmp_path / "elsewhere/moved"))
    assert restarted.load(moved) == names[3]  # of another folder
    assert offered() == names[3:]
    assert server.ask_all(names[3]) == answers[names[3]]
    with pytest.raises(WeightSyncError, match=r"answered 404.*VLLM_ALLOW_RUNTIME"):
        VLLMAdapter(f"{server.url}/elsewhere").load(moved)
