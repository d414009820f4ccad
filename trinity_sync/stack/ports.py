"""Ports for servers that are told theirs before they start."""

import random
import socket
from collections.abc import Iterator
from pathlib import Path

from trinity_sync.errors import StackError

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
CANDIDATES = 5000
"""How many ports next below those of outgoing connections are taken into account."""
LOWEST = 1024
"""Those below are root's."""


def free_port(preferred: str = "", host: str = "127.0.0.1") -> int:
    """A port of ``host`` that nobody listens at; that of the URL ``preferred`` if possible.

    It is not one of those that the kernel gives to outgoing connections, if others are left: of
    those, any process may be given it before the server listens there.

    Raises:
        StackError: all are taken, or the host is not this machine.
    """
    for port in _candidates(preferred):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise StackError(
        f"no port of {host} is free for a server, or it is no address of this machine; end some "
        "that listen there (ss -ltnp lists them), or correct TRINITY_SYNC_HOST"
    )


def _candidates(preferred: str) -> Iterator[int]:
    wanted = preferred.removesuffix("/api").rpartition(":")[2]
    if wanted.isdigit():
        yield int(wanted)
    end = int(RANGE.read_text().split()[0])
    others = range(max(LOWEST, end - CANDIDATES), end)
    # not by the process's own generator, which a training may have seeded like any other
    yield from random.SystemRandom().sample(others, len(others))
    yield 0
