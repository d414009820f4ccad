"""A tiny model, vLLM engines that serve it, and what transformers answers with the same weights."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.models import configure
from trinity_sync import CheckpointCoordinator
from trinity_sync.stack.daemon import free_port

pytest.importorskip("vllm", reason="these tests run in vLLM's environment")

PROMPTS = [[5, 6, 7], [1], [40, 2, 40, 2, 9]]
TOKENS = 10

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # tests run functions in its workers
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)


def make_model(seed: int) -> Qwen2ForCausalLM:
    """Random weights whose greedy answers differ from those of another seed.

    In vLLM, its q, k and v with their biases are one layer, and gate and up are one.
    """
    # four heads of 32: vLLM on the CPU takes no smaller heads
    sizes = {"inner": 256, "layers": 2, "heads": 4, "max_position_embeddings": 128}
    config = configure(Qwen2Config, 64, 128, tie_word_embeddings=False, **sizes)
    return randomize(Qwen2ForCausalLM(config).float().eval(), seed)


def randomize(model: Qwen2ForCausalLM, seed: int) -> Qwen2ForCausalLM:
    """Weights so far apart that no rounding changes which token is the most likely one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def publish(saves: CheckpointCoordinator, step: int, state: dict[str, torch.Tensor]) -> None:
    saves.upload(step, lambda: state)
    saves.wait_staged()


@contextmanager
def running_engine(model: Path, **options: Any) -> Iterator[Any]:
    """Yield an ``LLM`` that was started with the weights in the folder ``model``."""
    from vllm import LLM

    defaults = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 128,
        "block_size": 32,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.2,  # of the machine's memory, which others use as well
    }
    llm = LLM(str(model), **defaults | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


class Server:
    """A running vLLM server, which takes and answers with token ids."""

    def __init__(self, url: str, process: "subprocess.Popen[bytes]") -> None:
        self.url, self.process = url, process

    def ask(
        self, prompt: list[int], max_tokens: int = TOKENS, model: str | None = None
    ) -> tuple[list[int], list[tuple[str, int, int]]]:
        """Return the greedy tokens, and spans of them: version of the weights, start and end."""
        body = {
            "model": model,
            "token_ids": prompt,
            "sampling_params": {
                "temperature": 0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "detokenize": False,
            },
        }
        url = f"{self.url}/inference/v1/generate"
        answer = httpx.post(url, json=body, timeout=250, trust_env=False)
        assert answer.is_success, answer.text
        choice = answer.json()["choices"][0]
        spans = choice["weight_versions"] or []  # none of a request that was aborted at once
        return choice["token_ids"] or [], [
            (span["version"], span["start"], span["end"]) for span in spans
        ]

    def ask_all(self, model: str | None = None) -> list[list[int]]:
        """Return the greedy tokens of each prompt, for a model or an adapter."""
        return [self.ask(prompt, model=model)[0] for prompt in PROMPTS]

    def list_processes(self) -> list[psutil.Process]:
        """Return the server and those that it started; none once it has ended."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        return []


def end(processes: list[psutil.Process]) -> None:
    """Send SIGKILL to those that run."""
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.kill()


@contextmanager
def running_server(model: Path, log: Path, *options: str, **environment: str) -> Iterator[Server]:
    """Yield a vLLM server that was started with the weights in the folder ``model``."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init"]
    command += ["--enable-scale-out", "--dtype", "float32", "--max-model-len", "128"]
    command += ["--block-size", "32", "--enforce-eager", "--gpu-memory-utilization", "0.2"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *options],
            env=os.environ | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        deadline = time.monotonic() + 180
        while True:
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < deadline, log.read_text()[-5000:]
            with suppress(httpx.HTTPError):
                httpx.get(f"{server.url}/health", timeout=5, trust_env=False).raise_for_status()
                break
            time.sleep(0.2)  # it does not tell when it listens
        yield server
    finally:
        started = server.list_processes()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(250)
        end(started)
        process.wait()


def generate(llm: Any, lora_request: Any = None) -> list[list[int]]:
    """Return the greedy tokens of an ``LLM``."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    answers = llm.generate(prompts, greedy, use_tqdm=False, lora_request=lora_request)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def expect(model: Any) -> list[list[int]]:
    """Return the greedy tokens of transformers."""
    return [expect_one(model, prompt, TOKENS) for prompt in PROMPTS]


def expect_one(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the greedy tokens of transformers for one prompt."""
    tokens = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1
    )
    return list(tokens[0, len(prompt) :].tolist())
