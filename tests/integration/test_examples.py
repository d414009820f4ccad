"""The examples as users run them: killed in the middle, and started again by the same command.

That of vLLM needs its environment; ``make vllm`` runs it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.test_cli import run
from tests.support.forked import PRELOADED, Program
from trinity_sync.stack.daemon import free_port
from trinity_sync.stack.services import StackState
from trinity_sync.storage.runs import list_runs

pytestmark = pytest.mark.timeout(600)  # two cores train next to the stack, and other tests

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"

PYTHON = [sys.executable]
RANKS = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SAVED = re.compile(r"step \d+.*loss|^{'loss':|committed in")
"""Printed by each example once it has submitted a save."""


def start(command: list[str], script: str, folder: Path) -> subprocess.Popen[str]:
    """Start an example in a folder of its own, as its docstring says."""
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        [*command, str(EXAMPLES / script)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_after_saves(process: subprocess.Popen[str], count: int) -> None:
    """Send SIGKILL to an example and its ranks once it has printed ``count`` saves."""
    printed = []
    for line in process.stdout:
        printed.append(line)
        count -= bool(SAVED.search(line))
        if not count:
            break
    assert not count, "".join(printed)
    parent = psutil.Process(process.pid)
    for each in [*parent.children(recursive=True), parent]:
        each.kill()
    process.communicate()


def fork_ranks(script: str, folder: Path, world_size: int) -> list[Program]:
    """Start the ranks of an example in a folder, with the variables that torchrun sets."""
    begin = (
        f"import os, sys; os.chdir({str(folder)!r}); sys.stdout.reconfigure(line_buffering=True)"
    )
    text = f"{begin}\n{(EXAMPLES / script).read_text()}"
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    group |= {"WORLD_SIZE": f"{world_size}", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [{"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(world_size)]
    more = ("torch.distributed.fsdp", "torch.nn.parallel", "torch._dynamo")
    return [
        Program(text, env=os.environ | group | rank, talks=True, preloaded=(*PRELOADED, *more))
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("script", "ranks", "last"),
    [
        ("fsdp2/train.py", 2, 150),
        pytest.param("ddp/train.py", 2, 200, marks=pytest.mark.slow),
        pytest.param("pytorch/train.py", 1, 300, marks=pytest.mark.slow),
    ],
)
def test_killed_ranks_of_an_example_resume_and_end_with_all_saves_committed(
    stack: StackState, tmp_path: Path, script: str, ranks: int, last: int
) -> None:
    first = fork_ranks(script, tmp_path, ranks)
    for _ in range(2):
        next(line for line in first[0].stdout if SAVED.search(line))
    for each in first:
        each.clear()
    second = fork_ranks(script, tmp_path, ranks)
    require_resumed(tmp_path, "".join(each.stdout.read() for each in second), last)
    for each in second:
        each.end()
        each.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "script", "last"),
    [
        pytest.param(command, script, last, id=script.partition("/")[0])
        for command, script, last in [
            (RANKS, "fsdp2/train.py", 150),
            (PYTHON, "huggingface/train.py", 120),
            (PYTHON, "lightning/train.py", 200),
            (["sh"], "verl/run_on_cpu.sh", 20),
        ]
    ],
)
def test_a_killed_example_resumes_and_ends_with_all_saves_committed(
    stack: StackState, tmp_path: Path, command: list[str], script: str, last: int
) -> None:
    kill_after_saves(start(command, script, tmp_path), 4)
    second = start(command, script, tmp_path)
    output, _ = second.communicate(timeout=400)
    assert second.returncode == 0, output
    assert "`weights_only` was not set" not in output  # by Lightning, for each save
    require_resumed(tmp_path, output, last)


def require_resumed(folder: Path, output: str, last: int) -> None:
    """Require that the second start of an example has resumed, and that its last step is valid."""
    resumed_from = list_runs(folder / "ckpts")[-1].resumed_from
    assert resumed_from < last
    assert re.search(rf"(resumed from .*|global_step_){resumed_from}\b", output), output
    listed = run("ls", folder / "ckpts")
    assert listed.returncode == 0, listed.stderr
    assert re.search(rf"\b{last}\b.*\bvalid\b", listed.stdout), listed.stdout
