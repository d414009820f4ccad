"""Whatever dies while a save is under way: the last commit loads, the save ends or is seen failed.

The session's stack writes 40 MB/s, so that a save of 60 MB is under way for more than a second.
"""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from prefect.states import AwaitingRetry

from tests.integration.prefect_api import Api, until
from trinity_sync.coordinator import CheckpointCoordinator
from trinity_sync.errors import SaveFailed
from trinity_sync.orchestration import stack as stack_module
from trinity_sync.orchestration.parts import StackState
from trinity_sync.settings import Settings
from trinity_sync.storage.iteration import read_iteration
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.steps import newest, require_committed

SIZE = 15_000_000
FILE = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ckpts"


@pytest.fixture
def api(stack: StackState) -> Api:
    return Api()


@pytest.fixture
def saves(
    stack: StackState, stack_settings: Settings, root: Path
) -> Iterator[CheckpointCoordinator]:
    """A job whose step 1 is committed."""
    coordinator = CheckpointCoordinator(root, settings=stack_settings)
    coordinator.save(1, {"model": {"w": torch.ones(10)}})
    coordinator.wait_all(120)
    yield coordinator
    coordinator.close()


def assert_only_step_1_counts(root: Path) -> None:
    assert newest(root).step == 1
    assert read_iteration(root, "checkpoint") == 1
    assert torch.load(root / "global_step_1" / FILE)["w"].tolist() == [1.0] * 10


def assert_committed(root: Path, step: int) -> None:
    until(lambda: read_manifest(root, step), f"the commit of step {step}", 150)
    require_committed(root, step)
    until(lambda: read_iteration(root, "checkpoint") == step, "the iteration file")
    weights = torch.load(root / f"global_step_{step}" / FILE)["w"]
    assert torch.equal(weights, torch.full((SIZE,), float(step)))


def begin_slow_save(saves: CheckpointCoordinator, root: Path, step: int) -> None:
    """Hand a save over and return while its shard is being written."""
    saves.save(step, {"model": {"w": torch.full((SIZE,), float(step))}})
    folder = root / f"global_step_{step}/actor"
    until(lambda: list(folder.glob(".*.tmp")), "the first bytes on disk")
    assert read_manifest(root, step) is None


def key(saves: CheckpointCoordinator, step: int) -> str:
    return saves.request_key(step, "checkpoint")


def worker_of(settings: Settings) -> psutil.Process:
    found = stack_module.find(settings)
    assert found is not None
    assert found.worker is not None
    return psutil.Process(found.worker.pid)


def ray_processes(stack: StackState, title: str) -> list[psutil.Process]:
    assert stack.ray is not None
    every = psutil.Process(stack.ray.pid).children(recursive=True)
    return [each for each in every if each.cmdline() and each.cmdline()[0].startswith(title)]


def test_the_trainer_killed_the_instant_after_the_hand_over(
    stack: StackState, stack_settings: Settings, root: Path
) -> None:
    script = textwrap.dedent(
        f"""
        import os, signal, sys, torch
        from trinity_sync.coordinator import CheckpointCoordinator
        saves = CheckpointCoordinator(sys.argv[1])
        saves.save(2, {{"model": {{"w": torch.full(({SIZE},), 2.0)}}}})
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    environment = {**os.environ, "TRINITY_SYNC_SPOOL": str(stack_settings.spool)}
    died = subprocess.run([sys.executable, "-c", script, str(root)], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    assert_committed(root, 2)


def test_a_ray_worker_killed_in_mid_write(
    saves: CheckpointCoordinator, root: Path, stack: StackState, api: Api
) -> None:
    begin_slow_save(saves, root, 2)
    (writer,) = ray_processes(stack, "ray::model")
    writer.kill()
    with pytest.raises(SaveFailed, match="step 2"):
        saves.wait_all(120)
    assert_only_step_1_counts(root)
    run = api.ended(api.run_of(key(saves, 2)).id)
    assert run.state.name in ("Failed", "Crashed")
    until(
        lambda: "Crashed" in [task.state.name for task in api.tasks_of(run)],
        "the task run to be shown as crashed",
    )
    assert not [task for task in api.tasks_of(run) if task.state.is_running()]
    with api.client as client:  # the UI's Retry button
        client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
    assert_committed(root, 2)
    saves.save(3, {"model": {"w": torch.ones(3)}})
    saves.wait_all(120)
    assert newest(root).step == 3


def test_the_flows_process_killed_in_mid_write(
    saves: CheckpointCoordinator, root: Path, stack_settings: Settings, api: Api
) -> None:
    begin_slow_save(saves, root, 2)
    worker = worker_of(stack_settings)
    worker.kill()
    worker.wait(10)
    assert_only_step_1_counts(root)
    stack_module.up(stack_settings)
    assert_committed(root, 2)
    assert api.ended(api.run_of(key(saves, 2)).id).run_count == 2
    saves.wait_all(60)
    saves.save(3, {"model": {"w": torch.ones(3)}})
    saves.wait_all(120)
    assert newest(root).step == 3


def test_the_prefect_server_killed_in_mid_write(
    saves: CheckpointCoordinator, root: Path, stack_settings: Settings, stack: StackState
) -> None:
    begin_slow_save(saves, root, 2)
    server = stack_module.find(stack_settings).server
    for process in (
        *psutil.Process(server.pid).children(recursive=True),
        psutil.Process(server.pid),
    ):
        process.kill()
    started = torch.full((SIZE,), 3.0)
    staged = saves.save(3, {"model": {"w": started}})  # training does not notice
    assert staged.nbytes > SIZE
    assert read_iteration(root, "checkpoint") in (1, 2)
    stack_module.up(stack_settings)
    assert_committed(root, 3)
    require_committed(root, 1)


def test_a_run_is_cancelled_and_shown_as_cancelled(
    saves: CheckpointCoordinator, root: Path, api: Api
) -> None:
    from prefect.states import Cancelling

    begin_slow_save(saves, root, 2)
    run = api.run_of(key(saves, 2))
    with api.client as client:
        client.set_flow_run_state(run.id, Cancelling())
    with pytest.raises(SaveFailed, match="step 2"):
        saves.wait_all(60)
    assert api.ended(run.id).state.name == "Cancelled"
    assert_only_step_1_counts(root)
    saves.save(3, {"model": {"w": torch.ones(3)}})
    saves.wait_all(120)
    assert newest(root).step == 3


def test_a_step_without_one_of_its_ranks_fails_and_names_it(
    stack: StackState, stack_settings: Settings, root: Path, api: Api
) -> None:
    lonely = CheckpointCoordinator(root, rank=0, world_size=2, settings=stack_settings)
    lonely.save(2, {"model": {"w": torch.ones(3)}})
    with pytest.raises(SaveFailed, match=r"step 2 .*model of role actor rank 1"):
        lonely.wait_all(120)
    assert newest(root) is None
    lonely.close()
