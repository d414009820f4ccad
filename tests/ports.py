"""Ports for servers of the tests' own."""

import socket


def free_port() -> int:
    """One of the loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
