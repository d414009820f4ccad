"""The identity of a process: its pid and the time of its start, which no later process has."""

import os
import socket
from pathlib import Path

from trinity_sync.layout import parse_number


def read_process_identity(pid: int) -> str:
    """Return ``pid/start time``: unlike a pid alone, never another process later on.

    The time is in clock ticks since the boot.

    Raises:
        ProcessLookupError: there is no such process, or it has ended and nobody waited for it yet.
        PermissionError: it is another user's, and hidden (``hidepid`` of ``/proc``).
    """
    import psutil  # 8 ms, which importing the client need not take

    try:
        if psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            raise ProcessLookupError(f"process {pid} has ended")
        return f"{pid}/{read_process_start(pid)}"
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"no process {pid}") from error
    except psutil.AccessDenied as error:
        raise PermissionError(f"process {pid} is hidden") from error


def read_process_start(pid: int) -> int:
    """Return when a process started, in clock ticks since the boot.

    psutil says it in seconds since the epoch, which change when the clock is set.

    Raises:
        psutil.Error: there is no such process, or it is hidden.
    """
    import psutil

    while True:
        booted_at = psutil.boot_time()
        since_boot = psutil.Process(pid).create_time() - booted_at
        if psutil.boot_time() == booted_at:  # else the clock was set meanwhile
            return round(since_boot * os.sysconf("SC_CLK_TCK"))


def read_process_namespace() -> str:
    """Return where a process of this one's `read_process_identity` can be looked for.

    It is ``host/pid:[namespace]``: containers may have a host name in common, and each see no
    process but their own.
    """
    return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').readlink()}"


def is_process_alive(name: str) -> bool:
    """Return whether a process still runs on this node; a hidden one counts as running.

    Args:
        name: of the process, as `read_process_identity` returns it.
    """
    pid = parse_number(name.partition("/")[0])
    if pid is None:
        return False
    try:
        return read_process_identity(pid) == name
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
