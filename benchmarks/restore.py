"""Loading in a process that has just begun: one process saves and ends, others load its files.

A process that has loaded or saved before has memory at hand that a restarted trainer has not, which
changes the figures by several times. So nothing but files and shared memory goes from one program
here to the next.
"""

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from benchmarks.limits import Limits, first_touch
from benchmarks.measure import Samples
from benchmarks.resources import drop_page_cache
from benchmarks.systems import System, find
from benchmarks.training import Size, Training

STEP = 1


class WrongState(Exception):
    """What a system loaded is not what was live when it saved."""


def saved(size: Size, name: str, folder: Path, shared: Path) -> tuple[list[str], bool]:
    """Save once and end; return each rank's digest, and whether memory can restore the save."""
    training, system = _opened(size, name, folder, shared)
    system.save(STEP)
    system.before_update()
    system.wait()
    if not system.restores_from_memory:  # else it leaves its slots as a trainer that was killed
        system.close()
    digests = [""] * size.ranks
    dist.all_gather_object(digests, training.digest())
    return digests, system.restores_from_memory


def restored(
    size: Size, name: str, from_memory: bool, digests: list[str], folder: Path, shared: Path
) -> Samples:
    """Load into a training that was just started; return the seconds until every page is there.

    The training has not taken a step, so its optimizer has no state yet, unless the system needs
    one.
    """
    training, system = _opened(size, name, folder, shared, begun=False)
    if system.loads_in_place:
        training.step()
    drop_page_cache(system.files(STEP))
    load = system.load_from_memory if from_memory else system.load
    seconds = timed_load(training, lambda: load(STEP), digests[training.rank], name)
    system.close()
    return {(name, "restore from memory" if from_memory else "restore"): [seconds]}


def limits(size: Size, folder: Path, _shared: Path) -> Samples:
    """Return what bounds a restore, also in a process that has just begun."""
    nbytes = size.nbytes // size.ranks
    bounds = {("first touch", "restore from memory"): first_touch(nbytes)}
    limits = Limits(nbytes, folder)
    bounds |= limits.of_loading()
    bounds["warm memcpy", "restore from memory"] = limits.memcpy_s()
    return {key: [seconds] for key, seconds in bounds.items()}


def timed_load(training: Training, load: Callable[[], None], digest: str, name: str) -> float:
    """Return the seconds until all ranks have loaded, and have touched every page of the state.

    Raises:
        WrongState: it is not the state of that digest.
    """
    gc.collect()  # the first one after the imports takes 0.3 s, and would be in some loads
    dist.barrier()
    start = time.perf_counter()
    load()
    training.touch()
    seconds = time.perf_counter() - start
    if training.digest() != digest:
        raise WrongState(f"{name} did not bring the state back")
    return seconds


def _opened(
    size: Size, name: str, folder: Path, shared: Path, *, begun: bool = True
) -> tuple[Training, System]:
    training = Training(size, shared, begun=begun)
    system = find(name)
    if isinstance(system, str):
        raise ValueError(f"{name}: {system}")
    return training, system(training, folder)
