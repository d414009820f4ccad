"""The stack on one machine: started once, repaired, stopped without a trace."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path

import psutil
import pytest
import torch
from prefect.events.schemas.automations import Automation, AutomationCore, EventTrigger

from tests.conftest import left_of, processes_of
from tests.integration.test_cli import COMMAND, run
from tests.support.database import lay_tables
from tests.support.waiting import until
from tests.unit.cli.test_output import check_document
from trinity_sync import CheckpointCoordinator, Settings, StackError
from trinity_sync.orchestration import deploy
from trinity_sync.orchestration.deploy import HEARTBEAT_AUTOMATION, open_client
from trinity_sync.settings import StackSettings
from trinity_sync.stack import local_stack, services
from trinity_sync.stack.services import StackState
from trinity_sync.stack.state_file import lock_home


@pytest.fixture
def another(tmp_path: Path, stack: StackState, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a second stack, with a pool of its own."""
    monkeypatch.setenv("TRINITY_SYNC_STACK__WORKER__POOL", "another")
    settings = Settings(home=tmp_path / "home", spool=tmp_path / "spool")
    lay_tables(settings)
    return settings


@pytest.fixture
def on_the_same_ray(
    another: Settings, stack: StackState, stack_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    """The same, where the Ray cluster is that of the first."""
    now = (
        local_stack.read_state(stack_settings.home) or stack
    )  # another test may have had it started again
    for name, value in (now.ray_auth or {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRINITY_SYNC_STACK__RAY__ADDRESS", now.ray_address)
    return another


def part(settings: Settings, name: str) -> local_stack.ServiceStatus:
    return next(each for each in local_stack.status(settings).services if each.name == name)


def test_a_worker_that_hangs_is_named_and_started_again_and_the_rest_left_alone(
    saves: CheckpointCoordinator, stack_settings: Settings
) -> None:
    before = local_stack.read_state(stack_settings.home)
    folders = [stack_settings.home, Path(before.ray_folder)]
    for path in [each for folder in folders for each in [folder, *folder.rglob("*")]]:
        os.utime(path, (0, 0), follow_symlinks=False)
    psutil.Process(before.worker.pid).suspend()
    until(lambda: part(stack_settings, "worker").state == "unresponsive", "it")
    with open_client() as client:  # which the next worker makes again
        client.delete_deployment(client.read_deployment_by_name("retention/retention").id)
    for command in ("status", "doctor"):
        told = run(command)
        assert told.returncode == 3
        assert "trinity-sync up" in told.stdout + told.stderr
    secrets = [stack_settings.home / name for name in ("ray_token", services.PASSWORD_FILE)]
    for path in secrets:
        path.rename(path.with_suffix(".away"))
    after = local_stack.up(stack_settings)  # it needs neither
    for path in secrets:
        path.with_suffix(".away").rename(path)
    assert after.worker != before.worker
    assert (after.server, after.ray) == (before.server, before.ray)
    assert part(stack_settings, "worker").state == "running"
    assert local_stack.status(stack_settings).undeployed == ()

    def find_old(*action: str) -> str:
        clean = ["find", *map(str, folders), "-mtime", "+9", *action, "-print"]
        return subprocess.run(clean, check=True, capture_output=True, text=True).stdout

    until(lambda: not find_old(), "the worker to touch all files")
    assert find_old("-delete") == ""  # as a cleaner of old files does
    saves.save(1, {"model": {"w": torch.zeros(9)}})
    saves.wait_all(250)


@pytest.mark.slow
def test_a_server_and_a_ray_that_hang_are_named_and_started_again(
    saves: CheckpointCoordinator, stack_settings: Settings
) -> None:
    before = local_stack.read_state(stack_settings.home)
    for process in processes_of(before):
        if process.name() == "raylet" or process.pid == before.server.pid:
            process.suspend()
    hangs = ("server", "ray")
    until(lambda: all(part(stack_settings, each).state == "unresponsive" for each in hangs), "it")
    told = run("status")
    assert (told.returncode, "trinity-sync up starts" in told.stderr) == (3, True)
    assert not {*before.daemons} & {*local_stack.up(stack_settings).daemons}
    saves.save(1, {"model": {"w": torch.zeros(9)}})
    saves.wait_all(250)


def test_deploying_twice_is_one_deployment_and_keeps_what_was_set_by_hand(
    stack: StackState, stack_settings: Settings
) -> None:
    from prefect.client.schemas.actions import DeploymentUpdate

    assert "save-step/save-step" in deploy.deploy(StackSettings(), stack.api_url)
    with open_client(stack.api_url) as client:
        first = client.read_deployment_by_name("save-step/save-step")
        client.update_deployment(first.id, DeploymentUpdate(concurrency_limit=3))
        try:
            deploy.deploy(StackSettings(), stack.api_url)
            again = client.read_deployment_by_name("save-step/save-step")
            assert again.id == first.id
            assert again.global_concurrency_limit.limit == 3
        finally:
            client.update_deployment(first.id, DeploymentUpdate(concurrency_limit=None))
    assert again.pull_steps == []
    assert again.path is None
    assert again.entrypoint == "flows.save.save_step"


def test_deploying_twice_is_the_automation_once_and_one_that_was_paused_stays_so(
    stack: StackState, stack_settings: Settings
) -> None:
    with open_client(stack.api_url) as client:

        def watch() -> Automation:
            (found,) = client.read_automations_by_name(HEARTBEAT_AUTOMATION)
            return found

        made = watch()
        client.pause_automation(made.id)
        old = AutomationCore.model_validate({**made.model_dump(exclude={"id"}), "enabled": True})
        client.create_automation(old)
        try:
            longer = StackSettings(worker={"heartbeat_timeout": "500s"})
            deploy.deploy(longer, stack.api_url)
            changed = watch()
            assert not changed.enabled
            assert isinstance(changed.trigger, EventTrigger)
            assert changed.trigger.within.total_seconds() == 500
            save = client.read_deployment_by_name("save-step/save-step").id
            assert str(save) in str(changed.trigger.match_related)
        finally:
            deploy.deploy(StackSettings(), stack.api_url)
            client.resume_automation(watch().id)


def test_a_work_pool_that_was_deleted_in_the_ui_is_named_by_status_and_made_by_the_next_up(
    stack: StackState, stack_settings: Settings
) -> None:
    with open_client(stack.api_url) as client:
        client.request("DELETE", f"/work_pools/{local_stack.status(stack_settings).pool}")
    done = run("status")
    assert done.returncode == 3
    assert "retention; trinity-sync up deploys them" in done.stderr
    local_stack.up(stack_settings)
    assert local_stack.status(stack_settings).undeployed == ()
    until(lambda: run("status").returncode == 0, "the worker to be online again")


def test_a_given_server_and_a_given_ray_are_used_and_outlive_down(
    stack: StackState, on_the_same_ray: Settings, stack_settings: Settings
) -> None:
    another, now = on_the_same_ray, local_stack.read_state(stack_settings.home)
    state = local_stack.up(another)
    try:
        assert (state.server, state.ray) == (None, None)
        assert (state.api_url, state.ray_address) == (now.api_url, now.ray_address)
        assert part(another, "server").state == "external"
        assert local_stack.status(another).workers_online == 1
        processes = processes_of(state)
    finally:
        local_stack.down(another)
    assert processes
    assert not left_of(processes)
    # the deployment belongs to one pool, and that is the session's again
    deploy.deploy(StackSettings(worker={"pool": "trinity-sync"}))
    assert part(stack_settings, "server").state == "running"
    assert part(stack_settings, "ray").state == "running"


def test_down_leaves_no_process_and_no_file(
    another: Settings, stack_settings: Settings, tmp_path: Path
) -> None:
    config = tmp_path / "trinity_sync.toml"
    config.touch()
    done = run(
        "restart", "--config", config, "-o", "json",
        TRINITY_SYNC_HOME=str(another.home), PREFECT_API_URL="",
    )  # fmt: skip
    services = {each["name"]: each for each in check_document("restart", done.stdout)["services"]}
    assert services["server"]["status"] == services["ray"]["status"] == "running"
    state = local_stack.read_state(another.home)
    assert state.config == str(config)
    deploy.deploy(StackSettings(worker={"pool": "trinity-sync"}))
    processes = processes_of(state)
    names = {process.name() for process in processes}
    assert {"gcs_server", "raylet"} <= names
    assert Path(state.ray_folder).is_dir()

    assert local_stack.down(another)

    assert not left_of(processes)
    assert not Path(state.ray_folder).exists()
    assert local_stack.read_state(another.home) is None
    assert not local_stack.down(another)


UNIT = Path(__file__).parents[2] / "deploy/systemd/trinity-sync.service"


@pytest.mark.slow
def test_what_the_systemd_unit_runs_starts_again_what_ends_and_stops_all_when_it_is_stopped(
    another: Settings, stack: StackState
) -> None:
    unit = ConfigParser(interpolation=None)
    unit.read(UNIT)
    (_, *arguments) = unit["Service"]["ExecStart"].split()
    env = {**os.environ, "TRINITY_SYNC_HOME": str(another.home), "PREFECT_API_URL": ""}

    def started(is_new: Callable[[StackState], bool]) -> StackState:
        def look() -> StackState | None:
            if running.poll() is not None:
                raise AssertionError(f"it ended with {running.returncode}")
            with lock_home(another.home):  # no start is under way
                state = local_stack.read_state(another.home)
            return state if state and len(state.daemons) == 3 and is_new(state) else None

        return until(look, "the stack")

    with subprocess.Popen([*COMMAND, *arguments], env=env) as running:
        try:
            first = started(lambda state: True)
            os.kill(first.worker.pid, signal.SIGSTOP)
            second = started(lambda state: state.worker != first.worker)
            assert (second.server, second.ray) == (first.server, first.ray)
            os.kill(second.ray.pid, signal.SIGKILL)
            third = started(lambda state: state.ray != second.ray)
            assert third.api_url == first.api_url
            assert third.lives
            processes = processes_of(third)
            running.terminate()
            assert running.wait(250) == 0
            assert not left_of(processes)
            assert local_stack.read_state(another.home) is None
        finally:
            running.kill()
            local_stack.down(another)
            deploy.deploy(StackSettings(worker={"pool": "trinity-sync"}))


def test_what_works_runs_on_if_the_worker_does_not_start_as_with_too_little_memory_for_ray(
    another: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    low = "Ray ends its processes as they start: .*running low on memory"
    try:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            metrics = f"127.0.0.1:{taken.getsockname()[1]}"
            stack = StackSettings(worker={"pool": "another", "metrics": metrics, "nice": 0})
            with pytest.raises(StackError, match=rf"the flow worker ended.*{metrics}") as caught:
                local_stack.up(another, stack)
        assert "what works runs on (ray); trinity-sync up" in caught.value.hint
        before = local_stack.read_state(another.home)
        assert before.ray.lives
        with pytest.raises(StackError, match=low):
            local_stack.up(another, stack)
        assert local_stack.read_state(another.home).ray == before.ray
    finally:
        local_stack.down(another)
        deploy.deploy(StackSettings(worker={"pool": "trinity-sync"}))


def test_a_work_pool_of_another_type_is_named(stack: StackState) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate

    with open_client(stack.api_url) as client:
        client.create_work_pool(WorkPoolCreate(name="of-another-type", type="process"))
    with pytest.raises(StackError, match="of type 'process'"):
        deploy.deploy(StackSettings(worker={"pool": "of-another-type"}), stack.api_url)


@pytest.mark.parametrize(
    ("variable", "name", "address"),
    [
        ("PREFECT_API_URL", "PREFECT_API_URL", "http://127.0.0.1:9/api"),
        ("TRINITY_SYNC_STACK__RAY__ADDRESS", "ray.address", "127.0.0.1:9"),
    ],
)
def test_a_given_part_that_does_not_answer_is_an_error_before_anything_starts(
    another: Settings, monkeypatch: pytest.MonkeyPatch, variable: str, name: str, address: str
) -> None:
    monkeypatch.setenv(variable, address)
    another = Settings(home=another.home)
    with pytest.raises(StackError, match=f"{name}={address}"):
        local_stack.up(another)
    assert not (another.home / "logs").exists()


def test_a_server_of_our_own_is_not_exchanged_for_another(
    stack: StackState, stack_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(StackError, match="trinity-sync down"):
        local_stack.up(stack_settings)


@pytest.mark.parametrize("wrong", ["{server}", "{server}/nothing", "not a url", "http://[::"])
def test_an_address_that_is_no_prefect_api_is_named(
    stack: StackState, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    for name in ("NO_PROXY", "no_proxy"):  # get the host
        monkeypatch.setenv(name, "")
    url = wrong.format(server=stack.api_url.removesuffix("/api"))
    with pytest.raises(StackError) as caught:
        deploy.deploy(StackSettings(), url)
    assert url in str(caught.value)


OF_ANOTHER_RELEASE = '{"format": 9, "server": null, "ray": null, "worker": null}'


@pytest.mark.parametrize("text", ["{", OF_ANOTHER_RELEASE])
def test_a_state_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "stack.json").write_text(text)
    with pytest.raises(StackError, match=r"stack\.json is corrupted, or of another release"):
        local_stack.status(Settings(home=tmp_path))
