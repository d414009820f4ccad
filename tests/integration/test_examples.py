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
    assert process.stdout
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


@pytest.mark.parametrize(
    ("command", "script", "last"),
    [
        pytest.param(RANKS, "fsdp2/train.py", 150, id="fsdp2"),
        *(
            pytest.param(command, script, last, id=script.partition("/")[0], marks=pytest.mark.slow)
            for command, script, last in [
                (PYTHON, "pytorch/train.py", 300),
                (RANKS, "ddp/train.py", 200),
                (PYTHON, "huggingface/train.py", 120),
                (PYTHON, "lightning/train.py", 200),
                (["sh"], "verl/run_on_cpu.sh", 20),
            ]
        ),
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
    resumed_from = list_runs(tmp_path / "ckpts")[-1].resumed_from
    assert resumed_from
    assert resumed_from < last
    assert re.search(rf"(resumed from .*|global_step_){resumed_from}\b", output), output
    listed = subprocess.run(
        [sys.executable, "-m", "trinity_sync.cli", "ls", "ckpts"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert listed.returncode == 0, listed.stderr
    assert re.search(rf"\b{last}\b.*\bvalid\b", listed.stdout), listed.stdout
