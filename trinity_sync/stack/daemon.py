"""Start and stop daemons: processes that outlive the process that started them.

A daemon has a session of its own, so Ctrl-C in the terminal that started it does not reach it. It
is identified by pid and start time, so a later process with the same pid is never stopped instead.
"""

import logging
import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from trinity_sync.errors import StackError
from trinity_sync.fs.process import (
    is_process_alive,
    lower_session_priority,
    lower_thread_priority,
    read_process_identity,
)

logger = logging.getLogger(__name__)

POLL_S, TELL_S = 0.25, 10.0
"""Seconds between two polls of a daemon that starts, and between two messages about it."""
SILENT_S, BUSY_S = 10.0, 60.0
"""Seconds without an answer after which a daemon hangs, and for which it may wait for a CPU."""
ERROR_LINE = re.compile(
    r"error|exception(?! occurred)|fail|timed out|cannot|refused|denied|in use", re.IGNORECASE
)  # Prefect's last line is "An exception occurred."
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_started: list[subprocess.Popen[bytes]] = []
"""Children of this process, which it must wait for: otherwise they stay as zombies."""


@dataclass(frozen=True)
class Daemon:
    """A process in a session of its own."""

    process: str
    """``pid/start time``."""
    log: str
    log_from: int = 0
    """Size of the log in bytes before this daemon started."""

    @property
    def pid(self) -> int:
        """Its process id, which is also its session id."""
        return int(self.process.partition("/")[0])

    @property
    def lives(self) -> bool:
        """Whether it still runs; a zombie process does not."""
        _reap()
        return is_process_alive(self.process)

    @property
    def started_at(self) -> float:
        """Its start time, as in ``process``."""
        return float(self.process.partition("/")[2])


def start(
    command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, fds: Sequence[int] = ()
) -> Daemon:
    """Start a daemon whose output is appended to ``log``, in a folder that only this user reads.

    It inherits the open files ``fds``.
    """
    make_private_folder(log.parent)
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
            pass_fds=fds,
        )
    _started.append(child)
    try:
        process = read_process_identity(child.pid)
    except ProcessLookupError:  # it has ended already
        process = f"{child.pid}/0"
    return Daemon(process, str(log), log_from)


def make_private_folder(folder: Path) -> None:
    """Create a folder, if it is missing, and let only this user read it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def lower_priority(daemon: Daemon, nice: int) -> None:
    """Lower the priority of a daemon and of the processes that it starts."""
    for process in find_family(daemon):
        with suppress(psutil.NoSuchProcess):  # it has ended
            for thread in process.threads():  # each has a niceness of its own
                lower_thread_priority(nice, thread.id)
    lower_session_priority(daemon.pid, nice)


def await_ready(
    service: str, daemon: Daemon, is_ready: Callable[[], object], timeout_s: float
) -> None:
    """Poll a daemon until it is ready; the time for which it waits for a CPU does not count.

    Raises:
        StackError: The daemon ended, or was not ready in time.
    """
    began = told = time.monotonic()
    while not is_ready():
        if time.monotonic() > told + TELL_S:
            told = time.monotonic()
            logger.info("waiting for %s since %.0f s: %s", service, told - began, daemon.log)
        lives, waited_s = daemon.lives, time.monotonic() - began - _read_cpu_wait(daemon)
        if not lives or waited_s > timeout_s:
            line = find_error_line(daemon)
            raise StackError(
                (
                    f"{service} was not ready within {timeout_s:g} s"
                    if lives
                    else f"{service} ended while it started"
                )
                + (f": {line}. " if line else ". ")
                + f"Its log {daemon.log} has the rest. Correct that, and start it again"
                + (", or with a longer time-out." if lives else ".")
            )
        with suppress(psutil.NoSuchProcess):
            _wait({psutil.Process(daemon.pid)}, POLL_S)
    logger.info("%s is ready", service)


def check(
    service: str, daemon: Daemon, answers: Callable[[], bool]
) -> Literal["running", "unresponsive", "dead"]:
    """Return whether a daemon answers within `SILENT_S`; its wait for a CPU does not count."""
    began, waited_s = time.monotonic(), _read_cpu_wait(daemon)
    while daemon.lives:
        if answers():
            return "running"
        past_s = time.monotonic() - began
        if past_s - (_read_cpu_wait(daemon) - waited_s) > SILENT_S:
            logger.info("%s has not answered for %.0f s: %s", service, past_s, daemon.log)
            return "unresponsive"
        if past_s > BUSY_S:  # another one would get no CPU either
            return "running"
        time.sleep(POLL_S)
    return "dead"


def _read_cpu_wait(daemon: Daemon) -> float:
    """Return the seconds for which a daemon could have run, and others had the CPUs."""
    try:
        return int(Path(f"/proc/{daemon.pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # it has ended, or the kernel does not count them
        return 0.0


def find_error_line(daemon: Daemon) -> str:
    """Return the last line of a daemon's log that looks like an error, or else its last line."""
    try:
        with Path(daemon.log).open("rb") as log:
            log.seek(max(daemon.log_from, os.fstat(log.fileno()).st_size - 65536))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in ANSI_COLOURS.sub("", text).splitlines() if line.strip()]
    found = [line for line in lines if ERROR_LINE.search(line)] or lines
    return found[-1].rstrip(".") if found else ""


