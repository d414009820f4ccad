"""A real vLLM on the CPU, in its own environment (``make vllm``), and what it is compared with."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # tests run functions in its workers
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
PROMPTS = [[5, 6, 7], [40, 3], [1, 2, 3, 4, 5, 6, 7, 8]]
TOKENS = 8

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "job"


def make_model(*, tied: bool = False, seed: int = 0) -> Qwen2ForCausalLM:
    """A model with fused layers in vLLM: q, k and v with their biases, gate and up."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=128,  # four heads of 32: vLLM on the CPU takes no smaller ones
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    return randomize(Qwen2ForCausalLM(config).eval(), seed)


def randomize(model: Qwen2ForCausalLM, seed: int) -> Qwen2ForCausalLM:
    """Weights so far apart that no rounding changes which token is the most likely one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def expected(model: Qwen2ForCausalLM) -> list[list[int]]:
    """The greedy tokens of transformers."""
    return [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def generated(llm: Any) -> list[list[int]]:
    """The greedy tokens of vLLM."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers = llm.generate(prompts, greedy, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


@contextmanager
def running(model: Qwen2ForCausalLM, folder: Path, **options: Any) -> Iterator[Any]:
    """An ``LLM`` that was started with other weights than those of ``model``."""
    from vllm import LLM

    type(model)(model.config).save_pretrained(folder)
    llm = LLM(
        str(folder),
        **{
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 128,
            "block_size": 32,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.2,
            "weight_transfer_config": {"backend": "trinity_sync"},
        }
        | options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
