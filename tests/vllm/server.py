"""A vLLM server of its own process group, and requests to it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from trinity_sync.stack.ports import free_port

START_S = 180


class Server:
    """A running ``vllm serve`` at ``url``."""

    def __init__(self, url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.url, self.process, self.log = url, process, log

    def generate(self, prompt: list[int], max_tokens: int) -> tuple[list[int], list[str]]:
        """The greedy tokens, and the version of the weights of each span of them."""
        answer = httpx.post(
            f"{self.url}/inference/v1/generate",
            json={
                "token_ids": prompt,
                "sampling_params": {
                    "temperature": 0,
                    "max_tokens": max_tokens,
                    "ignore_eos": True,
                    "detokenize": False,
                },
            },
            timeout=120,
        )
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        spans = choice["weight_versions"] or []  # none of a request that was aborted at once
        return choice["token_ids"] or [], [span["version"] for span in spans]

    def kill(self) -> None:
        """Send SIGKILL to all of its processes."""
        for each in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            each.kill()
        self.process.wait()


@contextmanager
def serving(
    model: Path, variables: Mapping[str, str] | None = None, *more: str
) -> Iterator[Server]:
    """A server of the model, within the block, with the updater's calls."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    command += ["--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--max-model-len=128"]
    command += ["--block-size=32", "--enforce-eager", "--gpu-memory-utilization=0.2"]
    command += [
        "--skip-tokenizer-init",
        "--enable-scale-out",
        '--weight-transfer-config={"backend": "trinity_sync"}',
    ]
    log = Path(tempfile.mkstemp(prefix="vllm-", suffix=".log")[1])
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *more],
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"} | dict(variables or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
        log.unlink()


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            if httpx.get(f"{server.url}/health").is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.2)  # it does not tell when it listens
    pytest.fail(f"the server did not start:\n{server.log.read_text()[-5000:]}")


def answers_of(server: Server, prompts: list[list[int]], max_tokens: int) -> Any:
    """The answer to each prompt."""
    return [server.generate(prompt, max_tokens)[0] for prompt in prompts]
