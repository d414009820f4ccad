"""A trainer whose environment has the client alone saves through a stack in another environment."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.database import lay_tables
from tests.support.environments import pip
from tests.support.job import Job
from trinity_sync import Settings
from trinity_sync.storage.discovery import require_committed

OF_THE_STACK = ("prefect", "fastapi", "sqlalchemy", "alembic", "ray", "verl")

TRAIN = f"""
import sys
from importlib.util import find_spec

import torch
import torch.distributed as dist

from trinity_sync import CheckpointCoordinator

assert not [name for name in {OF_THE_STACK!r} if find_spec(name)]
dist.init_process_group("gloo")
rank = dist.get_rank()
with CheckpointCoordinator.of_process_group(sys.argv[1]) as saves:
    saves.save(1, {{"model": {{"w": torch.full((1000,), float(rank))}}}})
with CheckpointCoordinator.of_process_group(sys.argv[1]) as saves:
    assert saves.load(1)["model"]["w"].eq(rank).all()
dist.destroy_process_group()
"""


Done = subprocess.CompletedProcess[str]


def call(*words: object, env: dict[str, str], cwd: Path | None = None) -> Done:
    """Call a program that ``PATH`` of the variables names."""
    command = ["env", *map(str, words)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True)


def test_both_environments_are_whole(client: Path, stack_environment: Path) -> None:
    for binaries in (client, stack_environment):
        assert pip(binaries, "check") == "No broken requirements found."


def test_two_ranks_save_through_a_stack_of_another_environment(
    client: Path, stack_environment: Path, stack_settings: Settings, tmp_path: Path, root: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    for name in ("flows", "tasks", "rich", "yaml", "uvicorn"):
        module = tmp_path / f"theirs/{name}.py"
        module.parent.mkdir(exist_ok=True)
        module.write_text(f"raise RuntimeError('the {name} of the trainer')\n")
    env = {
        **os.environ,
        "PYTHONPATH": str(tmp_path / "theirs"),
        "TRINITY_SYNC_HOME": str(tmp_path / "home"),
        "TRINITY_SYNC_SPOOL": str(stack_settings.spool),
        "PREFECT_API_URL": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(stack_environment), os.environ["PATH"]]),
    }
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    lay_tables(Settings(home=tmp_path / "home"))
    try:
        command = ["trinity-sync", "run", "--", client / "python", *ranks, script, root]
        done = call(*command, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        listed = call("trinity-sync", "status", env=env)
        assert listed.returncode == 0, listed.stdout + listed.stderr
    finally:
        assert call("trinity-sync", "down", "--yes", env=env).returncode == 0
    assert len(require_committed(root, 1).files) == 2


def test_version_is_that_of_the_stack_or_of_the_environment_whose_python_is_asked(
    client: Path, stack_environment: Path, tmp_path: Path
) -> None:
    environment = os.environ | {"PATH": f"{client}:{stack_environment}:{os.environ['PATH']}"}
    of_stack, of_client = (
        call(client / words[0], *words[1:], "--version", env=environment, cwd=tmp_path).stdout
        for words in (["trinity-sync"], ["python", "-m", "trinity_sync"])
    )
    assert str(stack_environment) in of_stack
    assert "no prefect" in of_client


@pytest.fixture
def alone(client: Path, tmp_path: Path) -> dict[str, str]:
    """The variables of a command in the trainer's environment, on a machine without a stack."""
    return {
        "PATH": os.pathsep.join([str(client), "/usr/bin", "/bin"]),
        "TRINITY_SYNC_HOME": str(tmp_path / "home"),
        "TRINITY_SYNC_SPOOL": str(tmp_path / "spool"),
    }


COMMANDS = """
import json, sys
from typer.testing import CliRunner
from trinity_sync.cli.commands import app

for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, [*map(str, words)])
    print(done.stderr, file=sys.stderr)
    assert done.exit_code == 0, (words, done.output)
"""


def test_commands_about_files_work_in_a_trainers_environment(
    job: Job, alone: dict[str, str], tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        job.stage(step, {"model": {"w": torch.full((4,), step)}})
        job.commit(step)
    root, store = job.root, f"file://{tmp_path}/store"
    commands = [
        ["ls", root],
        ["show", root, "latest"],
        ["runs", root],
        ["wait", root, 30],
        ["verify", root],
        ["pin", root, 10],
        ["pin", root, 20, "--name", "best"],
        ["unpin", root, "best"],
        ["unpin", root, 10],
        ["metrics", root, 30, "reward=0.8"],
        ["jobs", "set", root, "keep=last=3"],
        ["remote", "push", root, 30, store],
        ["remote", "pull", tmp_path / "back", 30, store],
        ["export", "dcp", root, 30, tmp_path / "dcp"],
        ["readers", root],
        ["report", root, "--html", tmp_path / "page.html"],
        ["doctor", root],
        ["prune", root, "--keep", "last=2", "--yes"],
        ["rewind", root, 30, "--yes"],
        ["jobs", "ls"],
        ["status"],
        ["config", "show"],
        ["down"],
        ["--version"],
    ]
    done = call(
        "python", "-c", COMMANDS, json.dumps(commands, default=str), env=alone, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("error|warning|Traceback", done.stderr), done.stderr
    assert require_committed(tmp_path / "back", 30)
    assert "Prefect" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("words", ["up", "run ls", "jobs forget ."])
def test_a_command_of_the_stack_names_the_extra_in_a_trainers_environment(
    words: str, alone: dict[str, str], tmp_path: Path
) -> None:
    done = call("trinity-sync", *words.split(), env=alone, cwd=tmp_path)
    error, hint = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs the stack" in error
    assert 'pip install "trinity-sync[stack]"' in hint


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("trinity_sync.integrations.verl.fsdp.manager", "verl", "verl"),
        ("trinity_sync.integrations.huggingface", "transformers", "hf"),
        ("trinity_sync.integrations.lightning", "lightning", "lightning"),
        ("trinity_sync.integrations.torchtitan", "torchtitan", "torchtitan"),
    ],
)
def test_an_integration_without_its_package_names_that_and_the_extra(
    client: Path, module: str, package: str, extra: str
) -> None:
    command = [client / "python", "-c", f"import {module}"]
    done = subprocess.run(command, cwd=client, capture_output=True, text=True)
    said = done.stderr.splitlines()[-1]
    assert "MissingPackageError" in said
    assert f"{package} is not installed" in said
    assert f'pip install "trinity-sync[{extra}]"' in said
