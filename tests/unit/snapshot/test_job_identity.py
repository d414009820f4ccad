"""A job is not its path: its root is removed, moved or copied, and trained in again."""

import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support import prefect_stand_in
from tests.support.job import Job, find_orphaned_saves
from tests.support.prefect_stand_in import Server, Trigger
from tests.support.steps import commit_files
from trinity_sync.catalog import list_jobs, open_catalog, rebuild, remove_job
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import CommitError, SpoolFullError
from trinity_sync.fs.file_system import find_room
from trinity_sync.layout import job_id_of
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import end_images
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import IDENTITY_FILE, job_id, open_identity, read_identity
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.spool import list_job_spools
from trinity_sync.storage.commit import resolve_late_image
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.manifest import read_manifest

KEY = "the same at each start"


@pytest.fixture
def settings(tmp_path: Path, spool_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    prefect_stand_in.without_catalog_and_pages(monkeypatch)
    for name, value in (("HOME", tmp_path / "home"), ("SPOOL", spool_folder)):
        monkeypatch.setenv(f"TRINITY_SYNC_{name}", str(value))
    return Settings()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ckpts"


@pytest.fixture
def server() -> Server:
    return Server()


def begin(root: Path, server: Server) -> CheckpointCoordinator:
    return CheckpointCoordinator(root, run_key=KEY, trigger=Trigger(server))


def save(saves: CheckpointCoordinator, step: int, value: float) -> None:
    """Submit a step of all components, which hold ``value``."""
    states = {name: {"w": torch.full((3,), value)} for name in ("model", "optim", "extra_state")}
    saves.save(step, states)


def train(root: Path, server: Server, step: int, value: float) -> None:
    """Submit a step and end, without waiting for its commit."""
    saves = begin(root, server)
    save(saves, step, value)
    saves.close(timeout=0)


def work(server: Server, settings: Settings) -> list[str]:
    """Do what the worker does: request the runs of images, and execute those that have not ended.

    Returns:
        How each of them ended.
    """
    server.recover_images(settings.spool)
    ends = []
    for run in [each for each in server.runs.values() if each.state == "pending"]:
        attempt = server.begin(run)
        while attempt in run.attempts:
            end = run.advance(attempt)
        ends.append(end)
    return ends


def load(root: Path, step: int) -> dict[str, float]:
    """Return the value of each component of a committed step."""
    with CheckpointCoordinator(root, trigger=Trigger(Server())) as saves:
        return {name: float(state["w"][0]) for name, state in saves.load(step).items()}


def leave(root: Path, how: str) -> None:
    shutil.rmtree(root) if how == "removed" else root.rename(root.with_name("moved"))


@pytest.mark.parametrize("how", ["removed", "moved"])
@pytest.mark.parametrize("state", ["pending", "failed", "refused"])
def test_a_training_that_begins_where_another_was_commits_its_own_states(
    root: Path, server: Server, settings: Settings, how: str, state: str
) -> None:
    train(root, server, 20, 1.0)
    if state == "failed":
        for spool in list_job_spools(settings.spool):
            save = spool.tickets()[0][0].ticket.save
            end_images(spool, SaveRequest(**vars(save)), "the disk was full")
    if state == "pending":
        server.runs.clear()
    leave(root, how)
    if state == "refused":
        assert "is not mounted here" in work(server, settings)[0]
    train(root, server, 20, 2.0)
    assert work(server, settings)[-1] == "completed"
    assert load(root, 20) == dict.fromkeys(("model", "optim", "extra_state"), 2.0)


def test_a_training_in_another_container_keeps_its_images_although_its_root_has_the_same_path(
    root: Path, server: Server, settings: Settings
) -> None:
    living = begin(root, server)
    save(living, 20, 1.0)
    root.rename(root.with_name("as the container sees it"))
    train(root, server, 20, 2.0)
    folders = [each for each in list_job_spools(settings.spool) if each.tickets()[0]]
    assert {each.folder.name for each in folders} >= {living.spool.folder.name}
    living.close(timeout=0)


def test_an_old_run_that_is_retried_in_a_new_root_commits_nothing_and_fails_no_new_save(
    root: Path, server: Server, settings: Settings
) -> None:
    train(root, server, 20, 1.0)
    (old,) = server.runs.values()
    attempt = server.begin(old)
    assert old.advance(attempt) == "find_nodes"
    shutil.rmtree(root)
    train(root, server, 20, 2.0)
    while attempt in old.attempts:
        end = old.advance(attempt)
    assert "RootAwayError" in old.message, end
    assert work(server, settings) == ["completed"]
    assert load(root, 20)["model"] == 2.0


def test_an_image_that_comes_late_joins_no_commit_of_the_new_root(
    root: Path, server: Server, settings: Settings
) -> None:
    train(root, server, 20, 1.0)
    (old,) = list_job_spools(settings.spool)
    late = old.tickets()[0][0]
    kept = settings.spool.with_name(f"{settings.spool.name}-kept")
    old.folder.rename(kept)
    shutil.rmtree(root)
    server.runs.clear()
    train(root, server, 20, 1.0)
    assert work(server, settings) == ["completed"]
    before = read_manifest(root, 20)
    kept.rename(old.folder)
    resolve_late_image(late.ticket.save, late)
    assert not late.failed  # it waits for its own root
    assert read_manifest(root, 20) == before


def test_images_of_a_removed_root_wait_until_their_memory_is_needed_and_are_named_then(
    root: Path, server: Server, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    train(root, server, 20, 1.0)
    train(root, server, 30, 1.0)
    (old,) = list_job_spools(settings.spool)
    shutil.rmtree(root)
    saves = begin(root, server)
    assert f"steps [20, 30] wait for job {old.folder.name} at {root}" in caplog.text
    (room,) = {find_room(old.folder).nbytes}
    saves.spool.require_room(room // 2)
    assert old.folder.exists()
    with pytest.raises(SpoolFullError):
        saves.spool.require_room(room * 2)
    assert old.folder.exists()  # nothing needs its memory yet
    with pytest.raises(SpoolFullError):
        Slot(saves.spool.slot("actor", "model", 0, 0)).image(room * 2)
    assert not old.folder.exists()
    begin(root, server).close()
    assert caplog.text.count("are lost") == 1
    saves.close()


def test_images_of_a_moved_root_wait_for_its_return_and_are_committed_nowhere_else(
    root: Path, server: Server, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    train(root, server, 20, 1.0)
    identity, moved = read_identity(root), root.with_name("moved")
    leave(root, "moved")
    with caplog.at_level(logging.WARNING):
        begin(moved, server).close()
    assert f"at {root}, and are not committed in {moved}" in caplog.text
    assert read_identity(moved) == identity
    assert "is not mounted here" in work(server, settings)[0]
    assert find_newest(moved) is None
    assert not root.exists()


def test_a_copy_is_a_job_of_its_own_and_a_moved_root_is_not(
    root: Path, server: Server, settings: Settings
) -> None:
    train(root, server, 20, 1.0)
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    assert read_identity(copy) == read_identity(root)
    train(copy, server, 30, 3.0)
    assert read_identity(copy) != read_identity(root)
    assert work(server, settings) == ["completed", "completed"]
    assert (find_newest(root).step, find_newest(copy).step) == (20, 30)
    assert load(root, 20)["model"] == 1.0


def test_a_root_that_is_mounted_at_two_paths_is_one_job(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    identity, link = open_identity(root), tmp_path / "link"
    link.symlink_to(root)
    assert open_identity(link) == identity  # as by another mount, this path is not resolved
    assert open_identity(root) == identity


def test_a_root_that_is_only_read_gets_no_identity(root: Path) -> None:
    root.mkdir()
    assert read_identity(root) == ""
    assert job_id(root) == job_id_of(root)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("how", ["is empty", "gets a training", "gets a training that saves"])
def test_a_save_waits_for_a_root_that_is_not_mounted(
    root: Path, server: Server, settings: Settings, how: str
) -> None:
    train(root, server, 20, 1.0)
    (job,) = list_job_spools(settings.spool)
    away = root.rename(root.with_name("away"))
    root.mkdir()  # the mount point
    if how == "gets a training":
        begin(root, server).close()
    elif how == "gets a training that saves":
        train(root, server, 20, 2.0)
    assert "is not mounted" in work(server, settings)[0]
    assert [image.failed for image in job.tickets()[0]] == [False] * 3
    shutil.rmtree(root)
    away.rename(root)
    assert work(server, settings) == ["completed"]
    assert load(root, 20)["model"] == 1.0


def test_a_torn_identity_is_an_error_that_names_its_file(root: Path) -> None:
    root.mkdir()
    open_identity(root)
    (root / IDENTITY_FILE).write_text("{")
    with pytest.raises(CommitError, match=r"identity\.json"):
        job_id(root)


def test_a_removed_job_leaves_the_catalog_also_if_another_is_in_its_root(
    root: Path, tmp_path: Path
) -> None:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as engine:
        for value in (1, 2):
            root.mkdir()
            open_identity(root)
            commit_files(root, value)
            rebuild(engine, root)
            if value == 1:
                shutil.rmtree(root)
        steps = [[step.step for step in job.steps] for job in list_jobs(engine)]
        assert sorted(steps) == [[1], [2]]
        shutil.rmtree(root)
        assert remove_job(engine, root)
        assert list_jobs(engine) == []


def test_images_that_a_node_has_of_both_jobs_are_told_apart_by_its_worker(
    root: Path, settings: Settings
) -> None:
    """The node takes no part in the new training, whose start would free the old images."""
    jobs = []
    for step in (20, 10):
        shutil.rmtree(root, ignore_errors=True)
        jobs.append(Job.open(root, settings.spool))
        jobs[-1].stage(step, {"model": {"w": torch.zeros(3)}})
    later = time.time() + 60
    found = find_orphaned_saves(settings.spool, grace_s=0, clock=lambda: later)
    assert [(each.step, each.identity) for each in found] == [(10, read_identity(root))]
    images = [image for job in jobs for image in job.spool.tickets()[0]]
    assert [image.failed for image in images] == [False, False]
    for job in jobs:
        job.close()


def test_processes_that_open_a_root_at_once_agree_on_its_identity(root: Path) -> None:
    root.mkdir()
    start = threading.Barrier(8)

    def open_together(_: int) -> str:
        start.wait(250)
        return open_identity(root)

    with ThreadPoolExecutor(8) as opening:
        assert {*opening.map(open_together, range(8))} == {read_identity(root)}
        copy = root.with_name("copy")
        shutil.copytree(root, copy)
        root = copy
        found = {*opening.map(open_together, range(8))}
    assert found == {read_identity(copy)}
