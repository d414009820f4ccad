"""``trinity-sync config``, and what is said when a running stack has other settings."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import QUIET, environment
from tests.support.command import invoke
from trinity_sync.fs.process import read_process_identity
from trinity_sync.settings import CONFIG, Settings, StackSettings
from trinity_sync.stack import daemon, local_stack
from trinity_sync.stack.daemon import Daemon
from trinity_sync.stack.doctor import run_checks
from trinity_sync.stack.services import StackState
from trinity_sync.stack.state_file import write_state


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home of the stack that the environment names, of which nothing answers."""
    monkeypatch.setattr(daemon, "SILENT_S", 0.1)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.delitem(QUIET, "TRINITY_SYNC_STACK__WORKER__NICE")  # these change it
    with environment({"TRINITY_SYNC_HOME": str(folder)}):
        yield folder


def test_a_new_file_sets_nothing_and_names_every_default(tmp_path: Path) -> None:
    path = tmp_path / "new/trinity_sync.toml"
    assert invoke("config", "init", path).exit_code == 0
    text = path.read_text()
    assert text == invoke("config", "init").output
    changed = re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE)
    for content in (text, changed):
        path.write_text(content)
        with environment({CONFIG: str(path), "TRINITY_SYNC_STACK__SERVER__PORT": ""}):
            assert StackSettings() == StackSettings.model_construct()
    assert "did you mean port?" in _check(path, changed.replace("\nport = ", "\nprot = "))


def _check(path: Path, text: str) -> str:
    path.write_text(text)
    done = invoke("config", "show", "--config", path)
    assert done.exit_code != 0
    return str(done.output)


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "trinity_sync.toml"
    path.write_text("[server]\n")
    assert "exists" in invoke("config", "init", path).output
    assert path.read_text() == "[server]\n"


def test_show_says_where_each_value_is_from_and_no_password(tmp_path: Path) -> None:
    path = tmp_path / "trinity_sync.toml"
    path.write_text('[worker]\nnice = 5\n[catalog]\nurl = "postgresql://user:a/n@secret@host/db"\n')
    with environment({"TRINITY_SYNC_SLOTS": "3", "TRINITY_SYNC_STACK__SERVER__PORT": "5000"}):
        shown = invoke("config", "show", "--config", path, "-o", "json")
        rows = json.loads(shown.stdout)["settings"]
    found = {row["name"]: (row["value"], row["source"], row["default"]) for row in rows}
    assert found["TRINITY_SYNC_SLOTS"] == ("3", "TRINITY_SYNC_SLOTS", "2")
    assert found["server.port"] == ("5000", "TRINITY_SYNC_STACK__SERVER__PORT", "4200")
    assert found["worker.nice"] == ("5", str(path), "10")
    assert found["server.keep_events"] == ("6h", "default", "6h")
    assert found["catalog.url"][0] == "postgresql://user:***@host/db"


def test_a_command_reads_the_file_that_its_option_names(tmp_path: Path) -> None:
    path = tmp_path / "trinity_sync.toml"
    path.write_text("[server]\nprot = 1\n")
    for command in ("up", "deploy", "worker"):
        with environment({}):
            done = invoke(command, "--config", path)
        assert done.exit_code != 0
        assert "unknown key prot in [server]" in done.output


def running(settings: StackSettings) -> StackState:
    """A stack whose worker is this process, and whose server is away."""
    worker = Daemon(read_process_identity(os.getpid()), "worker.log")
    recorded = settings.model_dump(mode="json")
    return StackState(api_url="http://127.0.0.1:9/api", settings=recorded, worker=worker)


def test_a_running_stack_with_other_settings_is_said_and_what_applies_them(home: Path) -> None:
    recorded = StackSettings(catalog={"url": "postgresql://user:secret@host/db"})
    state = running(recorded)
    write_state(home, state)
    named = {
        "TRINITY_SYNC_STACK__WORKER__NICE": "5",
        "TRINITY_SYNC_STACK__CATALOG__URL": "postgresql://user:secret@host/other",
    }
    assert local_stack.find_changes(state, recorded) == ()
    with environment({"TRINITY_SYNC_HOME": str(home), **named}):
        assert local_stack.status(Settings()).changed == (
            "worker.nice: 10, now 5",
            "catalog.url: postgresql://user:***@host/db, now postgresql://user:***@host/other",
        )
        output = invoke("status").output
        check = next(check for check in run_checks(Settings()) if check.name == "settings")
    assert "worker.nice: 10, now 5" in output
    assert "trinity-sync restart" in output
    assert (check.state, check.todo) == ("warn", "apply them: trinity-sync restart")


def test_settings_are_compared_with_the_file_that_up_was_given(home: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "trinity_sync.toml", tmp_path / "other.toml"
    path.write_text("[worker]\nnice = 5\n")
    other.write_text("[worker]\nnice = 7\n")
    state = replace(running(StackSettings(worker={"nice": 5})), config=str(path))
    write_state(home, state)
    with environment({"TRINITY_SYNC_HOME": str(home), CONFIG: ""}):
        assert (
            local_stack.find_changes(local_stack.read_state(Settings().home) or StackState()) == ()
        )
        assert "trinity-sync restart" not in invoke("status").output
        path.write_text("[worker]\nnice = 6\n")
        assert local_stack.find_changes(state) == ("worker.nice: 5, now 6",)
        path.write_text("[worker]\nniec = 6\n")
        refused = invoke("restart")
        assert (refused.exit_code, "unknown key niec in [worker]" in refused.output) == (2, True)
        assert local_stack.read_state(Settings().home) == state
        assert not os.environ.get(CONFIG)
    with environment({CONFIG: str(other)}):
        assert local_stack.find_changes(state) == ("worker.nice: 5, now 7",)


def test_a_stack_that_does_not_run_has_no_settings_to_keep(home: Path) -> None:
    ended = Daemon("999999999/1.0", "worker.log")
    write_state(home, replace(running(StackSettings()), worker=ended))
    with environment(
        {"TRINITY_SYNC_HOME": str(home), "TRINITY_SYNC_STACK__WORKER__POOL": "another"}
    ):
        found = local_stack.status(Settings())
    assert (found.changed, found.pool) == ((), "another")


def test_a_file_that_became_invalid_hides_no_status(home: Path, tmp_path: Path) -> None:
    write_state(home, running(StackSettings()))
    path = tmp_path / "trinity_sync.toml"
    path.write_text("[server]\nprot = 1\n")
    with environment({"TRINITY_SYNC_HOME": str(home), CONFIG: str(path)}):
        (said,) = local_stack.status(Settings()).changed
    assert "unknown key prot" in said
