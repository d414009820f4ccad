"""A stack whose server and Ray are run by others, and do not answer."""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from tests.conftest import environment
from tests.support.answers import server, serving
from tests.support.command import invoke
from tests.support.job import Job
from tests.support.savers import await_that, end_savers
from trinity_sync.cli.output import to_json
from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.prefect_api import ask_server
from trinity_sync.client.prefect_connection import find_other_user
from trinity_sync.client.saver_control import SaveTrigger
from trinity_sync.errors import PrefectApiError, StackError
from trinity_sync.fs.process import read_process_identity
from trinity_sync.orchestration.package_paths import read_deployments
from trinity_sync.settings import Settings, StackSettings, default_home
from trinity_sync.stack import daemon, local_stack, services
from trinity_sync.stack.daemon import Daemon
from trinity_sync.stack.services import StackState, is_server_ready
from trinity_sync.stack.state_file import read_state, write_state


@pytest.fixture
def listening() -> Iterator[int]:
    """A port at which something takes calls, and says nothing."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made.getsockname()[1]


def test_what_does_not_answer_is_away_and_what_is_named_instead_of_the_stacks_part_is_said(
    listening: int, tmp_path: Path
) -> None:
    named = {
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "TRINITY_SYNC_STACK__RAY__ADDRESS": f"127.0.0.1:{listening}",
    }
    with environment(named):
        found = local_stack.status(Settings(home=tmp_path))
    assert [part.state for part in found.services[:3]] == ["away", "external", "absent"]
    assert "no Prefect server can be reached at http://127.0.0.1:9" in found.reason
    ours, theirs = "127.0.0.1:9", f"127.0.0.1:{listening}"
    state = {"ray_address": ours, "server": None, "ray": None, "worker": None}
    (tmp_path / "stack.json").write_text(json.dumps(state))
    for address, differs in ((theirs, True), (ours, False), ("", False)):
        with environment({"TRINITY_SYNC_STACK__RAY__ADDRESS": address}):
            sentences = local_stack.status(Settings(home=tmp_path)).overrides
        assert len(sentences) == differs
        assert all(theirs in sentence and ours in sentence for sentence in sentences)


def test_the_server_is_asked_with_the_password_of_its_url_which_status_does_not_show(
    tmp_path: Path,
) -> None:
    answers = {"/flow_runs/count": (200, "3"), "/deployments/filter": (200, "[]")}
    with server(answers, login="me:secret") as url:
        named = url.replace("//", "//me:secret@")
        with environment({"PREFECT_API_URL": named}):
            found = local_stack.status(Settings(home=tmp_path))
    assert (found.waiting_runs, found.reason, found.services[0].url) == (3, "", url)
    assert "secret" not in json.dumps(to_json(found))


def test_status_says_that_the_disk_of_the_server_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_stack, "LEAST_ROOM", 1 << 62)
    answers = {"/flow_runs/count": (200, "3"), "/deployments/filter": (200, "[]")}
    home = {"TRINITY_SYNC_HOME": str(tmp_path)}
    with server(answers) as url, environment(home | {"PREFECT_API_URL": url}):
        done = invoke("status")
    assert (done.exit_code, "3 run(s) waiting" in done.output) == (3, True)
    assert f"free in {tmp_path}: the server records nothing. Make room" in done.output
    with environment({"PREFECT_API_URL": ""}):
        assert local_stack.status(Settings(home=tmp_path, saver="auto")).reason == ""


def test_a_stack_is_here_also_once_its_machine_has_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = StackState()
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    assert not state.is_elsewhere


PAUSED, FULL, SAVES = {"is_paused": True}, {"concurrency_limit": 0}, "save-step"
NO_RUNS = {"global_concurrency_limit": {"limit": 0, "active": True}}


@pytest.mark.parametrize(
    ("pool", "queue", "deployment", "told"),
    [
        (PAUSED, {}, {}, "paused: work pool mine; resume it"),
        ({}, PAUSED, {}, "paused: work queue checkpoints; resume it"),
        ({}, FULL, {}, "paused: work queue checkpoints; resume it"),
        ({}, {}, NO_RUNS, f"paused: deployment {SAVES}; resume it"),
        ({}, {}, {"parameters": {"colour": "red"}}, f"not deployed: {SAVES}"),
    ],
)
def test_what_was_changed_in_the_ui_so_that_no_save_begins_is_named(
    tmp_path: Path,
    pool: dict[str, Any],
    queue: dict[str, Any],
    deployment: dict[str, Any],
    told: str,
) -> None:
    deployed = [{"name": each["name"], "parameters": {}} for each in read_deployments()]
    answers = {
        "/work_pools/mine/queues/filter": [{"name": "checkpoints", "is_paused": False} | queue],
        "/work_pools/mine/workers/filter": [{"name": "worker", "status": "ONLINE"}],
        "/work_pools/mine": {"name": "mine", "is_paused": False} | pool,
        "/flow_runs/count": 0,
        "/deployments/filter": [
            each | deployment if each["name"] == SAVES else each for each in deployed
        ],
    }
    with server({path: (200, json.dumps(body)) for path, body in answers.items()}) as url:
        named = {"PREFECT_API_URL": url, "TRINITY_SYNC_STACK__WORKER__POOL": "mine"}
        with environment(named | {"TRINITY_SYNC_HOME": str(tmp_path)}):
            done = invoke("status")
    assert (done.exit_code, told in done.output) == (3, True)


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
        pytest.raises(StackError, match=f"at http://{address}/api does not answer within 0.5 s"),
    ):
        local_stack.up(settings, timeout_s=0.5)
    assert local_stack.read_state(settings.home) is None


def test_env_without_a_stack_fails_in_eval(tmp_path: Path) -> None:
    line = f'eval "$({sys.executable} -m trinity_sync env)"'
    env = os.environ | {
        "TRINITY_SYNC_HOME": str(tmp_path),
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
    }
    done = subprocess.run(
        ["bash", "-c", line], env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 1
    assert done.stderr == "error: no stack runs\nhint: trinity-sync up\n"


def test_a_trainer_whose_address_is_no_prefect_server_says_which_it_asked(
    job: Job,
    spool_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    not_deployed = {"/deployments/name": (404, '{"detail": "Deployment not found"}')}
    cases = (({}, "is not the API of a Prefect server"), (not_deployed, "run: trinity-sync deploy"))
    for answers, said in cases:
        with server(answers) as url, caplog.at_level(logging.WARNING):
            monkeypatch.setenv("PREFECT_API_URL", url)
            settings = Settings(home=tmp_path, spool=spool_folder)
            watcher = CommitWatcher(SaveTrigger(settings), job.spool)
            job.stage(1, {"model": {"w": torch.zeros(3)}})
            watcher.follow(job.request(1, components=("model",)), submit=True)
            await_that(lambda: any(url in each for each in caplog.messages), "it says which")
            watcher.close()
            end_savers(spool_folder)
        assert any(said in message and url in message for message in caplog.messages)


def test_a_server_of_others_may_answer_with_fewer_runs_at_a_time(tmp_path: Path) -> None:
    def answer(_: object, body: str) -> tuple[int, str]:
        return (422, "{}") if json.loads(body).get("limit", 0) > 50 else (200, "[]")

    with serving(answer) as url:
        settings = Settings(home=tmp_path)
        assert ask_server(settings, lambda api: api.read_job_runs("job"), f"{url}/api") == []


def test_a_server_of_another_protocol_is_no_prefect_server() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        answers = Thread(target=lambda: other.accept()[0].sendall(b"\0\0\x18\x04\r\n\r\n"))
        answers.start()
        state = StackState(api_url=f"http://127.0.0.1:{other.getsockname()[1]}/api")
        assert not is_server_ready(state)
        answers.join()


def sleeping(home: Path) -> StackState:
    """A stack whose worker sleeps, in the state file."""
    command = ["-c", "import time; time.sleep(60)"]
    worker = services._start("worker", command, Settings(home=home), dict(os.environ))
    write_state(home, state := StackState(worker=worker))
    return state


@pytest.mark.parametrize("joined", [False, True])
def test_restart_starts_what_it_stops_again_although_the_shell_names_its_server(
    tmp_path: Path, joined: bool
) -> None:
    """As ``eval "$(trinity-sync env)"`` does; no server can listen at the address here."""
    url = "http://127.0.0.1:9/api"
    state = replace(sleeping(tmp_path), api_url=url, joined=joined)
    state = state if joined else replace(state, worker=None, server=state.worker)
    write_state(tmp_path, state)
    named = {"TRINITY_SYNC_STACK__SERVER__HOST": "203.0.113.1", "PREFECT_API_URL": url}
    try:
        with environment({"TRINITY_SYNC_HOME": str(tmp_path), **named}):
            refused = invoke("restart").output
        why = "that this machine has joined does not answer" if joined else "no port of 203.0.113.1"
        assert why in " ".join(refused.split())
        assert state.lives == joined
        assert read_state(tmp_path) == state
    finally:
        daemon.stop(state.daemons[0], 10)


IN_A_CONTAINER = """
import sys
from pathlib import Path
from trinity_sync import Settings, StackError
from trinity_sync.stack import local_stack

