"""The tutorials, as they are written, without a stack: their files, their commands in one shell.

That of vLLM needs its environment: see `tests.environments.vllm.test_tutorial`.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
VLLM = DOCS / "tutorials/vllm.md"
TUTORIALS = sorted({*(DOCS / "tutorials").glob("*.md")} - {VLLM})
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def make_tools(folder: Path) -> dict[str, str]:
    """Make the commands that an installed package has, of the checkout; returns the environment."""
    tools = folder / "bin"
    tools.mkdir()
    for name, arguments in (("python", ()), ("trinity-sync", ("-m", "trinity_sync"))):
        words = shlex.join([sys.executable, *arguments])
        (tools / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (tools / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }


def run_in_one_shell(commands: list[str], folder: Path, tools: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", "\n".join(commands)],
        cwd=folder,
        env=tools,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_as_it_is_written(
    tutorial: Path, tools: dict[str, str], tmp_path: Path
) -> None:
    commands = []
    for language, text in BLOCK.findall(tutorial.read_text()):
        if language == "sh":
            commands.append(text)
        else:
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    run_in_one_shell(commands, tmp_path, tools)
