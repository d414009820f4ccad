"""A tiny model, vLLM engines that serve it, and what transformers answers with the same weights."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

pytest.importorskip("vllm", reason="these tests run in vLLM's environment")

PROMPTS = [[5, 6, 7], [1], [40, 2, 40, 2, 9]]
TOKENS = 10

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def make_model(seed: int) -> Qwen2ForCausalLM:
    """Random weights whose greedy answers differ from those of another seed."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,  # two heads of 32: vLLM on the CPU takes no smaller ones
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM(config).float().eval()


@contextmanager
def running_engine(model: Path, **options: Any) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        block_size=32,
        enforce_eager=True,
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def running_server(model: Path, log: Path, *options: str, **environment: str) -> Iterator[str]:
    """Yield the URL of a vLLM server, which takes and answers with token ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init"]
    command += ["--enable-scale-out", "--dtype", "float32", "--max-model-len", "64"]
    command += ["--block-size", "32", "--enforce-eager", *options]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while True:
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < deadline, log.read_text()[-5000:]
            with suppress(httpx.HTTPError):
                httpx.get(f"{url}/health", timeout=5, trust_env=False).raise_for_status()
                break
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, name: str) -> list[list[int]]:
    """Return the greedy tokens of a server for a model or an adapter."""
    answers = []
    for prompt in PROMPTS:
        body = {
            "model": name,
            "token_ids": prompt,
            "sampling_params": {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True},
        }
        answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=60, trust_env=False)
        assert answer.is_success, answer.text
        answers.append(answer.json()["choices"][0]["token_ids"])
    return answers


def generate(llm: Any, lora_request: Any = None) -> list[list[int]]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers = llm.generate(prompts, greedy, use_tqdm=False, lora_request=lora_request)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def expect(model: Any) -> list[list[int]]:
    """Return the greedy tokens of transformers."""
    return [
        model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
