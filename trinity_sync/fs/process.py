"""The identity of a process: its pid and start time, which no later process has."""

import socket
from pathlib import Path


def process_name(pid: int) -> str:
    """``pid/start time``: unlike a pid alone, never another process later on.

    Raises:
        ProcessLookupError: there is no such process, or it has ended and nobody waited for it yet.
    """
    fields = process_fields(pid)
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return f"{pid}/{fields[19]}"


def process_home() -> str:
    """Where a process of this one's `process_name` can be looked for: ``host/pid:[namespace]``.

    Containers may have a host name in common, and each see no process but their own.
    """
    return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').readlink()}"


def process_fields(pid: int) -> list[str]:
    """What ``/proc/{pid}/stat`` says of a process, from its state on.

    Raises:
        ProcessLookupError: there is no such process.
        PermissionError: it is another user's, and hidden (``hidepid`` of ``/proc``).
    """
    try:
        # the command, in parentheses, may hold any bytes: the process names itself, and the kernel
        # cuts that after 15 of them
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
        return fields.decode("ascii").split()
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {pid}") from error


def process_lives(name: str) -> bool:
    """Whether the process of that name (`process_name`) still runs on this node.

    One that is hidden counts as running: there is one of its pid.
    """
    pid, _, _ = name.partition("/")
    if not (pid.isascii() and pid.isdigit()):
        return False  # no name of a process
    try:
        return process_name(int(pid)) == name
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
