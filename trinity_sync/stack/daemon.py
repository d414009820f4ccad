"""Processes that outlive whoever started them, and can be stopped by somebody else later.

A daemon has a session of its own, so that Ctrl-C in the terminal it was started from does not
reach it, and is known by pid and start time, so that a stranger with the same pid is never
mistaken for it.
"""

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from trinity_sync.errors import StackError
from trinity_sync.fs.process import process_name, process_start

POLL_S = 0.1
TELLING = re.compile(r"error|exception|fail|timed out|cannot|refused|denied|in use", re.IGNORECASE)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_started: list[subprocess.Popen[bytes]] = []
"""Children of this process; they must be waited for, or they stay behind as zombies."""


@dataclass(frozen=True)
class Daemon:
    """A process in a session of its own."""

    process: str
    """``pid/start time``."""
    log: str
    """File that it writes its output to."""
    log_from: int = 0
    """Bytes that were in it before this daemon."""

    @property
    def pid(self) -> int:
        """Its process id, which is the id of its session too."""
        return int(self.process.partition("/")[0])

    @property
    def lives(self) -> bool:
        """Whether it still runs; a zombie does not."""
        _reap()
        found = _look(self.pid)
        return found is not None and not found.dead and found.started == self.began

    @property
    def began(self) -> int:
        """Its start time, in clock ticks since the machine started."""
        return int(self.process.partition("/")[2])


def start(command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> Daemon:
    """Start a daemon; its output is appended to ``log``, in a folder that is this user's alone."""
    make_private(log.parent)
    with log.open("ab") as output:
        log_from = output.tell()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    _started.append(child)
    return Daemon(process_name(child.pid), str(log), log_from)


def make_private(folder: Path) -> None:
    """Let nobody else look into a folder of the stack's, which is made if it is missing."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def yield_to_others(daemon: Daemon, nice: int) -> None:
    """Lower the priority of a daemon that has just started, and so of all that it will start."""
    if nice > os.getpriority(os.PRIO_PROCESS, daemon.pid):
        os.setpriority(os.PRIO_PROCESS, daemon.pid, nice)


class Patience:
    """Seconds that several waits have together, and what took how many of them."""

    def __init__(self, timeout_s: float) -> None:
        self._began = time.monotonic()
        self._took: list[tuple[str, float]] = []
        self.deadline = self._began + timeout_s
        """Of `time.monotonic`."""

    @property
    def left(self) -> float:
        """Seconds until the deadline, not negative."""
        return max(self.deadline - time.monotonic(), 0.0)

    @contextmanager
    def spent_on(self, what: str) -> Iterator[None]:
        """Count what a block takes under the name ``what``."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._took.append((what, time.monotonic() - began))

    def in_words(self) -> str:
        """Such as ``181 s since the start: the Prefect server 95 s, the Ray node 86 s``."""
        took = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in self._took)
        return f"{time.monotonic() - self._began:.0f} s since the start: {took}"


def await_ready(
    what: str,
    daemon: Daemon,
    ready: Callable[[], bool],
    patience: Patience,
    *,
    at_least_s: float = 0.0,
) -> None:
    """Ask ``ready`` until it says so.

    Args:
        what: the daemon, as a message names it.
        daemon: who is waited for.
        ready: asked again and again.
        patience: how long; what this wait takes is counted there.
        at_least_s: seconds that it gets, whatever others have left of the patience.

    Raises:
        StackError: the daemon ended, or was not ready in time.
    """
    deadline = max(patience.deadline, time.monotonic() + at_least_s)
    late = False
    with patience.spent_on(what):
        while not late and not ready():
            if not daemon.lives:
                last = telling_line(daemon)
                raise StackError(
                    f"{what} ended while it started"
                    + (f": {last}. " if last else ". ")
                    + f"Its log {daemon.log} has the rest. Mend that, and start it again."
                )
            late = time.monotonic() > deadline
            _await_end([daemon.pid], POLL_S)
    if late:
        raise StackError(
            f"{what} was not ready in time ({patience.in_words()}). Look into its log "
            f"{daemon.log}, or try again with a longer time-out."
        )


def telling_line(daemon: Daemon) -> str:
    """The last line of a daemon's output that speaks of an error, else its last one, or ""."""
    try:
        with Path(daemon.log).open("rb") as log:
            log.seek(max(daemon.log_from, os.fstat(log.fileno()).st_size - 65536))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in COLOURS.sub("", text).splitlines() if line.strip()]
    found = [line for line in lines if TELLING.search(line)] or lines
    return found[-1].rstrip(".") if found else ""


def stop(daemon: Daemon, timeout_s: float) -> None:
    """End the daemon and all that it started: SIGTERM to it, SIGKILL to what is left.

    Does nothing for a daemon that is gone and has left nothing behind.
    """
    deadline = time.monotonic() + timeout_s
    family = set(_family(daemon))
    if daemon.lives:
        _signal([daemon.pid], signal.SIGTERM)
        _await_end([daemon.pid], deadline - time.monotonic())
        family |= set(_family(daemon))
    else:
        _signal(family, signal.SIGTERM)
    _await_end(family, min(deadline - time.monotonic(), 5.0))
    _signal(family | set(_family(daemon)), signal.SIGKILL)
    _await_end(family, 5.0)
    _reap()


@dataclass(frozen=True)
class _Process:
    parent: int
    session: int
    started: int
    dead: bool


def _family(daemon: Daemon) -> Iterator[int]:
    """Living processes of the daemon's session, and their descendants in sessions of their own."""
    processes = _processes()
    leader, began = daemon.pid, daemon.began
    if leader in processes and processes[leader].started != began:
        return  # somebody else's pid by now, so nothing of that session is left
    members = {pid for pid, entry in processes.items() if entry.session == leader}
    found: set[int] = set()
    while found != members:
        found = set(members)
        members |= {pid for pid, entry in processes.items() if entry.parent in found}
    for pid in members:
        if not processes[pid].dead and processes[pid].started >= began:
            yield pid


def _processes() -> dict[int, _Process]:
    return {pid: found for pid in psutil.pids() if (found := _look(pid))}


def _look(pid: int) -> _Process | None:
    try:
        process = psutil.Process(pid)
        dead = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return _Process(process.ppid(), os.getsid(pid), process_start(pid), dead)
    except (psutil.Error, ProcessLookupError):  # gone, or another user's and hidden
        return None


def _signal(pids: Sequence[int] | set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _await_end(pids: Sequence[int] | set[int], timeout_s: float) -> None:
    """Until all of them have ended, or the time is over."""
    deadline = time.monotonic() + timeout_s
    with ExitStack() as closing:
        poll = select.poll()
        waiting = set()
        for pid in pids:
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                closing.callback(os.close, handle)
                poll.register(handle, select.POLLIN)
                waiting.add(handle)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for handle, _ in poll.poll(left * 1000):
                poll.unregister(handle)
                waiting.discard(handle)


def _reap() -> None:
    _started[:] = [child for child in _started if child.poll() is None]
