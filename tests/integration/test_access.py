"""Server and Ray cluster refuse calls without credentials; otherwise no stack runs."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.conftest import STACK_VARIABLES, environment, left_of, processes_of
from tests.integration.test_packaging import ray_of_another_environment
from tests.support.database import lay_tables
from trinity_sync import Settings, StackError
from trinity_sync.client.prefect_api import ask_server
from trinity_sync.settings import LOCAL_HOST, StackSettings
from trinity_sync.stack import daemon, local_stack, services
from trinity_sync.stack.doctor import run_checks
from trinity_sync.stack.services import StackState

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64}
IGNORES = """
import os
if "trinity_sync.stack.ray_node" in " ".join(open("/proc/self/cmdline").read().split("\\0")):
    os.environ["RAY_AUTH_MODE"] = "disabled"
"""
"""Makes ``ray start`` ignore the token, as Ray 2.51 does."""


def access_found(settings: Settings) -> list[tuple[str, str]]:
    return [(each.state, each.found) for each in run_checks(settings) if each.name == "access"]


def test_a_stack_refuses_connections_without_credentials(
    stack: StackState, stack_settings: Settings
) -> None:
    assert not services.accepts_requests(stack.api_url)
    assert not services.accepts_calls(stack.ray_address)
    found = [("ok", "refused without credentials by server and Ray")]
    assert access_found(stack_settings) == found


@pytest.mark.usefixtures("stack")
def test_everything_of_a_stack_listens_on_its_host(stack_settings: Settings) -> None:
    now = local_stack.read_state(stack_settings.home)  # other tests restart its parts
    told = " ".join(word for each in processes_of(now) for word in each.cmdline())
    assert not [each for each in ("dashboard.py", "ray.util.client.server") if each in told]
    listening = {
        (each.name(), connection.laddr.ip.removeprefix("::ffff:"))
        for each in processes_of(now)
        for connection in each.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert {address for _, address in listening} == {LOCAL_HOST}


def test_a_stack_whose_ray_ignores_the_token_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(IGNORES)
    own = {
        **STACK_VARIABLES,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PYTHONPATH": str(tmp_path),
    }
    another = Settings(home=tmp_path / "home", spool=tmp_path / "spool")
    lay_tables(another)
    before = set(psutil.Process().children(recursive=True))
    refused = pytest.raises(StackError, match=r"without its token.*trinity-sync down")
    with environment(own), refused:
        local_stack.up(another)
    assert not left_of(list(set(psutil.Process().children(recursive=True)) - before))
    assert local_stack.read_state(another.home) is None


def test_a_server_starts_and_is_changed_whatever_a_site_protects_its_servers_by(
    tmp_path: Path,
) -> None:
    site = {
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_API_BASE_PATH": "/behind/a/proxy",
        "PREFECT_SERVER_API_DEFAULT_LIMIT": "50",
        "PREFECT_API_DEFAULT_LIMIT": "50",  # its older name
    }
    settings = Settings(home=tmp_path / "home", spool=tmp_path / "spool")
    lay_tables(settings)
    with environment({**STACK_VARIABLES, **site}):
        state = services.start_server(settings, StackSettings(), StackState())
        try:
            is_ready = partial(services.is_server_ready, state)
            daemon.await_ready("the Prefect server", state.server, is_ready, 120)
            env = services.build_environment(settings, StackSettings(), state)
            subprocess.run([sys.executable, "-m", "trinity_sync", "deploy"], env=env, check=True)
            with environment(env):
                assert ask_server(settings, lambda api: api.read_saves("none"), state.api_url) == []
        finally:
            daemon.stop(state.server, 20)


@pytest.mark.slow
def test_a_cluster_of_others_without_a_token_is_a_warning_of_doctor(tmp_path: Path) -> None:
    with ray_of_another_environment(tmp_path / "theirs") as address:
        with pytest.raises(StackError, match=f"{address} accepts connections without its token"):
            services.require_refusals(
                StackSettings(), StackState(ray_address=address, ray_auth=TOKEN)
            )
        with environment({"TRINITY_SYNC_STACK__RAY__ADDRESS": address}):
            ((state, found),) = access_found(Settings(home=tmp_path / "home"))
    assert (state, "whoever reaches it can run code" in found) == ("warn", True)


@pytest.mark.slow
@pytest.mark.parametrize(("ray", "accepts"), [("ray==2.56.0", False), ("ray==2.51.2", True)])
def test_the_oldest_supported_ray_takes_the_token_that_an_older_one_ignores(
    tmp_path: Path, ray: str, accepts: bool
) -> None:
    with ray_of_another_environment(tmp_path / "theirs", ray=ray, auth=TOKEN) as address:
        assert services.accepts_calls(address) == accepts
