"""Python programs and the command that run in processes of their own, as ``python -c`` does.

They are forked from a process that has imported torch and the client, which takes a core seconds.
"""

import multiprocessing.forkserver
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ForkServer
from pathlib import Path

import pytest

PRELOADED = (
    *("torch.distributed", "trinity_sync.client.coordinator", "trinity_sync.cli.commands"),
    *("psutil", "certifi", "httpx"),
)
_servers: dict[tuple[str, ...], ForkServer] = {}


@contextmanager
def forking(*preloaded: str) -> Iterator[ForkServerContext]:
    """Starts the processes of the block from one that has imported these modules.

    multiprocessing has one such process, which has what its first user asked for.
    """
    server = _servers.setdefault(preloaded, ForkServer())
    server.set_forkserver_preload(["tests.support.preloading"])
    with pytest.MonkeyPatch.context() as patch:
        with pytest.MonkeyPatch.context() as start:  # Python 3.11 does not tell it the path
            start.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            start.setenv("PRELOADED", " ".join(preloaded))
            server.ensure_running()
        patch.setattr(
            multiprocessing.forkserver, "connect_to_new_process", server.connect_to_new_process
        )
        yield multiprocessing.get_context("forkserver")


class Program:
    """A program that runs; what it prints is read once it has ended, or meanwhile if it talks."""

    def __init__(
        self,
        script: str,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        talks: bool = False,
        preloaded: Sequence[str] = PRELOADED,
    ) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self._said = Path(file.name)
        argv = ["-c", *map(str, arguments)]
        given = dict(os.environ if env is None else env)
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3 if talks else 0)]
        if talks:
            self.stdin, self.stdout, self.stderr = (
                os.fdopen(os.dup(pipe[at].fileno()), mode)
                for pipe, at, mode in zip(pipes, (1, 0, 0), "wrr", strict=True)
            )
        its = [pipe[at] for pipe, at in zip(pipes, (0, 1, 1), strict=False)]
        with forking(*preloaded) as context:
            self._process = context.Process(
                target=_run, args=(script, argv, given, self._said, its)
            )
            self._process.start()
        for end in chain.from_iterable(pipes):
            end.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()

    def end(self, code: int = 0, *, timeout: float = 250) -> str:
        """Wait until it has ended with this exit code; return what it has printed."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        said = self._said.read_text()
        self._said.unlink()
        assert self._process.exitcode == code, said
        return said

    def clear(self) -> None:
        """Kill it, if it runs, and close what it talked through."""
        self._process.kill()
        self._process.join()
        self._said.unlink(missing_ok=True)
        for pipe in (self.stdin, self.stdout, self.stderr):
            with suppress(BrokenPipeError):
                pipe.close()


def _run(
    script: str, argv: list[str], environment: dict[str, str], said: Path, pipes: list[Connection]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    if pipes:
        for descriptor, pipe in enumerate(pipes):
            os.dup2(pipe.fileno(), descriptor)
            pipe.close()
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    else:
        sys.stdout = said.open("w")
    try:
        exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        raise


def run_command(
    *arguments: object, env: Mapping[str, str], timeout: float = 250
) -> subprocess.CompletedProcess[str]:
    """Run ``trinity-sync``; return its exit code and what it has printed."""
    argv = [*map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        with forking(*PRELOADED) as context:
            process = context.Process(target=_run_command, args=(argv, dict(env), files))
            process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(argv, timeout)
        said = [file.read_text() for file in files]
    return subprocess.CompletedProcess(argv, process.exitcode, *said)


def _run_command(argv: list[str], environment: dict[str, str], files: list[Path]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, file in enumerate(files, 1):
        with file.open("w") as opened:
            os.dup2(opened.fileno(), descriptor)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115

    from trinity_sync import cli

    sys.argv = [str(Path(cli.__file__).with_name("__main__.py")), *argv]
    cli.main()
