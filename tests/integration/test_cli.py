"""The command, as a user runs it: a process of its own, its output and its exit code."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import left_of, processes_of
from tests.support.forked import run_command
from tests.support.job import Job
from tests.support.waiting import until
from trinity_sync import Settings
from trinity_sync.stack import local_stack
from trinity_sync.stack.services import StackState

COMMAND = [sys.executable, "-m", "trinity_sync"]


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, env={**os.environ, "COLUMNS": "200", **variables})


def is_one_sentence(text: str) -> bool:
    """Whether a text is an error in one line, and perhaps a hint in a second one."""
    error, *hints = text.splitlines()
    return (
        error.startswith("error: ")
        and all(line.startswith("hint: ") for line in hints[:1])
        and (len(hints) < 2)
    )


def rows_of(done: subprocess.CompletedProcess[str], noun: str = "steps") -> list[dict[str, Any]]:
    """The rows of a document."""
    return json.loads(done.stdout)[noun]


def test_help_shows_examples_and_imports_nothing_heavy() -> None:
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run([*COMMAND, "--help"], env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "trinity-sync ls ckpts" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "ray", "prefect", "sqlalchemy", "numpy"}


NO_STACK = {"PREFECT_API_URL": "", "TRINITY_SYNC_STACK__RAY__ADDRESS": ""}


@pytest.mark.parametrize(
    ("code", "words", "variables", "told"),
    [
        (2, "down", {"TRINITY_SYNC_SLOTS": "9"}, "TRINITY_SYNC_SLOTS=9"),
        (1, "worker", NO_STACK, "trinity-sync up"),
        (1, "up", {"TRINITY_SYNC_HOME": "{}/file/home"}, "TRINITY_SYNC_HOME"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    root: Path, code: int, words: str, variables: dict[str, str], told: str
) -> None:
    (root / "global_step_3").mkdir()
    (root / "file").touch()
    given = {"TRINITY_SYNC_HOME": "{}/home"} | variables
    own = {name: value.format(root) for name, value in given.items()}
    done = run(*words.format(root).split(), **own)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert is_one_sentence(done.stderr)
    assert told in done.stderr


def test_down_ends_well_where_the_spool_cannot_be_trusted(root: Path, spool_folder: Path) -> None:
    spool_folder.chmod(0o755)
    done = run("down", TRINITY_SYNC_HOME=str(root), TRINITY_SYNC_SPOOL=str(spool_folder))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("saver", "code", "said"), [("stack", 3, "absent"), ("auto", 0, "not used")]
)
def test_status_without_a_stack_says_that_nothing_runs(
    tmp_path: Path, spool_folder: Path, saver: str, code: int, said: str
) -> None:
    home = {"TRINITY_SYNC_HOME": str(tmp_path), "TRINITY_SYNC_SPOOL": str(spool_folder)}
    done = run("status", "-o", "json", TRINITY_SYNC_SAVER=saver, **home, **NO_STACK)
    assert done.returncode == code
    *services, of_node = json.loads(done.stdout)["stack"]["services"]
    assert {each["status"] for each in services} == {said}
    assert (of_node["name"], of_node["status"]) == ("saver", "idle")


def test_doctor_finds_a_working_stack_and_a_job_in_order(
    stack: StackState, root: Path, job: Job
) -> None:
    job.stage(4, {"model": {"w": torch.zeros(9)}})
    job.commit(4)
    done = run("doctor", root, "-o", "json")
    checks = {check["name"]: check for check in rows_of(done, "checks")}
    assert done.returncode == 0, done.stdout
    for name in ("prefect server", "clock", "work pool", "worker", "ray", "spool", "disk", "steps"):
        assert checks[name]["status"] == "ok", checks[name]


def test_env_prints_what_a_shell_can_evaluate(stack: StackState) -> None:
    exports = run("env").stdout
    shell = subprocess.run(
        ["bash", "-c", f"{exports}\necho $PREFECT_API_URL; env | grep -c ^RAY_"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert shell.stdout.split() == [stack.api_url, "0"]


def test_run_gives_the_command_what_a_trainer_needs_and_no_ray_of_the_stacks(
    stack: StackState,
) -> None:
    told = (
        "import os, sys; print(os.environ['PREFECT_API_URL'], sys.argv[1:],"
        " os.environ.get('RAY_ADDRESS')); sys.exit(7)"
    )
    command = ["run", "--", sys.executable, "-c", told, "--export", "-v"]
    done = run(*command, PREFECT_API_URL="", RAY_ADDRESS="of the training")
    assert done.returncode == 7, done.stderr
    assert done.stdout.strip() == f"{stack.api_url} ['--export', '-v'] of the training"
    assert f"Prefect UI: {stack.api_url.removesuffix('/api')}/runs" in done.stderr


def test_run_says_that_there_is_no_such_command(stack: StackState) -> None:
    done = run("run", "no-such-command")
    assert done.returncode == 127
    assert done.stderr.splitlines()[-1].startswith("error: cannot run no-such-command")


def test_ctrl_c_while_it_starts_leaves_nothing_behind(stack: StackState, tmp_path: Path) -> None:
    env = {**os.environ, "TRINITY_SYNC_HOME": str(tmp_path)}
    up = subprocess.Popen([*COMMAND, "up"], env=env, stderr=subprocess.PIPE, text=True)
    settings = Settings(home=tmp_path)
    until(
        lambda: local_stack.read_state(settings.home) or up.poll() is not None,
        "its stack",
        pause=0.01,
    )
    found = local_stack.read_state(settings.home)
    assert up.poll() is None
    processes = processes_of(found)
    assert processes
    try:
        up.send_signal(signal.SIGINT)
        _, errors = up.communicate(timeout=250)
        assert up.returncode == 130
        assert "Traceback" not in errors
        assert not left_of(processes)
        assert local_stack.read_state(settings.home) is None
        assert not Path(found.ray_folder).exists()
    finally:
        local_stack.down(settings)


def test_a_training_dies_of_a_broken_pipe_as_from_the_shell(
    stack: StackState, stack_settings: Settings
) -> None:
    done = run("run", "--", "grep", "SigIgn", "/proc/self/status")
    assert done.returncode == 0, done.stderr
    ignored = int(done.stdout.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))
