"""The other node: a process that does what a test says, with a kernel's client of its own."""

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


class Node:
    """Calls functions of modules in a process on a node."""

    def __init__(self, name: str) -> None:
        self.name = name
        pid = Path(f"/run/{name}.pid").read_text().strip()
        self._process = subprocess.Popen(
            [
                *("nsenter", "-t", pid, "--mount", "--uts", "--net"),
                *("env", "-C", Path(__file__).parents[3]),  # entering leaves the folder
                *(sys.executable, "-m", "tests.environments.nfs.conftest"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def begin(self, act: Callable[..., Any], *args: Any) -> None:
        """Have it call ``act``, which has to be found by its name."""
        assert self._process.stdin
        pickle.dump((act, args), self._process.stdin)
        self._process.stdin.flush()

    def end(self) -> Any:
        """Wait for what the call gives."""
        assert self._process.stdout
        result = pickle.load(self._process.stdout)
        if isinstance(result, Exception):
            raise result
        return result

    def call(self, act: Callable[..., Any], *args: Any) -> Any:
        self.begin(act, *args)
        return self.end()

    def network(self, state: str) -> None:
        """Cut it off (``down``), or connect it again (``up``), at the server's end."""
        command = ["nsenter", "-t", "1", "--net", "ip", "link", "set", self.name, state]
        subprocess.run(command, check=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def other() -> Iterator[Node]:
    node = Node("two")
    yield node
    node.kill()


def serve() -> None:
    """Do what the standard input says, and answer."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            act, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = act(*args)
        except Exception as error:
            traceback.print_exc()
            result = error
        pickle.dump(result, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
