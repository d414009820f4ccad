"""The demo leaves nothing behind but its folder, and ends at Ctrl-C in one line."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.orchestration.job_registry import list_known_roots
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.identity import register_root
from trinity_sync.snapshot.spool import open_job_spool

DEMO = Path(__file__).parents[3] / "examples/demo/demo.py"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
"""With the command of this environment, which has client and stack."""


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo's program, whose home has no stack."""
    monkeypatch.setenv("PATH", PATH)
    monkeypatch.setenv("TRINITY_SYNC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRINITY_SYNC_SAVER", "auto")  # as on a fresh machine
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("story", [0, 1])
def test_the_demo_ends_the_stack_that_it_has_started(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: int
) -> None:
    called = []
    command = demo.trinity_sync

    def call(*arguments: str, **variables: str) -> int:
        called.append(arguments[0])
        return command(*arguments, **variables)

    monkeypatch.setattr(demo, "OUTPUT", tmp_path / "demo-output")
    monkeypatch.setattr(demo, "trinity_sync", call)
    monkeypatch.setattr(demo, "run_story", lambda *_: story)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert demo.main() == story
    assert called[:2] == ["status", "down"]


def test_the_demos_images_and_notes_go_and_those_of_other_jobs_stay(
    demo: Any, tmp_path: Path, spool_folder: Path, settings: Settings
) -> None:
    output = tmp_path / "demo-output"
    for root in (mine := output / "job-1", theirs := tmp_path / "job-2"):
        root.mkdir(parents=True)
        register_root(settings.home, root)
    spools = [open_job_spool(spool_folder, root).folder for root in (mine, theirs)]
    (output / "rendezvous-1").touch()
    demo.clean_up(settings, output)
    assert [spool.exists() for spool in spools] == [False, True]
    assert list_known_roots(settings, StackSettings()) == [theirs]
    assert list(output.iterdir()) == [mine]


def test_ctrl_c_while_the_stack_starts_is_one_line_and_130(tmp_path: Path) -> None:
    home = tmp_path / "home"
    env = os.environ | {
        "TRINITY_SYNC_HOME": str(home),
        "PATH": PATH,
        "PYTHONPATH": str(DEMO.parents[2]),
        "PYTHONUNBUFFERED": "1",
    }
    home.mkdir()
    with acquire_file_lock(
        home / "stack.lock"
    ):  # another start is under way, and this one waits for it
        process = subprocess.Popen(
            [sys.executable, DEMO],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "starting" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=250)
    assert process.returncode == 130, said
    assert said.count("\n") == 1
