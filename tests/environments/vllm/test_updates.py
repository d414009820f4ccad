"""Weights in an ``LLM`` after updates, compared with transformers by greedy tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from tests.environments.vllm.engines import (
    expect,
    generate,
    make_model,
    publish,
    randomize,
    running_engine,
)
from trinity_sync import CheckpointCoordinator, WeightSyncError
from trinity_sync.integrations.vllm import VLLMUpdater

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running(tmp_path_factory.mktemp("model")) as llm:
        yield llm


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Any]:
    """An engine that takes updates, started with weights of no test."""
    make_model(1000).save_pretrained(folder)
    with running_engine(
        folder, weight_transfer_config={"backend": "trinity_sync"}, **options
    ) as llm:
        yield llm


def without(model: Qwen2ForCausalLM, name: str) -> dict[str, torch.Tensor]:
    return {each: tensor for each, tensor in model.state_dict().items() if each != name}


WRONG: dict[str, Callable[[Qwen2ForCausalLM], dict[str, torch.Tensor]]] = {
    "model.layers.1.self_attn.qkv_proj.weight": lambda m: without(
        m, "model.layers.1.self_attn.k_proj.weight"
    ),
    "model.norm.weight": lambda m: without(m, "model.norm.weight"),
    **{
        name: lambda m, name=name, rows=rows: m.state_dict() | {name: torch.zeros(rows, 128)}
        for name, rows in {
            "model.layers.2.mlp.up_proj.weight": 256,
            "model.layers.0.mlp.up_proj.weight": 300,
            "model.layers.0.mlp.gate_proj.weight": 200,
            "model.embed_tokens.weight": 96,
        }.items()
    },
}
"""The tensor that a message has to name -> the state that it is about."""


def refuses_what_does_not_fit(llm: Any, root: Path) -> None:
    model = make_model(0)
    with CheckpointCoordinator(root) as saves, VLLMUpdater(llm, root) as updater:
        publish(saves, 1, model.state_dict())
        updater.update()
        serves = expect(model)
        for step, (name, make) in enumerate(WRONG.items(), start=2):
            publish(saves, step, make(model))
            with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
                updater.update()
            assert updater.get_served_step() == 1
            assert generate(llm) == serves
        publish(saves, 50, randomize(model, 50).state_dict())
        assert updater.update() == 50
        assert generate(llm) == expect(model)


def test_weights_that_do_not_fit_are_refused_by_name_and_the_engine_serves_on(
    llm: Any, root: Path
) -> None:
    refuses_what_does_not_fit(llm, root)


def test_two_tensor_parallel_workers_load_their_parts_or_none(root: Path, tmp_path: Path) -> None:
    with running(tmp_path / "model", tensor_parallel_size=2) as llm:
        refuses_what_does_not_fit(llm, root)
