"""A reader without Ray and Prefect, in a process: ``python -m tests.support.without_ray ROOT``.

For each line that it is sent it waits for a newer version, loads it, and says what it has.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

REFUSED = ("ray", "prefect")


def follow(root: str) -> None:
    sys.modules.update(dict.fromkeys(REFUSED))  # to import one raises ModuleNotFoundError
    import asyncio

    from tests.support.weights import digest
    from trinity_sync.weights.reader import WeightReader

    with WeightReader(root=root, name="explorer") as reader:
        for _ in sys.stdin:
            print("waits", flush=True)
            version = asyncio.run(reader.wait_newer(timeout_s=60))
            weights = dict(reader.iter_weights(version))
            at = reader.version
            assert at is not None
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
    command = [sys.executable, "-m", "tests.support.without_ray", str(root)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield Follower(process.stdin, process.stdout)
            process.stdin.close()
            assert process.wait(30) == 0
        finally:
            process.kill()


if __name__ == "__main__":
    follow(sys.argv[1])
