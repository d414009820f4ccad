"""``trinity-sync worker`` joins what it is told to join, and says in a sentence why it cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_sync.orchestration.daemon import Daemon
from trinity_sync.orchestration.parts import StackState, environment
from trinity_sync.settings import Settings

OWN = {"PREFECT_API_URL": "http://127.0.0.1:10/api", "RAY_ADDRESS": "127.0.0.1:10"}
STACK = StackState(
    api_url=OWN["PREFECT_API_URL"],
    ray_address=OWN["RAY_ADDRESS"],
    ray_folder="/tmp/none",
    ray_auth={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/none"},
    server=Daemon("1/1", "log"),
    ray=Daemon("1/1", "log"),
)


def test_what_the_environment_names_counts_instead_of_the_stacks_part() -> None:
    for same in ({}, OWN, {"RAY_ADDRESS": ""}):
        assert STACK.where_named(same) == STACK
    there = STACK.where_named({"RAY_ADDRESS": "10.0.0.4:6379"})
    assert (there.ray_address, there.api_url) == ("10.0.0.4:6379", STACK.api_url)
    assert "RAY_AUTH_MODE" not in there.environment  # the token is that of our own node
    url = "http://prefect.internal/api"
    there = STACK.where_named({"PREFECT_API_URL": url})
    assert (there.api_url, there.ray_auth) == (url, STACK.ray_auth)


def test_a_server_that_is_not_the_stacks_is_asked_with_the_callers_profile(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    ours = str(tmp_path / "prefect")
    assert environment(settings, STACK)["PREFECT_HOME"] == ours
    there = STACK.where_named({"PREFECT_API_URL": "http://prefect.internal/api"})
    assert environment(settings, there).get("PREFECT_HOME") != ours


@pytest.mark.parametrize("address", ["127.0.0.1:9", "no address"])
def test_a_ray_that_cannot_be_joined_is_a_sentence(tmp_path: Path, address: str) -> None:
    dead = {"ray_address": "127.0.0.1:10", "server": None, "ray": None, "worker": None}
    (tmp_path / "stack.json").write_text(json.dumps(dead))
    env = {
        **os.environ,
        "TRINITY_SYNC_HOME": str(tmp_path),
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "RAY_ADDRESS": address,
    }
    command = [sys.executable, "-m", "trinity_sync.cli", "worker"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"RAY_ADDRESS={address}" in done.stderr.splitlines()[-1]
