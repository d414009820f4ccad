"""Processes that outlive the process that started them, and can be stopped by another one later.

A daemon has a session of its own, so Ctrl-C in the terminal from which it was started does not
reach it. It is known by pid and start time, so another process with the same pid is never taken for
it.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from trinity_sync.errors import StackError
from trinity_sync.fs.process import is_process_alive, read_process_identity

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
        return is_process_alive(self.process)

    @property
    def began(self) -> float:
        """Its start time, as in its name."""
        return float(self.process.partition("/")[2])


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
    return Daemon(read_process_identity(child.pid), str(log), log_from)


def make_private(folder: Path) -> None:
    """Let nobody else look into a folder of the stack's, which is made if it is missing."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def lower_priority(daemon: Daemon, nice: int) -> None:
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
                    + f"Its log {daemon.log} has the rest. Correct that, and start it again."
                )
            late = time.monotonic() > deadline
            with suppress(psutil.NoSuchProcess):
                _await_end([psutil.Process(daemon.pid)], POLL_S)
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
    """End a daemon and all processes that it started: SIGTERM to it, SIGKILL to what is left.

    Does nothing for a daemon that has ended and has left nothing behind.

    Args:
        daemon: the daemon.
        timeout_s: seconds until SIGKILL.
    """
    deadline = time.monotonic() + timeout_s
    family = _find_family(daemon)
    leader = {process for process in family if process.pid == daemon.pid}
    for process in leader or family:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    if leader:
        _await_end(leader, deadline - time.monotonic())
        family |= _find_family(daemon)
    _await_end(family, min(deadline - time.monotonic(), 5.0))
    for process in family | _find_family(daemon):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _await_end(family, 5.0)
    _reap()


def _find_family(daemon: Daemon) -> set[psutil.Process]:
    """Return the living processes of a daemon's session, and their descendants in other sessions.

    ``Process.children`` fails where the kernel hides other users' processes (``hidepid``).
    """
    leader = _read_start(daemon.pid)
    if leader is not None and leader != daemon.began:
        return set()  # the pid is another process's by now, so nothing of that session is left
    processes = {each.pid: each for each in psutil.process_iter(["ppid"])}
    members = {pid for pid in processes if _read_session(pid) == daemon.pid}
    found: set[int] = set()
    while found != members:
        found = set(members)
        members |= {pid for pid, each in processes.items() if each.info["ppid"] in found}
    return {processes[pid] for pid in members if (_read_start(pid) or 0.0) >= daemon.began}


def _read_start(pid: int) -> float | None:
    """Return the start time of a process, as in its name; None if it has ended or is hidden."""
    try:
        return float(read_process_identity(pid).partition("/")[2])
    except (ProcessLookupError, PermissionError):
        return None


def _read_session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _await_end(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """Wait until all processes have ended, or the time is over."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
            process.wait(max(deadline - time.monotonic(), 0.0))


def _reap() -> None:
    _started[:] = [child for child in _started if child.poll() is None]
