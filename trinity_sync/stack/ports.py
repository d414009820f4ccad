"""Find free ports for servers that need theirs before they start."""

import random
import socket
from collections.abc import Iterator
from pathlib import Path

from trinity_sync.errors import StackError

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
CANDIDATES = 5000
"""Number of ports to choose from, directly below those of outgoing connections."""
FOLLOWING = 100
"""Number of ports that are tried from the first one on."""
LOWEST = 1024
"""Lower ports are reserved for root."""


def is_own_address(host: str) -> bool:
    """Return whether a host name or address is one of this machine."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


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