settings = Settings(home=Path(sys.argv[1]))
print([each.state for each in local_stack.status(settings).services[:3]])
for command in (local_stack.up, local_stack.down):
    try:
        command(settings)
    except StackError as error:
        print("another PID namespace" in str(error))
"""


def test_a_stack_of_another_pid_namespace_is_left_alone_until_it_has_ended(tmp_path: Path) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("a process may have no PID namespace of its own here")

    def look(*code: str) -> str:
        command = [*alone, sys.executable, "-c", *code, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=250).stdout

    state = sleeping(tmp_path)
    try:
        assert look(IN_A_CONTAINER) == "['absent', 'absent', 'unknown']\nTrue\nTrue\n"
        assert local_stack.read_state(tmp_path) == state
        assert state.lives
    finally:
        daemon.stop(state.daemons[0], 10)
    assert look(ENDED) == "[] True\n"


ENDED = """
import sys
from pathlib import Path
from trinity_sync import Settings
from trinity_sync.stack import local_stack

settings = Settings(home=Path(sys.argv[1]))
print(local_stack.read_state(settings.home).daemons, local_stack.down(settings))
"""


def test_a_server_that_another_process_answers_for_is_not_ready(tmp_path: Path) -> None:
    started = sleeping(tmp_path).worker
    try:
        with server({"/health": (200, "true")}) as url:
            ours = Daemon(read_process_identity(os.getpid()), "server.log")
            assert is_server_ready(StackState(api_url=url, server=ours))
            assert not is_server_ready(StackState(api_url=url, server=started))
    finally:
        daemon.stop(started, 10)


def test_a_server_whose_port_another_one_has_got_starts_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, late = Settings(home=tmp_path), "raise SystemExit('address already in use')"
    with server({"/health": (200, "true")}) as url, server({"/health": (200, "true")}) as other:
        ended = services._start("server", ["-c", late], settings, dict(os.environ))
        ours = Daemon(read_process_identity(os.getpid()), "server.log")
        second = StackState(api_url=other, server=ours)
        monkeypatch.setattr(services, "start_server", lambda *_: second)
        first = StackState(api_url=url, server=ended)
        assert local_stack._await_server(settings, StackSettings(), first, 60) == second


OF_ANOTHER_USER = """
import os, socket
os.setuid(12345)
with socket.create_server(("127.0.0.1", 0)) as made:
    print(made.getsockname()[1], flush=True)
    while True:
        made.accept()[0].sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 4\\r\\n\\r\\ntrue")