def stop(daemon: Daemon, timeout_s: float) -> None:
    """Stop a daemon with SIGTERM, and kill what is left of it and of the processes it started.

    It gets SIGKILL after ``timeout_s``, and may have ended already.
    """
    deadline = time.monotonic() + timeout_s
    family = find_family(daemon)
    leader = {process for process in family if process.pid == daemon.pid}
    for process in leader or family:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
            process.resume()  # a stopped one gets the signal then
    if leader:
        _wait(leader, deadline - time.monotonic())
        family |= find_family(daemon)
    _wait(family, min(deadline - time.monotonic(), 5.0))
    for process in family | find_family(daemon):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _wait(family, 5.0)
    _reap()


def _wait(processes: set[psutil.Process], timeout_s: float) -> None:
    """Wait at most ``timeout_s`` until the processes have ended."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), 0.0)
        try:
            psutil.wait_procs(processes, left_s)
        # of pidfd_open, for one that is just being reaped (Linux 6.18), which psutil may translate
        except (FileNotFoundError, psutil.NoSuchProcess):
            if left_s:
                continue
        return


def find_family(daemon: Daemon) -> set[psutil.Process]:
    """Return the living processes of a daemon's session, and their descendants in other sessions.

    ``Process.children`` fails where the kernel hides other users' processes (``hidepid``).
    """
    leader = _read_start(daemon.pid)
    if leader is not None and leader != daemon.started_at:
        return set()  # the pid was reused, so no process of that session is left
    processes = {each.pid: each for each in psutil.process_iter(["ppid"])}
    members = {pid for pid in processes if _read_session(pid) == daemon.pid}
    found: set[int] = set()
    while found != members:
        found = set(members)
        members |= {pid for pid, each in processes.items() if each.info["ppid"] in found}
    return {processes[pid] for pid in members if (_read_start(pid) or 0.0) >= daemon.started_at}


def list_addresses(pid: int) -> list[tuple[str, int]]:
    """Return where a process listens; nothing if it has ended."""
    found = psutil.net_connections("tcp")
    return [
        tuple(each.laddr) for each in found if each.pid == pid and each.status == psutil.CONN_LISTEN
    ]


def _read_start(pid: int) -> float | None:
    """Return the start time of a process; None if it has ended or is hidden."""
    try:
        return float(read_process_identity(pid).partition("/")[2])
    except (ProcessLookupError, PermissionError):
        return None


def _read_session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _reap() -> None:
    _started[:] = [child for child in _started if child.poll() is None]


RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
CANDIDATES = 5000
"""Number of ports to choose from, directly below those of outgoing connections."""
FOLLOWING = 100
"""Number of ports that are tried from the first one on."""
LOWEST = 1024
"""Lower ports are reserved for root."""


def is_own_address(host: str) -> bool:
    """Return whether a host name or address is one of this machine."""
    with suppress(OSError), socket.socket() as probe:
        probe.bind((host, 0))
        return True
    return False


def free_port(preferred: str = "", host: str = "127.0.0.1", *, first: int = 0) -> int:
    """Return a free port: that of the URL ``preferred``, ``first`` or one after it, or any.

    With ``first``, ``preferred`` counts only if it is one of the `FOLLOWING` ports from there on.
    The kernel's ports for outgoing connections are the last choice, because another process may get
    the port before the server listens there.

    Raises:
        StackError: All ports are in use, or the host is not this machine.
    """
    for port in _candidates(preferred, first):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise StackError(
        f"no port of {host} is free for a server, or it is no address of this machine; end some "
        "that listen there (ss -ltnp lists them), or correct host in [server]"
    )


def _candidates(preferred: str, first: int) -> Iterator[int]:
    wanted = preferred.removesuffix("/api").rpartition(":")[2]
    following = range(first, min(first + FOLLOWING, 65536)) if first else range(0)
    if wanted.isdigit() and (not first or int(wanted) in following):
        yield int(wanted)
    yield from following
    end = int(RANGE.read_text().split()[0])
    others = range(max(LOWEST, end - CANDIDATES), end)
    # a training may seed the global random generator in the same way everywhere
    yield from random.SystemRandom().sample(others, len(others))
    yield 0
