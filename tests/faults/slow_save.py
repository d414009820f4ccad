"""A save that takes long enough to kill something in the middle of it, and what to kill."""

import signal
from pathlib import Path

import psutil
import torch

from tests.integration.prefect_api import key_of
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.stack import local_stack
from trinity_sync.storage.discovery import find_newest, read_latest_pointer, require_committed
from trinity_sync.storage.manifest import read_manifest

SIZE = 60_000_000  # 240 MB, of which what is killed has not written the last when it is found
FILE = "actor/model_world_size_1_rank_0.pt"


def begin_slow_save(saves: CheckpointCoordinator, root: Path, step: int) -> None:
    """Hand a save over and return while its shard is being written."""
    saves.save(step, {"model": {"w": torch.full((SIZE,), float(step))}})
    folder = root / f"global_step_{step}/actor"
    until(lambda: list(folder.glob(".*.tmp")), "the first bytes on disk")
    assert read_manifest(root, step) is None


def assert_only_step_1_counts(root: Path) -> None:
    assert find_newest(root).step == 1
    assert read_latest_pointer(root, "checkpoint") == 1
    assert torch.load(root / "global_step_1" / FILE)["w"].tolist() == [1.0] * 10


def assert_committed(root: Path, step: int) -> None:
    until(lambda: read_manifest(root, step), f"the commit of step {step}")
    require_committed(root, step)
    until(lambda: read_latest_pointer(root, "checkpoint") == step, "the iteration file")
    weights = torch.load(root / f"global_step_{step}" / FILE)["w"]
    assert torch.equal(weights, torch.full((SIZE,), float(step)))


def key(saves: CheckpointCoordinator, step: int) -> str:
    return key_of(saves.root, step)


def find_part(settings: Settings, name: str) -> psutil.Process:
    """Return the server, the worker or the Ray node; another test may have had it started again."""
    return psutil.Process(getattr(local_stack.read_state(settings.home), name).pid)


def kill_worker(settings: Settings, number: signal.Signals = signal.SIGKILL) -> None:
    worker = find_part(settings, "worker")
    worker.send_signal(number)
    worker.wait(250)


def kill_server(settings: Settings) -> None:
    server = find_part(settings, "server")
    processes = [*server.children(recursive=True), server]
    for process in processes:
        process.kill()
    assert not psutil.wait_procs(processes, 10)[1]


def ray_processes(settings: Settings, title: str) -> list[psutil.Process]:
    every = find_part(settings, "ray").children(recursive=True)
    return [each for each in every if each.cmdline() and each.cmdline()[0].startswith(title)]


def assert_saves_on(saves: CheckpointCoordinator) -> None:
    saves.save(3, {"model": {"w": torch.ones(3)}})
    saves.wait_all(250)
    assert find_newest(saves.root).step == 3
