"""The tutorial of vLLM, as it is written: its programs, and its commands in one shell."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tests.environments.vllm.engines  # noqa: F401  # sets the variables of a vLLM on the CPU
from tests.conftest import STACK
from tests.integration.test_tutorials import BLOCK, REPOSITORY, VLLM
from trinity_sync.stack.daemon import free_port
from trinity_sync.stack.services import StackState

FILE = re.compile(r"^<!-- file: (\S+) -->$", re.MULTILINE)


def make_environment(tools: Path) -> dict[str, str]:
    """The variables of a shell in vLLM's environment, with the stack's command."""
    tools.mkdir()
    (tools / "trinity-sync").symlink_to(Path(STACK or Path(sys.executable).parent, "trinity-sync"))
    paths = [str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": str(REPOSITORY),
    }


@pytest.mark.timeout(600)
def test_the_tutorial_runs_as_it_is_written(stack: StackState, tmp_path: Path) -> None:
    page = VLLM.read_text().replace("8000", str(free_port()))
    for path in FILE.findall(page):
        shutil.copy(REPOSITORY / path, tmp_path)
    commands = []
    for language, text in BLOCK.findall(page):
        if language == "sh":
            commands.append(text)
        else:
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    process = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", "\n".join(commands)],
        cwd=tmp_path,
        env=make_environment(tmp_path / "bin"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        process.wait(500)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # engine and server, as Ctrl-C does
    assert process.returncode == 0, process.stdout.read()[-3000:]
