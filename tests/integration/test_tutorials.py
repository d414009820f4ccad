"""The tutorials, as they are written: their files, and their commands in one shell."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync.stack.services import StackState

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
TUTORIALS = [DOCS / "get-started/first-save.md", *sorted((DOCS / "tutorials").glob("*.md"))]
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_as_it_is_written(
    tutorial: Path, stack: StackState, tmp_path: Path
) -> None:
    commands = []
    for language, text in BLOCK.findall(tutorial.read_text()):
        if language == "sh":
            commands.append(text)
        else:
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    tools = tmp_path / "bin"  # what an installed package has; this is that of the checkout
    tools.mkdir()
    for name, arguments in (("python", ()), ("trinity-sync", ("-m", "trinity_sync.cli"))):
        words = shlex.join([sys.executable, *arguments])
        (tools / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (tools / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", "\n".join(commands)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
