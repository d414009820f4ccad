"""A queue of 1 GiB in a checkpoint; ``-s`` shows how long its save takes, next to a memcpy."""

import multiprocessing
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transfer_queue.client import TransferQueueClient

from tests.environments.whole_run import rollout_queue
from tests.environments.whole_run.__main__ import make_environment
from tests.environments.whole_run.rollout_queue import RolloutQueue
from tests.environments.whole_run.run import Run
from trinity_sync import CheckpointCoordinator, Participant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROLLOUTS, FLOATS, STEPS = 64, 1 << 22, 3
"""Of 16 MiB each; the second and third save find their slots there."""
ROLES = ("actor", "queue")


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(f"/dev/shm/trinity_sync-large-queue-{time.time_ns()}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_a_queue_of_one_gibibyte_is_restored_as_it_was(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start is a process, as a process has one client of TransferQueue."""
    for name, value in make_environment(tmp_path / "home", memory / "spool").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    spawn = multiprocessing.get_context("spawn")
    for work in (save, restore):
        process = spawn.Process(target=work, args=(tmp_path, memory))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
        assert process.exitcode == 0


def save(folder: Path, memory: Path) -> None:
    run, client, queue = start(folder, "first")
    for number in range(ROLLOUTS):
        queue.put(number, {"values": make_rollout(number)})
    with (
        CheckpointCoordinator(run.root, roles=ROLES, run_key=run.key) as saves,
        Participant(run.root, role="queue", roles=ROLES, run_key=run.key) as part,
    ):
        for step in range(1, STEPS + 1):
            cut = memory / f"cut-{step}"
            with timed(f"save {step}: TransferQueue writes its files"):
                rollout_queue.save_to(client, cut)
            with timed(f"save {step}: part.save"):
                part.save(step, None, folders={"rollouts": cut})
            shutil.rmtree(cut)
            saves.save(step, {"extra_state": step})
            saves.wait_all()
    source, target = torch.ones(2, ROLLOUTS * FLOATS)
    for _ in range(STEPS):
        with timed("memcpy"):
            target.copy_(source)


def restore(folder: Path, memory: Path) -> None:
    run, client, queue = start(folder, "second")
    with Participant(run.root, role="queue", roles=ROLES, run_key=run.key) as part:
        step = part.latest_step()
        assert step == STEPS
        part.load(step)
        part.restore_folder(step, "rollouts", folder / "restored")
    rollout_queue.restore_from(client, folder / "restored")
    assert queue.list_ready() == list(range(ROLLOUTS))
    for number in range(ROLLOUTS):
        assert torch.equal(queue.get([number])["values"][0], make_rollout(number))


def start(folder: Path, key: str) -> tuple[Run, TransferQueueClient, RolloutQueue]:
    torch.set_num_threads(1)
    run = Run(folder, 1, key, ROLLOUTS, whole=True)
    run.own.mkdir(exist_ok=True)
    client = rollout_queue.start(run)
    run.tell("queue")
    return run, client, RolloutQueue(run)


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - began:.2f} s for 1 GiB", flush=True)


def make_rollout(number: int) -> torch.Tensor:
    return torch.randn(1, FLOATS, generator=torch.Generator().manual_seed(number))
