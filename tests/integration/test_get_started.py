"""README.md and docs/get-started: their programs and commands, and the outputs that they show."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_tutorials import REPOSITORY, make_tools
from tests.support.terminal import run_at_terminal
from trinity_sync.stack.services import StackState

pytestmark = pytest.mark.timeout(600)  # two cores train next to the stack, and other tests

README = REPOSITORY / "README.md"
FIRST_SAVE = REPOSITORY / "docs/get-started/first-save.md"
STACK = REPOSITORY / "docs/get-started/stack.md"
PROGRAM = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIES = re.compile(
    r"xxh3-128:\w+|[\d.,]+ (?:m?s|min|h)\b|(?:queue|write|commit) \d+\.\d+"  # measured
    r"|\d+-\d+-\d+ \d+:\d+:\d+|https?://\S+|[\d.]+:\d+|(?<=running) +\d+"  # times, addresses, pids
)


def commands_of(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each command of the page's console blocks, with the lines shown below it."""
    for block in CONSOLE.findall(page.read_text()):
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            yield command, [line for line in shown.splitlines() if line]


def words_of(line: str) -> set[str]:
    """The words of a line that are the same each time."""
    return set(re.findall(r"[\w./']+", VARIES.sub(" ", line)))


@pytest.mark.parametrize(
    "page", [README, pytest.param(FIRST_SAVE, marks=pytest.mark.slow)], ids=lambda path: path.stem
)
def test_a_page_shows_what_its_programs_and_commands_print(
    page: Path, tools: dict[str, str], tmp_path: Path
) -> None:
    for name, text in PROGRAM.findall(page.read_text()):
        (tmp_path / name).write_text(text)
    require_shown(page, tmp_path, tools)
    if (tmp_path / "rollout.py").exists():
        require_loaded(tmp_path, tools)


def require_loaded(folder: Path, tools: dict[str, str]) -> None:
    """Start the rollout worker of the README, and require that it loads what was saved there."""
    with subprocess.Popen(
        [sys.executable, "rollout.py"],
        cwd=folder,
        env=tools | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as rollout:
        assert rollout.stdout.readline() == "weights of step 400\n"
        rollout.kill()


def test_the_page_of_the_stack_shows_what_its_start_prints(
    stack: StackState, tmp_path: Path
) -> None:
    require_shown(STACK, tmp_path, make_tools(tmp_path))


def require_shown(page: Path, folder: Path, tools: dict[str, str]) -> None:
    """Run the commands of a page, and require that they print what it shows."""
    environment = tools | {"COLUMNS": "200", "NO_COLOR": "1"}
    for command, shown in commands_of(page):
        code, printed = run_at_terminal(["bash", "-c", command], environment, folder=folder)
        assert code == 0, f"{command}: {printed}"
        plain = re.sub(r"\r|\x1b\[[?\d;]*[A-Za-z]", "", printed)
        lines = [words_of(line) for line in plain.splitlines()]
        missing = [line for line in shown if not any(words_of(line) <= words for words in lines)]
        assert missing == [], f"{command}\n{printed}"
