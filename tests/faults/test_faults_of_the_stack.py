"""What a flow run begins and cannot do, for a fault of the stack, the saver of the node commits."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.slow_save import (
    assert_committed,
    begin_slow_save,
    key,
    kill_worker,
    ray_processes,
)
from tests.integration.prefect_api import Api
from tests.support.savers import end_savers
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.client import commit_watcher
from trinity_sync.stack import local_stack
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import require_committed


@pytest.fixture
def saves(
    stack: StackState, stack_settings: Settings, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CheckpointCoordinator]:
    """A job on the session's stack with a saver, which waits long for what the stack may do."""
    monkeypatch.setattr(commit_watcher, "HURRY_S", 600.0)
    settings = stack_settings.model_copy(update={"saver": "auto", "saver_after_s": 600.0})
    with CheckpointCoordinator(root, settings=settings) as made:
        made.save(1, {"model": {"w": torch.ones(10)}})
        made.wait_all(250)
        assert not is_by_saver(root, 1)
        yield made
    end_savers(settings.spool)


def is_by_saver(root: Path, step: int) -> bool:
    return require_committed(root, step).timings[0].by_saver


def is_by_saver_after(saves: CheckpointCoordinator, step: int) -> bool:
    """Whether a save, which commits in any case, was the saver's."""
    assert_committed(saves.root, step)
    return is_by_saver(saves.root, step)


def assert_left_to_the_saver(saves: CheckpointCoordinator, api: Api, step: int, why: str) -> None:
    assert is_by_saver_after(saves, step)
    run = api.ended(api.run_of(key(saves, step)).id)
    assert (run.state.name, why in str(run.state.message)) == ("Completed", True)


def test_a_process_of_ray_that_is_killed_in_mid_write(
    saves: CheckpointCoordinator, root: Path, stack_settings: Settings, api: Api
) -> None:
    begin_slow_save(saves, root, 2)
    (writer,) = ray_processes(stack_settings, "ray::persist-model")
    writer.kill()
    assert_left_to_the_saver(saves, api, 2, "has not written them")


def test_files_of_ray_that_a_cleaner_has_removed_in_mid_write(
    saves: CheckpointCoordinator, root: Path, stack_settings: Settings, stack: StackState, api: Api
) -> None:
    begin_slow_save(saves, root, 2)
    (writer,) = ray_processes(stack_settings, "ray::persist-model")
    writer.suspend()
    logs = [*Path(stack.ray_folder).glob("ray/session_2*/logs")]
    for each in logs:
        each.rename(each.with_name("removed"))
    try:
        is_hurt = local_stack.status(stack_settings).services[1].state == "unresponsive"
        assert is_hurt or all(each.exists() for each in logs)  # a new process of Ray makes it again
        writer.resume()
        if is_by_saver_after(saves, 2):  # unless a new process has made it in time
            assert_left_to_the_saver(saves, api, 2, "Ray cannot run persist-model")
    finally:
        for each in logs:
            put_back(each.with_name("removed"), each)


def put_back(folder: Path, place: Path) -> None:
    """Rename a folder to its old place, with the files that have been made there meanwhile."""
    for made in place.glob("*.*"):
        made.rename(folder / made.name)
    shutil.rmtree(place, ignore_errors=True)
    folder.rename(place)


def test_a_worker_that_ends_in_mid_write(
    saves: CheckpointCoordinator, root: Path, stack_settings: Settings
) -> None:
    begin_slow_save(saves, root, 2)
    try:
        kill_worker(stack_settings)
        assert local_stack.status(stack_settings).services[2].state == "dead"
        assert_committed(root, 2)
        assert is_by_saver(root, 2)
    finally:
        local_stack.up(stack_settings)
