"""A canary from the trainer's model over the metrics of a step to an engine; here transformers."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.answers import serving
from tests.support.models import configure
from trinity_sync import CheckpointCoordinator, Checkpoints, WeightSyncError
from trinity_sync.integrations.canary import check_canary, score_model, score_server, take_canary

PROMPTS = [[5, 6, 7, 8], [1, 2], [40, 2, 40, 2, 9]]


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = configure(LlamaConfig, 64, 32, inner=64, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def test_a_canary_is_read_with_its_version_and_an_adapter_that_was_not_merged_is_noticed(
    root: Path, model: Any
) -> None:
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = model.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        adapted += 0.3 * torch.randn(len(adapted), 1) @ torch.randn(1, len(adapted))
    with CheckpointCoordinator(root) as saves:
        saves.record_metrics(7, take_canary(score_model(model), PROMPTS))
        saves.upload(7, lambda: base)
    metrics = Checkpoints(root).metrics(7)
    assert check_canary(metrics, score_model(model), PROMPTS) == 0
    model.load_state_dict(base)
    with pytest.raises(WeightSyncError, match=r"canary_\d has .* were adapters merged"):
        check_canary(metrics, score_model(model), PROMPTS)
    assert check_canary(metrics, score_model(model), PROMPTS, threshold=9) > 0.02
    with pytest.raises(WeightSyncError, match="the version has no canary_3"):
        check_canary(metrics, score_model(model), [*PROMPTS, [1, 2]])


def test_values_that_are_not_finite_are_noticed(model: Any) -> None:
    canary = take_canary(score_model(model), PROMPTS)
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(WeightSyncError, match="mean log-probability of nan"):
        check_canary(canary, score_model(model), PROMPTS)


@pytest.mark.parametrize(
    "found", [None, [None], [None, {"6": {"logprob": None}}, {}, {}], [None, {"6": None}, {}, {}]]
)
def test_a_server_that_returns_no_numbers_is_named(found: Any) -> None:
    body = json.dumps({"choices": [{"prompt_logprobs": found}]})
    with serving(lambda *_: (200, body)) as url:
        score = score_server(url, "policy")
        with pytest.raises(WeightSyncError, match=rf"{url} returned no log-probability of each"):
            check_canary({"canary_0": -1.0}, score, PROMPTS[:1])


def test_a_server_is_asked_for_the_tokens_of_the_prompt(model: Any) -> None:
    def answer(request: BaseHTTPRequestHandler, text: str) -> tuple[int, str]:
        body = json.loads(text)
        if request.headers["Authorization"] != "Bearer secret" or body["model"] != "policy":
            return 401, "{}"
        scored = zip(body["prompt"][1:], score_model(model)(body["prompt"]), strict=True)
        found = [None, *({str(token): {"logprob": each}} for token, each in scored)]
        return 200, json.dumps({"choices": [{"prompt_logprobs": found}]})

    canary = take_canary(score_model(model), PROMPTS)
    with serving(answer) as url:
        score = score_server(url, "policy", api_key="secret")
        assert check_canary(canary, score, PROMPTS) < 1e-6
        with pytest.raises(WeightSyncError, match=r"scored no prompt.*401"):
            check_canary(canary, score_server(url, "policy"), PROMPTS)