"""


OF_A_WORKER = """
import asyncio, httpx, sys
from pathlib import Path
from trinity_sync.client.prefect_connection import find_server, refuse_other_users

refuse_other_users(find_server(Path(sys.argv[1]), None))
httpx.get(sys.argv[2], trust_env=False)

async def ask() -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.get(sys.argv[3])

asyncio.run(ask())
"""


def test_another_user_at_the_port_of_a_stack_is_not_told_its_password(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can be another user")
    command, settings = [sys.executable, "-c", OF_ANOTHER_USER], Settings(home=tmp_path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            url = f"http://127.0.0.1:{other.stdout.readline().strip()}/api"
            for host in ("127.0.0.1", "localhost"):
                state = StackState(api_url=url.replace("127.0.0.1", host), api_auth="me:secret")
                write_state(tmp_path, state)
                with (
                    environment({"TRINITY_SYNC_HOME": str(tmp_path)}),
                    pytest.raises(PrefectApiError, match="user 12345 listens"),
                ):
                    ask_server(settings, lambda api: api.read_version())
            with server({"": (200, "{}")}) as ours:
                for urls, told in (((url, ours), 1), ((ours, url), 1), ((ours, ours), 0)):
                    program = [sys.executable, "-c", OF_A_WORKER, str(tmp_path), *urls]
                    done = subprocess.run(program, check=False, capture_output=True, text=True)
                    assert (done.returncode, "ConnectError" in done.stderr) == (told, told)
            assert services._server_auth(settings, StackSettings(), state) != "me:secret"
            away = StackState(api_url="http://127.0.0.1:9/api", api_auth="me:secret")
            assert services._server_auth(settings, StackSettings(), away) == "me:secret"
        finally:
            other.kill()


def count_read_bytes(url: str) -> int:
    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = count()
    assert find_other_user(url) == 0
    return count() - before


def test_who_listens_is_found_without_a_look_at_all_connections(listening: int) -> None:
    url = f"http://127.0.0.1:{listening}/api"
    few = count_read_bytes(url)
    with ExitStack() as opened, socket.create_server(("127.0.0.1", 0), backlog=300) as made:
        for _ in range(300):  # a row of 150 bytes for each end
            opened.enter_context(socket.create_connection(made.getsockname()))
        assert count_read_bytes(url) < few + 30_000


def test_all_interfaces_are_no_address_that_another_machine_could_join(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"server\.host is 0\.0\.0\.0"):
        local_stack.up(
            Settings(home=tmp_path), StackSettings(server={"host": "0.0.0.0"}), timeout_s=1
        )
    assert not (tmp_path / "logs").exists()


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_SYNC_HOME", "")  # otherwise it would be the current folder
    assert Settings().home == default_home()


@pytest.mark.parametrize("step", [local_stack._deploy, local_stack._start_worker])
def test_up_waits_for_a_slow_server_as_long_as_it_was_told_to(
    listening: int, tmp_path: Path, step: Callable[..., object]
) -> None:
    state = StackState(api_url=f"http://127.0.0.1:{listening}/api")
    with pytest.raises(PrefectApiError, match=r"does not answer within 0\.5 s"):
        step(Settings(home=tmp_path), StackSettings(), state, 0.5)
