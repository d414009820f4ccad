"""Commands with a Prefect server that accepts connections, never answers, and has a password."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trinity_sync.cli.commands import app
from trinity_sync.client import prefect_connection
from trinity_sync.client.init_root import open_root


@pytest.fixture
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://user:secret@127.0.0.1:{silent.getsockname()[1]}/api"


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["status", "-o", "json"],
        ["ui", "--no-open"],
        ["report", "ROOT", "-o", "json"],
        ["reconcile", "ROOT"],
    ],
    ids=" ".join,
)
def test_a_command_ends_and_shows_no_password(
    root: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(prefect_connection, "ANSWER_S", 0.2)
    env = {
        "TRINITY_SYNC_HOME": str(tmp_path / "home"),
        "TRINITY_SYNC_SPOOL": str(tmp_path / "spool"),
        "PREFECT_API_URL": url,
    }
    open_root(root)
    arguments = [str(root) if word == "ROOT" else word for word in command]
    done = CliRunner().invoke(app, arguments, env=env)
    assert done.exit_code in (0, 3, 4), done.output
    assert "secret" not in done.output
