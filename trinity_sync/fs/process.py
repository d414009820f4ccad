"""Identity of a process: its pid and start time, which no later process has."""

import os
import socket
from pathlib import Path

from trinity_sync.layout import parse_number


def read_process_identity(pid: int) -> str:
    """Return ``pid/start time``, which unlike a pid is never reused.

    The time is in clock ticks since the boot: psutil's, in seconds since the epoch, changes when
    the clock is set.

    Raises:
        ProcessLookupError: the process does not exist, or is a zombie.
        PermissionError: it belongs to another user and is hidden (``hidepid`` of ``/proc``).
    """
    import psutil  # takes 8 ms, so not when the client is imported

    try:
        if psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            raise ProcessLookupError(f"process {pid} has ended")
        while True:
            booted_at = psutil.boot_time()
            since_boot = psutil.Process(pid).create_time() - booted_at
            if psutil.boot_time() == booted_at:  # otherwise the clock was set meanwhile
                return f"{pid}/{round(since_boot * os.sysconf('SC_CLK_TCK'))}"
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"no process {pid}") from error
    except psutil.AccessDenied as error:
        raise PermissionError(f"process {pid} is hidden") from error


def read_process_namespace() -> str:
    """Return the machine and pid namespace in which this process's identity is valid.

    It is ``host/boot/pid:[namespace]``: machines may share a host name, and the first namespace has
    the same number on each of them; containers of a machine see only their own processes.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"


def is_process_alive(name: str) -> bool:
    """Return whether a process still runs on this node; a hidden process counts as running.

    ``name`` is its identity, as from `read_process_identity`.
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
