"""A saver judges only the roots that it sees: what it does not see waits, and has not failed."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.job import Job
from tests.support.savers import await_reaching, await_that, savers_of, suspend_saver
from tests.unit.saver.conftest import Make, Saves
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.client import commit_watcher
from trinity_sync.errors import RootAwayError, SaveFailedError, SaveTimeoutError
from trinity_sync.fs.records import encode_record
from trinity_sync.integrations.trainer_saves import TrainerSaves
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.pipeline.save import COMMIT
from trinity_sync.saver import Saver
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.identity import IDENTITY_FILE, JobIdentity
from trinity_sync.storage.commit import commit
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.persist import WriteOptions, persist

CONTAINER = """
import sys, torch
from trinity_sync import CheckpointCoordinator
with CheckpointCoordinator(sys.argv[1]) as saves:
    saves.save(1, {"model": {"w": torch.ones(3)}}).wait(250)
    print(saves.latest_step(), flush=True)
    sys.stdin.readline()
"""


def test_containers_with_one_spool_have_savers_of_their_own_that_see_their_roots(
    settings: Settings, tmp_path: Path
) -> None:
    root, started = tmp_path / "ckpts", []
    root.mkdir()
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a process may have no mounts of its own here")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        mount = f'mount --bind "{tmp_path / name}" "{root}" && exec "$@"'
        command = [*alone, "sh", "-c", mount, "sh", sys.executable, "-c", CONTAINER, str(root)]
        variables = {**os.environ, **settings.to_variables(), "PYTHONPATH": str(Path.cwd())}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(command, env=variables, text=True, **pipes))
        assert started[-1].stdout.readline() == "1\n"  # the first one still lives, with its saver
        assert (tmp_path / name / "global_step_1/manifest.json").exists()
    assert len(savers_of(settings.spool)) == 2
    assert [each.communicate("\n") and each.returncode for each in started] == [0, 0]


def test_a_trainer_that_waits_for_its_saves_is_told_that_its_root_stays_away(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.to_variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(commit_watcher, "PATIENCE_S", 0.1)
    saves, state = TrainerSaves(tmp_path / "ckpts"), {"model": {"w": torch.ones(3)}}
    saves.save(1, lambda: (state, {}))
    saves.wait_all()
    (tmp_path / "ckpts").rename(tmp_path / "moved")
    saves.save(2, lambda: (state, {}))
    with pytest.raises(SaveTimeoutError, match="not mounted here"):
        saves.wait_all()
    (tmp_path / "moved").rename(tmp_path / "ckpts")
    monkeypatch.undo()
    saves.wait_all()
    saves.close()


def take_away(root: Path, how: str) -> Path:
    """Do to a root what the loss of its mount does; return where it is kept."""
    away = root.rename(root.with_name("away"))
    if how != "is missing":
        root.mkdir()
    if how == "has another job":
        (root / IDENTITY_FILE).parent.mkdir()
        (root / IDENTITY_FILE).write_text(encode_record(JobIdentity("0" * 32, str(root))))
    elif how == "cannot be read":
        (root / ".trinity_sync").symlink_to(".trinity_sync")
    return away


@pytest.mark.parametrize("how", ["is missing", "is empty", "has another job", "cannot be read"])
def test_a_save_waits_while_its_root_is_away_and_says_so(
    saves: Saves, settings: Settings, job: Job, how: str
) -> None:
    saves.save(1, {"model": {"w": torch.ones(3)}}).wait(250)
    saver = suspend_saver(settings.spool)
    saves.save(2, {"model": {"w": torch.ones(3)}})
    away = take_away(job.root, how)
    saver.resume()
    await_that(saves.spool.away.exists, "the saver tells that it does not see the root")
    with pytest.raises(SaveTimeoutError, match=f"{job.root} "):
        saves.wait_all(0.1)
    assert [image.failed for image in saves.spool.tickets()[0]] == [False]
    shutil.rmtree(job.root, ignore_errors=True)
    away.rename(job.root)
    saves.wait_all(250)
    assert saves.latest_step() == 2
    await_that(lambda: not saves.spool.away.exists(), "the saver sees the root again")


def test_neither_a_save_nor_a_commit_nor_a_function_creates_a_root_that_is_away(
    coordinator: Make, job: Job, tmp_path: Path
) -> None:
    job.commit_states(1, {"model": {"w": torch.ones(3)}})
    saves = coordinator()
    saves.resumed_from(1)
    job.stage(2, {"model": {"w": torch.ones(3)}}, run=2)
    written, save = job.persist(2, run=2), job.save(2, run=2)
    private = (job.root / PRIVATE_FOLDER).rename(tmp_path / "away")
    calls = (
        lambda: saves.save(3, {"model": {"w": torch.ones(3)}}),
        lambda: persist(job.share, save, "model", WriteOptions()),
        lambda: commit(job.save(2, run=2), written),
        lambda: saves.save_sync(lambda: None, 3),
    )
    before = sorted(job.root.rglob("*"))
    for call in calls:
        with pytest.raises(RootAwayError, match=f"{job.root} is not mounted here.* Mount it"):
            call()
    assert sorted(job.root.rglob("*")) == before
    private.rename(job.root / PRIVATE_FOLDER)
    commit(job.save(2, run=2), written)


@pytest.mark.parametrize("how", ["is empty", "has another job"])
def test_a_first_call_begins_no_run_where_the_root_of_the_start_is_not(
    coordinator: Make, job: Job, how: str
) -> None:
    calls: dict[str, Callable[[CheckpointCoordinator], object]] = {
        "save": lambda saves: saves.save(3, {"model": {"w": torch.ones(3)}}),
        "upload": lambda saves: saves.upload(3, dict),
        "function": lambda saves: saves.save_sync(lambda: None, 3),
        "cut": lambda saves: saves.cut(3, ["critic"], timeout_s=0.1),
        "resume": lambda saves: saves._run.begin_at(1),
    }
    job.stage(1, {"model": {"w": torch.ones(3)}})
    job.commit(1)
    made = {name: coordinator() for name in calls}
    begun = coordinator()
    number = begun.begin()
    away = take_away(job.root, how)
    before = sorted(job.root.rglob("*"))
    for name, call in calls.items():
        with pytest.raises(RootAwayError, match=f"{job.root} is not mounted here.* Mount it"):
            call(made[name])
    begun.record_metrics(3, {"reward": 1.0})
    with pytest.raises(RootAwayError):
        begun.cut(3, ["critic"], timeout_s=0.1)
    begun._metrics._writer.submit(int).result(60)
    assert sorted(job.root.rglob("*")) == before
    shutil.rmtree(job.root)
    away.rename(job.root)
    begun.close(0)
    assert read_metrics(job.root, number, 3) == {"reward": 1.0}


@pytest.mark.parametrize("name", ["runs", "commit.lock", "functions.lock", "removal.lock"])
def test_a_link_in_the_place_of_a_folder_or_lock_fails_a_save_at_once_and_is_named(
    saves: Saves, job: Job, tmp_path: Path, name: str
) -> None:
    saves.save(1, {"model": {"w": torch.ones(3)}}).wait(250)
    path = job.root / PRIVATE_FOLDER / name
    if path.exists():
        path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    began = time.monotonic()
    saves.save(2, {"model": {"w": torch.ones(3)}}, keep=1)
    if name == "removal.lock":  # which follows the commit
        saves.wait_all(250)
        return
    with pytest.raises(SaveFailedError, match=f"is a link that another user.*{path}'"):
        saves.wait_all(250)
    assert time.monotonic() - began < sum(COMMIT.repeats_after)


def test_an_identity_that_is_torn_is_named_at_once(
    saves: Saves, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    saves.save(1, {"model": {"w": torch.ones(3)}}).wait(250)
    content = (job.root / IDENTITY_FILE).read_text()
    (job.root / IDENTITY_FILE).write_text("torn")
    saves.save(2, {"model": {"w": torch.ones(3)}})
    await_that(lambda: f"{IDENTITY_FILE}, which identifies" in caplog.text, "it is not named")
    (job.root / IDENTITY_FILE).write_text(content)
    saves.wait_all(250)


def test_a_saver_waits_for_no_root_by_the_time_of_a_clock_that_was_set_back(
    settings: Settings, job: Job
) -> None:
    job.stage(1, {"model": {"w": torch.ones(3)}})
    saver, away = Saver(settings.spool, StackSettings()), take_away(job.root, "is empty")
    assert saver._is_away(job.spool)
    assert saver._waiting[job.spool.folder]
    os.utime(job.spool.away, (9e9, 9e9))
    assert saver._is_away(job.spool)
    assert not saver._waiting[job.spool.folder]
    shutil.rmtree(job.root)
    away.rename(job.root)


@pytest.mark.parametrize("is_moved", [False, True], ids=["mounted again", "a link to another disk"])
def test_a_saver_ends_without_a_root_for_long_and_the_next_start_commits_what_waits(
    coordinator: Make, settings: Settings, job: Job, is_moved: bool
) -> None:
    saves = coordinator()
    saves.save(1, {"model": {"w": torch.ones(3)}}).wait(250)
    saver = suspend_saver(settings.spool)
    saves.save(2, {"model": {"w": torch.ones(3)}})
    away = take_away(job.root, "is empty")
    saves.close(0)
    await_reaching()
    saves._watcher._trigger._saver.close()  # as its process ends
    saver.resume()
    await_that(saves.spool.away.exists, "the saver does not see the root")
    os.utime(saves.spool.away, (0, 0))  # since long
    saver.wait(250)
    assert f"{job.root} is not mounted here" in (settings.home / "saver.log").read_text()
    coordinator().close(0)  # a start without the mount
    shutil.rmtree(job.root)
    if is_moved:
        job.root.symlink_to(away)  # starts resolve it
    else:
        away.rename(job.root)
    assert coordinator().latest_step(settle_s=60) == 2
