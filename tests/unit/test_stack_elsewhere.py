"""A stack whose server and Ray are somebody else's, and do not answer."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import environment
from trinity_sync.errors import StackError
from trinity_sync.orchestration import stack
from trinity_sync.settings import Settings


@pytest.fixture
def listening() -> Iterator[int]:
    """A port at which something takes calls, and says nothing."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made.getsockname()[1]


def test_what_does_not_answer_is_away(listening: int, tmp_path: Path) -> None:
    named = {"PREFECT_API_URL": "http://127.0.0.1:9/api", "RAY_ADDRESS": f"127.0.0.1:{listening}"}
    with environment(named):
        found = stack.status(Settings(home=tmp_path))
    assert [part.state for part in found.parts] == ["away", "external", "absent"]
    assert "cannot be reached" in found.problem


def test_up_waits_no_longer_than_it_was_told_to(listening: int, tmp_path: Path) -> None:
    address = f"127.0.0.1:{listening}"
    named = {"PREFECT_API_URL": f"http://{address}/api", "RAY_ADDRESS": address}
    settings = Settings(home=tmp_path / "home", spool=tmp_path / "spool")
    with environment(named), pytest.raises(StackError, match=f"at http://{address}/api in time"):
        stack.up(settings, timeout_s=0.5)
    assert stack.find(settings) is None
