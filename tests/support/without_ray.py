"""A reader without Ray and Prefect, in a process.

For each line that it is sent it waits for a newer version, loads it, and says what it has.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.support.forked import Program

REFUSED = ("ray", "prefect")
FOLLOW = """
import sys
from tests.support.without_ray import follow
follow(sys.argv[1])
"""


def follow(root: str) -> None:
    sys.modules.update(dict.fromkeys(REFUSED))  # to import one raises ModuleNotFoundError
    import asyncio

    from tests.support.weights import digest
    from trinity_sync.weights.reader import WeightReader

    with WeightReader(root=root, name="explorer") as reader:
        for _ in sys.stdin:
            print("waits", flush=True)
            version = asyncio.run(reader.wait_newer(timeout_s=250))
            weights = dict(reader.iter_weights(version))
            at = reader.version
            print(at.step, at.run, at.source, digest(weights), flush=True)


class Follower:
    """The process, as a test talks to it."""

    def __init__(self, stdin: IO[str], stdout: IO[str]) -> None:
        self._stdin, self._stdout = stdin, stdout

    def wait(self) -> None:
        """Have it wait for a version; returns when it is about to."""
        self._stdin.write("next\n")
        self._stdin.flush()
        assert self._stdout.readline() == "waits\n"

    def loaded(self) -> list[str]:
        """Step, run, source and digest of what it has loaded; waits for it."""
        return self._stdout.readline().split()


@contextmanager
def follower(root: Path, environment: dict[str, str]) -> Iterator[Follower]:
    """A reader of the job at ``root`` in a process of its own, until the end of the block."""
    process = Program(FOLLOW, root, env=environment, talks=True)
    try:
        yield Follower(process.stdin, process.stdout)
        process.stdin.close()
        process.end()
    finally:
        process.clear()
