"""A training that begins without a stack hears of it at once, or does not begin."""

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import server
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.errors import PrefectApiError
from trinity_sync.settings import LOCAL_HOST, StackSettings
from trinity_sync.stack.local_stack import _with_own_address

DEPLOYMENT = "/deployments/name/save-step/save-step"
KNOWN = {DEPLOYMENT: (200, '{"id": "5f3c4e9e-52d8-4be6-9d8f-6ad0a50a7e6c"}')}
NOWHERE = "no Prefect server is known: PREFECT_API_URL is not set, and {} names none"


def start(tmp_path: Path, settings: Settings, **arguments: Any) -> None:
    CheckpointCoordinator(tmp_path / "ckpts", settings=settings, **arguments).close()


def test_one_warning_says_where_a_stack_was_looked_for_and_what_to_do(
    tmp_path: Path, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path, settings)
    start(tmp_path, settings, rank=1, world_size=2)
    (said,) = (each for each in caplog.messages if "Prefect server" in each)
    assert NOWHERE.format(settings.home / "stack.json") in said
    assert "trinity-sync up" in said
    assert str(tmp_path / "ckpts") in said


@pytest.mark.parametrize("named_by", ["variable", "state file"])
def test_a_server_that_is_named_is_not_asked_and_not_warned_of(
    tmp_path: Path,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    named_by: str,
) -> None:
    asked: list[tuple[str, str]] = []
    with server(KNOWN, asked=asked) as url:
        if named_by == "variable":
            monkeypatch.setenv("PREFECT_API_URL", url)
        else:
            settings.home.mkdir()
            (settings.home / "stack.json").write_text(json.dumps({"api_url": url}))
        start(tmp_path, settings)
    assert (asked, caplog.messages) == ([], [])


def test_a_required_stack_that_is_nowhere_is_an_error(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(PrefectApiError, match=NOWHERE.format(settings.home / "stack.json")):
        start(tmp_path, settings, require_stack=True)
    assert not (tmp_path / "ckpts").exists()


def test_a_required_stack_that_answers_is_asked_once(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    async def in_an_event_loop() -> None:
        start(tmp_path, settings, require_stack=True)

    with server(KNOWN, asked=asked) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        start(tmp_path, settings, require_stack=True)
        asyncio.run(in_an_event_loop())
        start(tmp_path, settings, require_stack=True, rank=1, world_size=2)  # rank 0 asks
    assert [path for path, _ in asked] == [DEPLOYMENT] * 2


@pytest.mark.parametrize(
    ("answers", "login", "why"),
    [
        ({DEPLOYMENT: (404, '{"detail": "Deployment not found"}')}, "", "trinity-sync deploy"),
        ({}, "", "is not the API of a Prefect server"),
        (KNOWN, "admin:pass", "the password is missing or wrong"),
    ],
)
def test_a_required_stack_that_cannot_take_saves_is_an_error(
    tmp_path: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[str, tuple[int, str]],
    login: str,
    why: str,
) -> None:
    with server(answers, login) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        with pytest.raises(PrefectApiError, match=why):
            start(tmp_path, settings, require_stack=True)


def test_a_required_stack_that_does_not_answer_is_an_error_within_seconds(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.client.saver_control.CHECK_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/api")
        began = time.monotonic()
        with pytest.raises(PrefectApiError, match=r"does not answer within 0\.5 s"):
            start(tmp_path, settings, require_stack=True)
        assert time.monotonic() - began < 10


def test_a_machine_that_joins_does_not_take_the_address_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_STACK__SERVER__HOST", "203.0.113.7")
    assert _with_own_address(StackSettings()).server.host == LOCAL_HOST
    monkeypatch.setenv("TRINITY_SYNC_STACK__SERVER__HOST", "127.0.0.3")
    assert _with_own_address(StackSettings()).server.host == "127.0.0.3"
