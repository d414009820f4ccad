"""A stack whose server and Ray are run by others, and do not answer."""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch

from tests.conftest import environment
from tests.support.answers import server
from tests.support.job import Job
from tests.support.savers import await_that, end_savers
from trinity_sync.cli.output import to_json
from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.save_trigger import SaveTrigger
from trinity_sync.errors import StackError
from trinity_sync.settings import Settings, StackSettings, default_home
from trinity_sync.stack import embedded
from trinity_sync.stack.services import StackState, is_server_ready


@pytest.fixture
def listening() -> Iterator[int]:
    """A port at which something takes calls, and says nothing."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made.getsockname()[1]


def test_what_does_not_answer_is_away(listening: int, tmp_path: Path) -> None:
    named = {
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "TRINITY_SYNC_STACK__RAY__ADDRESS": f"127.0.0.1:{listening}",
    }
    with environment(named):
        found = embedded.status(Settings(home=tmp_path))
    assert [part.state for part in found.services[:3]] == ["away", "external", "absent"]
    assert "no Prefect server can be reached at http://127.0.0.1:9" in found.reason


def test_the_server_is_asked_with_the_password_of_its_url_which_status_does_not_show(
    tmp_path: Path,
) -> None:
    answers = {"/flow_runs/count": (200, "3"), "/deployments/filter": (200, "[]")}
    with server(answers, login="me:secret") as url:
        named = url.replace("//", "//me:secret@")
        with environment({"PREFECT_API_URL": named}):
            found = embedded.status(Settings(home=tmp_path))
    assert (found.waiting_runs, found.reason, found.services[0].url) == (3, "", url)
    assert "secret" not in json.dumps(to_json(found))


def test_up_waits_no_longer_than_it_was_told_to(listening: int, tmp_path: Path) -> None:
    address = f"127.0.0.1:{listening}"
    named = {
        "PREFECT_API_URL": f"http://{address}/api",
        "TRINITY_SYNC_STACK__RAY__ADDRESS": address,
    }
    with environment(named):
        settings = Settings(home=tmp_path / "home", spool=tmp_path / "spool")
    with (
        environment(named),
        pytest.raises(StackError, match=f"at http://{address}/api within 0.5 s"),
    ):
        embedded.up(settings, worker=False, timeout_s=0.5)
    assert embedded.find(settings) is None


def test_what_the_environment_names_instead_of_the_stacks_part_is_said(
    listening: int, tmp_path: Path
) -> None:
    ours, theirs = "127.0.0.1:9", f"127.0.0.1:{listening}"
    state = {"ray_address": ours, "server": None, "ray": None, "worker": None}
    (tmp_path / "stack.json").write_text(json.dumps(state))
    for named, differs in ((theirs, True), (ours, False), ("", False)):
        with environment({"TRINITY_SYNC_STACK__RAY__ADDRESS": named}):
            sentences = embedded.status(Settings(home=tmp_path)).overrides
        assert len(sentences) == differs
        assert all(theirs in sentence and ours in sentence for sentence in sentences)


def test_env_without_a_stack_fails_in_eval(tmp_path: Path) -> None:
    line = f'eval "$({sys.executable} -m trinity_sync.cli env)"'
    env = os.environ | {
        "TRINITY_SYNC_HOME": str(tmp_path),
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
    }
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: no stack runs\nhint: trinity-sync up\n"


def test_a_trainer_whose_address_is_no_prefect_server_says_which_it_asked(
    job: Job, spool_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    not_deployed = {"/deployments/name": (404, '{"detail": "Deployment not found"}')}
    cases = (({}, "is not the API of a Prefect server"), (not_deployed, "run: trinity-sync deploy"))
    for answers, said in cases:
        with server(answers) as url, caplog.at_level(logging.WARNING):
            settings = Settings(home=tmp_path, spool=spool_folder)
            watcher = CommitWatcher(SaveTrigger(settings, url), job.spool)
            job.stage(1, {"model": {"w": torch.zeros(3)}})
            watcher.follow(job.request(1, components=("model",)), submit=True)
            await_that(lambda: any(url in each for each in caplog.messages), "it says which")
            watcher.close()
            end_savers(spool_folder)
        assert any(said in message and url in message for message in caplog.messages)


def test_a_server_of_another_protocol_is_no_prefect_server() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        answers = Thread(target=lambda: other.accept()[0].sendall(b"\0\0\x18\x04\r\n\r\n"))
        answers.start()
        state = StackState(api_url=f"http://127.0.0.1:{other.getsockname()[1]}/api")
        assert not is_server_ready(state)
        answers.join()


def test_all_interfaces_are_no_address_that_another_machine_could_join(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"server\.host is 0\.0\.0\.0"):
        embedded.up(Settings(home=tmp_path), StackSettings(server={"host": "0.0.0.0"}), timeout_s=1)
    assert not (tmp_path / "logs").exists()


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_SYNC_HOME", "")  # otherwise it would be the current folder
    assert Settings().home == default_home()
