"""Peak memory that saving takes in addition to the training, each system in its own processes.

And the shared memory that a training with a saver holds, saving at intervals of several lengths.
"""

import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.measure import Samples
from benchmarks.resources import peak_memory
from benchmarks.systems import find
from benchmarks.targets import OURS
from benchmarks.training import Size, Training
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.settings import Settings

SAVES = 2
INTERVALS = (10, 2, 0.5, 10)
"""Intervals between saves, in times that a save takes until its commit."""
SAVES_AN_INTERVAL = 12


def peak_memory_a_byte(size: Size, name: str, folder: Path, shared: Path) -> float | None:
    """Return the peak of saving above that of training alone, in bytes a byte of state.

    It includes staged copies, slots and helper processes. A system that allows several saves in
    flight gets as many. None where it cannot run.
    """
    found = find(name)
    if isinstance(found, str):
        return None
    training = Training(size, shared)
    with peak_memory() as without:
        for _ in range(SAVES):
            training.step()
    with peak_memory() as saving:
        system = found(training, folder)
        for first in range(0, SAVES * system.at_once, system.at_once):
            dist.barrier()
            for step in range(first, first + system.at_once):
                system.save(step)
            training.step(system.before_update)
            system.wait()
        time.sleep(0.1)
    system.close()
    mine = saving.nbytes - without.nbytes
    everyone: list[int] = [0] * size.ranks
    dist.all_gather_object(everyone, mine)
    return max(0.0, sum(everyone) / size.nbytes)


def shared_over_intervals(size: Size, folder: Path, shared: Path) -> Samples:
    """Return the shared memory at the end of each of `INTERVALS`, in bytes a byte of state."""
    weights = {f"w{at}": torch.rand(size.nbytes // 64 // 4) for at in range(64)}
    settings = Settings(spool=shared / "spool", home=shared / "home", saver="built-in")
    samples: Samples = {}
    with CheckpointCoordinator(
        folder / "ckpts", settings=settings, job={"keep": "last=2"}
    ) as saves:

        def save_every(seconds: float, first: int) -> list[float]:
            """Save some steps; without seconds, each is waited for. Return how long each took."""
            took = []
            for step in range(first, first + SAVES_AN_INTERVAL):
                began = time.perf_counter()
                weights["w0"].fill_(step)
                saves.save(step, {"model": weights})
                if seconds:
                    time.sleep(max(0.0, began + seconds - time.perf_counter()))
                else:
                    saves.wait_all()
                took.append(time.perf_counter() - began)
            return took

        commit_s = median(save_every(0, 0))
        for at, interval in enumerate(INTERVALS, 1):
            save_every(interval * commit_s, at * SAVES_AN_INTERVAL)
            slots = saves.spool.folder.glob("*.slot")
            held = sum(path.stat().st_blocks * 512 for path in slots)
            samples[OURS, f"shared memory, {at}: interval {interval}"] = [held / size.nbytes]
    return samples
