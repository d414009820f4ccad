"""``trinity-sync worker`` joins what it is told to join, and says in a sentence why it cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync.settings import Settings, StackSettings
from trinity_sync.stack.daemon import Daemon
from trinity_sync.stack.services import StackState, build_environment

OWN = "http://127.0.0.1:10/api", "127.0.0.1:10"
STACK = StackState(
    api_url=OWN[0],
    ray_address=OWN[1],
    ray_folder="/tmp/none",
    ray_auth={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/none"},
    server=Daemon("1/1", "log"),
    ray=Daemon("1/1", "log"),
)


def test_what_is_named_counts_instead_of_the_stacks_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # an earlier `ray.init` sets it
    for same in (("", ""), OWN):
        assert STACK.with_external(*same) == STACK
    there = STACK.with_external("", "10.0.0.4:6379")
    assert (there.ray_address, there.api_url) == ("10.0.0.4:6379", STACK.api_url)
    settings = Settings(home=tmp_path)
    assert "RAY_AUTH_MODE" in build_environment(settings, StackSettings(), STACK)
    assert "RAY_AUTH_MODE" not in build_environment(
        settings, StackSettings(), there
    )  # the token is of our own node
    url = "http://prefect.internal/api"
    there = STACK.with_external(url, "")
    assert (there.api_url, there.ray_auth) == (url, STACK.ray_auth)
    ours = str(tmp_path / "prefect")
    assert build_environment(settings, StackSettings(), STACK)["PREFECT_HOME"] == ours
    assert build_environment(settings, StackSettings(), there).get("PREFECT_HOME") != ours


def test_the_cluster_of_a_training_and_that_of_the_stack_never_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.4:6379")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "theirs")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {}}')
    assert STACK.environment == {"PREFECT_API_URL": STACK.api_url}
    env = build_environment(Settings(home=tmp_path), StackSettings(), STACK)
    assert {name for name in env if name.startswith("RAY_AUTH_")} == set(STACK.ray_auth or {})
    assert not {"RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"} & env.keys()
    assert env["TRINITY_SYNC_STACK__RAY__ADDRESS"] == STACK.ray_address


@pytest.mark.parametrize("hook", ["uv run", "RAY_RUNTIME_ENV_HOOK"])
def test_no_other_environment_is_made_for_the_stacks_processes_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """As it is for a job of the project whose environment has the stack."""
    packages = tmp_path / ".venv/packages"
    packages.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    ask = "from ray._private.worker import _maybe_modify_runtime_env as f; assert not f(None, 0)"
    (packages / "run").write_text(f"{sys.executable} -c '{ask}'")
    if hook != "uv run":
        monkeypatch.setenv(hook, "of_their_cluster.hook")
    env = build_environment(Settings(home=tmp_path), StackSettings(), STACK)
    command = ["uv" if hook == "uv run" else "sh", "run"]
    done = subprocess.run(command, executable="/bin/sh", env=env, cwd=packages, timeout=250)
    assert done.returncode == 0


@pytest.mark.parametrize("address", ["127.0.0.1:9", "no address"])
def test_a_ray_that_cannot_be_joined_is_a_sentence(tmp_path: Path, address: str) -> None:
    dead = {"ray_address": "127.0.0.1:10", "server": None, "ray": None, "worker": None}
    (tmp_path / "stack.json").write_text(json.dumps(dead))
    env = {
        **os.environ,
        "TRINITY_SYNC_HOME": str(tmp_path),
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "TRINITY_SYNC_STACK__RAY__ADDRESS": address,
    }
    command = [sys.executable, "-m", "trinity_sync", "worker"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert address in done.stderr.splitlines()[-1]
