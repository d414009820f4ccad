"""Ports of servers: free ports, which no outgoing connection is given meanwhile."""

import random
import socket
from pathlib import Path

import pytest

from trinity_sync.errors import StackError
from trinity_sync.stack import daemon
from trinity_sync.stack.daemon import free_port


def test_a_port_is_free_and_not_one_that_outgoing_connections_get() -> None:
    first = int(daemon.RANGE.read_text().split()[0])
    assert 1024 <= free_port() < first


def test_processes_that_are_seeded_alike_do_not_ask_for_the_same_ports() -> None:
    found = set()
    for _ in range(20):
        random.seed(0)
        found.add(free_port())
    assert len(found) > 1


def test_the_port_of_an_earlier_server_is_taken_again_unless_another_process_listens_there() -> (
    None
):
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    assert free_port(url) == port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert free_port(url) != port


def test_a_port_that_is_wanted_is_taken_or_the_next_one_that_is_free() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        found = free_port(first=taken)
        assert taken < found < taken + daemon.FOLLOWING
        assert free_port(f"http://127.0.0.1:{found}/api", first=taken) == found
    assert free_port(first=taken) == taken
    elsewhere = f"http://127.0.0.1:{taken + 2 * daemon.FOLLOWING}/api"
    assert free_port(elsewhere, first=taken) == taken


def test_where_all_ports_are_for_outgoing_connections_it_is_one_of_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = tmp_path / "ip_local_port_range"
    everything.write_text("1024\t65535\n")
    monkeypatch.setattr(daemon, "RANGE", everything)
    assert free_port() >= 1024


def test_where_no_port_is_free_it_says_so_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(daemon, "_candidates", lambda *_: [other.getsockname()[1]])
        with pytest.raises(StackError, match=r"no port of 127\.0\.0\.1 is free .* end some"):
            free_port()
