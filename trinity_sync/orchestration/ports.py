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


def free_port(preferred: str = "") -> int:
    """A port of the loopback that nobody listens at; that of the URL ``preferred`` if possible.

    It is not one of those that the kernel gives to outgoing connections, if others are left: of
    those, any process may be given it before the server listens there.

    Raises:
        StackError: all are taken.
    """
    for port in _candidates(preferred):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise StackError(
        "no port of 127.0.0.1 is free for a server; end some that listen there (ss -ltnp lists "
        "them), and try again"
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
