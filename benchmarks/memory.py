"""Peak memory that saving takes in addition to the training, each system in its own processes."""

import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.resources import peak_memory
from benchmarks.systems import find
from benchmarks.training import Size, Training

SAVES = 2


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
