"""A further machine joins a stack, with a home, a spool and an address of its own."""

import json
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.conftest import SPOOLS, environment, left_of, processes_of
from tests.integration.nodes.joined import a_rank_on_each
from tests.support.database import lay_tables
from trinity_sync import Settings, StackError
from trinity_sync.settings import StackSettings
from trinity_sync.stack import daemon, local_stack
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import require_committed


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Settings, Settings]]:
    """Settings of two machines, which here are two addresses of this machine."""
    spools = [Path(tempfile.mkdtemp(prefix=SPOOLS, dir="/dev/shm")) for _ in "12"]
    first, second = (
        Settings(home=tmp_path_factory.mktemp("home"), spool=spool, node=f"machine-{number}")
        for number, spool in enumerate(spools, start=2)
    )
    yield first, second
    for spool in spools:
        shutil.rmtree(spool)


def at(number: int) -> StackSettings:
    """Settings of the stack on one of the machines."""
    return StackSettings(
        server={"host": f"127.0.0.{number}", "port": 0},
        ray={"cpus": 1},
        worker={"nice": 0},  # it is awaited beside tests on all cores
        maintenance={"schedules": False},
    )


@pytest.fixture(scope="module")
def head(machines: tuple[Settings, Settings]) -> Iterator[StackState]:
    settings, _ = machines
    lay_tables(settings)
    with environment({}):
        state = local_stack.up(settings, at(2))
    yield state
    processes = processes_of(local_stack.read_state(settings.home) or state)
    with environment({}):
        local_stack.down(settings)
    assert not left_of(processes)


@pytest.fixture(scope="module")
def joined(
    head: StackState, machines: tuple[Settings, Settings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StackState]:
    first, second = machines
    invitation = tmp_path_factory.mktemp("copied") / "join.json"
    shutil.copy(first.home / "join.json", invitation)
    try:
        with environment({}):
            state = local_stack.join(second, invitation, stack=at(3))
        yield state
        state = local_stack.read_state(second.home) or state
        processes = processes_of(state)
    finally:  # what has started of it
        with environment({}):
            local_stack.down(second)
    assert not left_of(processes)
    assert not Path(state.ray_folder).exists()
    assert (local_stack.read_state(machines[0].home) or head).lives


def test_a_server_that_others_reach_asks_for_a_password_that_only_its_user_can_read(
    head: StackState, machines: tuple[Settings, Settings]
) -> None:
    assert httpx.get(f"{head.api_url}/deployments/count", timeout=None).status_code == 401
    user, _, password = head.environment["PREFECT_API_AUTH_STRING"].partition(":")
    answer = httpx.post(
        f"{head.api_url}/deployments/count", auth=(user, password), json={}, timeout=None
    )
    assert answer.status_code == 200
    invitation = machines[0].home / "join.json"
    assert stat.S_IMODE(invitation.stat().st_mode) == 0o600
    assert password in invitation.read_text()


def test_a_rank_on_each_machine_saves_one_step(
    head: StackState, joined: StackState, machines: tuple[Settings, Settings], root: Path
) -> None:
    with environment(head.environment), a_rank_on_each(root, machines) as ranks:
        for rank, saves in enumerate(ranks):
            saves.save(4, {"model": {"w": torch.full((9,), float(rank))}})
        for saves in ranks:
            saves.wait_all(timeout=250)
    manifest = require_committed(root, 4)
    assert len([file for file in manifest.files if file.component == "model"]) == 2


def test_ray_has_a_folder_on_each_machine_that_is_its_users_alone(
    head: StackState, joined: StackState
) -> None:
    folders = {Path(state.ray_folder) for state in (head, joined)}
    assert len(folders) == 2
    for folder in folders:
        assert (folder / "ray/session_latest").exists()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_up_on_a_joined_machine_changes_nothing_while_all_runs(
    joined: StackState, machines: tuple[Settings, Settings]
) -> None:
    with environment({}):
        assert local_stack.up(machines[1], at(3)) == joined
        found = local_stack.status(machines[1], at(3))
    assert [part.state for part in found.services[:3]] == ["external", "running", "running"]
    assert found.workers_online == 2


def test_a_home_with_a_stack_of_its_own_joins_no_other(
    head: StackState, machines: tuple[Settings, Settings]
) -> None:
    with pytest.raises(StackError, match="has a stack already"):
        local_stack.join(machines[0], machines[0].home / "join.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"url": "x"})])
def test_what_is_no_invitation_is_named_and_nothing_is_begun(tmp_path: Path, text: str) -> None:
    (tmp_path / "join.json").write_text(text)
    settings = Settings(home=tmp_path / "home")
    with pytest.raises(StackError, match="is not an invitation of a stack"):
        local_stack.join(settings, tmp_path / "join.json")
    assert local_stack.read_state(settings.home) is None


def test_a_machine_that_could_not_join_has_not_joined(
    head: StackState, machines: tuple[Settings, Settings], tmp_path: Path
) -> None:
    invitation = json.loads((machines[0].home / "join.json").read_text())
    away = {**invitation, "api_url": "http://127.0.0.2:9/api"}
    (tmp_path / "join.json").write_text(json.dumps(away))
    settings = Settings(home=tmp_path / "home")
    with pytest.raises(StackError, match="does not answer"):
        local_stack.join(settings, tmp_path / "join.json")
    assert local_stack.read_state(settings.home) is None


@pytest.mark.slow
def test_a_head_that_ran_is_restarted_where_it_was_whatever_the_shell_says(
    head: StackState, machines: tuple[Settings, Settings]
) -> None:
    before = local_stack.read_state(machines[0].home)
    server = psutil.Process(before.server.pid)
    server.kill()
    server.wait(250)
    with environment({}):
        after = local_stack.up(machines[0], at(3))
        changed = local_stack.status(machines[0], at(3)).changed
    assert changed == ("server.host: 127.0.0.2, now 127.0.0.3",)
    assert (after.api_url, after.api_auth) == (before.api_url, before.api_auth)


@pytest.mark.slow
def test_a_head_that_was_stopped_comes_back_where_the_joined_machine_looks_for_it(
    head: StackState, joined: StackState, machines: tuple[Settings, Settings]
) -> None:
    first, second = machines
    with environment({}):
        assert local_stack.down(first)
        with pytest.raises(StackError, match=r"join with its current join\.json"):
            local_stack.up(second, at(3))
        state = local_stack.up(first, at(2))
        assert (state.api_url, state.ray_address) == (head.api_url, head.ray_address)
        daemon.stop(joined.ray, 10)  # it ends by itself within a minute, as its head is another
        local_stack.up(second, at(3))
        found = local_stack.status(second, at(3))
    assert [part.state for part in found.services[:3]] == ["external", "running", "running"]
    assert found.workers_online
