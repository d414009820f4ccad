"""Python programs that run in processes of their own, as ``python -c`` does.

They are forked from a process that has imported torch and the client, which takes a core seconds.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest


class Program:
    """A program that runs; what it prints is read once it has ended."""

    def __init__(self, script: str, *arguments: object, env: Mapping[str, str] | None = None):
        context = multiprocessing.get_context("forkserver")
        # a process has one server, which the first call in it has started
        context.set_forkserver_preload(["torch.distributed", "trinity_sync.client.coordinator"])
        with pytest.MonkeyPatch.context() as patch:  # Python 3.11 does not tell it the path
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            ensure_running()
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self._said = Path(file.name)
        argv = ["-c", *map(str, arguments)]
        given = dict(os.environ if env is None else env)
        self._process = context.Process(target=_run, args=(script, argv, given, self._said))
        self._process.start()

    def end(self, code: int = 0, *, timeout: float = 120) -> str:
        """Wait until it has ended with this exit code; return what it has printed."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        said = self._said.read_text()
        self._said.unlink()
        assert self._process.exitcode == code, said
        return said


def _run(script: str, argv: list[str], environment: dict[str, str], said: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    with said.open("w") as sys.stdout:
        try:
            exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            raise
        finally:
            sys.stdout = sys.__stdout__
