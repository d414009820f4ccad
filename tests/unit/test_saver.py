"""Without a stack, a process of the client's environment commits what trainers save."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.unit.job import Job
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.client.saver_control import LOCK, LOG, WAKE
from trinity_sync.errors import SaveError, SaveFailedError
from trinity_sync.fs.changes import lengthen_pauses
from trinity_sync.fs.locks import is_locked
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.restore import load_states

Make = Callable[..., CheckpointCoordinator]

TRAINER = """
import os, signal, sys
import torch
from trinity_sync import CheckpointCoordinator

saves = CheckpointCoordinator(sys.argv[1])
start = saves.latest_step(settle_s=60) or 0
if start:
    print(start, saves.load(start)["model"]["w"].unique().item(), flush=True)
for step in (start + 1, start + 2):
    saves.save(step, {"model": {"w": torch.full((9,), float(step))}, "optim": {"step": step}})
os.kill(os.getpid(), signal.SIGKILL)
"""


def await_that(holds: Callable[[], object], what: str) -> None:
    until, pauses = time.monotonic() + 60, lengthen_pauses()
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(next(pauses))


def savers_of(spool: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if line[-2:] == ["trinity_sync.saver", str(spool)]:
            found.append(process)
    return found


@pytest.fixture
def settings(spool_folder: Path, tmp_path: Path) -> Iterator[Settings]:
    yield Settings(spool=spool_folder, home=tmp_path / "home", saver="auto")
    for saver in savers_of(spool_folder):
        saver.kill()


@pytest.fixture
def coordinator(job: Job, settings: Settings) -> Iterator[Make]:
    made = []

    def make(**others: object) -> CheckpointCoordinator:
        made.append(CheckpointCoordinator(job.root, settings=settings, **others))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close(timeout=0)


def train(root: Path, settings: Settings, folder: Path) -> str:
    """Run a trainer that resumes, saves two steps and dies of SIGKILL; return what it prints."""
    program = folder / "train.py"
    program.write_text(TRAINER)
    variables = {**os.environ, **settings.to_variables(), "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, program, root],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout


def test_what_a_trainer_has_saved_before_it_was_killed_is_committed(
    tmp_path: Path, settings: Settings
) -> None:
    root, folder = tmp_path / "ckpts", tmp_path / "own"
    folder.mkdir()
    for name in ("tasks", "flows", "trinity_sync"):  # modules of the user
        (folder / f"{name}.py").write_text("raise RuntimeError")
    (folder / "trinity_sync.py").unlink()
    assert train(root, settings, folder) == ""
    assert train(root, settings, folder) == "2 2.0\n"
    await_that(lambda: read_latest_pointer(root, "checkpoint") == 4, "step 4 is committed")
    assert load_states(root, 4, "actor")["optim"] == {"step": 4}
    await_that(lambda: not savers_of(settings.spool), "it ends after its trainers")
    assert not is_locked(settings.spool / LOCK)
    assert not [*settings.spool.glob("*/*.ticket")]


def test_a_trainer_that_saves_again_later_finds_the_same_saver(
    coordinator: Make, settings: Settings
) -> None:
    saves = coordinator()
    for step in (1, 2):
        saves.save(step, {"model": {"w": torch.ones(3)}})
        saves.wait_all(60)
    (saver,) = savers_of(settings.spool)
    libraries = {Path(each.path).name for each in saver.memory_maps()}
    assert not any(name.startswith("libtorch") for name in libraries)
    assert saver.memory_info().rss < 100e6


def test_a_save_that_fails_is_told_and_can_be_submitted_again(coordinator: Make, job: Job) -> None:
    saves = coordinator(job={"rank_timeout_s": 5.0}, roles=("actor", "critic"))
    saves.save(4, {"model": {"w": torch.ones(3)}}, role="actor")
    with pytest.raises(SaveFailedError, match="role critic has submitted nothing"):
        saves.wait_all(60)
    for role in ("actor", "critic"):
        saves.save(4, {"model": {"w": torch.zeros(3)}}, role=role)
    saves.wait_all(60)
    assert load_states(job.root, 4, "actor")["model"]["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_saver_that_was_killed_is_started_again(
    coordinator: Make, settings: Settings, job: Job, signum: signal.Signals
) -> None:
    saves = coordinator()
    saves.save(1, {"model": {"w": torch.ones(3)}})
    saves.wait_all(60)
    (first,) = savers_of(settings.spool)
    first.suspend()
    saves.save(2, {"model": {"w": torch.ones(3)}})
    first.send_signal(signum)
    first.resume()
    saves.wait_all(60)
    assert read_latest_pointer(job.root, "checkpoint") == 2
    assert [each.pid for each in savers_of(settings.spool)] != [first.pid]


def test_a_saver_that_cannot_be_started_fails_the_save_by_name(
    coordinator: Make, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = coordinator()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(SaveError, match="the saver cannot be started"):
            saves.save(1, {"model": {"w": torch.ones(3)}})
        patch.setattr(sys, "executable", "/bin/false")
        saves.save(2, {"model": {"w": torch.ones(3)}})
        with pytest.raises(SaveFailedError, match=rf"exit code 1; its log is .*{LOG}"):
            saves.wait_all(60)
    saves.save(2, {"model": {"w": torch.ones(3)}})
    saves.wait_all(60)


def test_two_savers_of_a_spool_are_one(settings: Settings) -> None:
    command = [sys.executable, "-m", "trinity_sync.saver", str(settings.spool)]
    keeps = [subprocess.Popen(command) for _ in range(2)]
    await_that((settings.spool / WAKE).exists, "one of them serves")
    pipe = os.open(settings.spool / WAKE, os.O_WRONLY)
    await_that(lambda: [each.poll() for each in keeps].count(0) == 1, "the other one has ended")
    os.close(pipe)
    assert [each.wait(60) for each in keeps] == [0, 0]


@pytest.mark.parametrize("keep", ["of the save", "of the job"])
def test_older_steps_are_removed(coordinator: Make, job: Job, keep: str) -> None:
    saves = coordinator()
    if keep == "of the job":
        write_job_settings(job.root, {"keep": "last=2"})
    for step in range(1, 5):
        saves.save(step, {"model": {"w": torch.ones(3)}}, keep=2 if keep == "of the save" else 0)
        saves.wait_all(60)
    await_that(lambda: len([*job.root.glob("global_step_*/manifest.json")]) == 2, "two steps stay")


def test_functions_are_awaited(coordinator: Make, job: Job) -> None:
    import asyncio

    saves = coordinator()
    target = job.root / "global_step_3/actor/other.bin"

    def write() -> None:
        target.parent.mkdir(parents=True)
        target.write_bytes(b"mine")

    saves.save_async("other", write, 3)
    asyncio.run(saves.register_and_monitor(3, checkpoint_thread_count=1))
    saves.wait_all(60)
    assert read_latest_pointer(job.root, "checkpoint") == 3
    assert target.read_bytes() == b"mine"


def test_a_known_stack_is_asked_instead(
    coordinator: Make, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    saves = coordinator()
    saves.save(1, {"model": {"w": torch.ones(3)}})
    saves.close(timeout=0)
    assert savers_of(settings.spool) == []
