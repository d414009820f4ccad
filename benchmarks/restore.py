"""Loading, in a process that has only begun: one saves and ends, and others load what it left.

A process that has loaded or saved before has memory at hand that a restarted trainer has not, and
which was measured to change the figures by several times. Each program here runs in a process of
its own, so nothing but files and shared memory goes from one to the next.
"""

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


def saved(size: Size, name: str, folder: Path, shared: Path) -> tuple[str, bool]:
    """Save once and end; returns the state's digest, and whether memory can bring it back."""
    training, system = _opened(size, name, folder, shared)
    system.save(STEP)
    system.before_update()
    system.wait()
    if not system.restores_from_memory:  # else it leaves its slots as a trainer that was killed
        system.close()
    return training.digest(), system.restores_from_memory


def restored(
    size: Size, name: str, from_memory: bool, digest: str, folder: Path, shared: Path
) -> Samples:
    """Load into a training that was started anew; seconds until every page is there.

    It has not taken a step, so its optimizer has no state yet, but where a system wants it to have.
    """
    training, system = _opened(size, name, folder, shared, begun=False)
    if system.loads_in_place:
        training.step()
    drop_page_cache(system.files(STEP))
    load = system.load_from_memory if from_memory else system.load
    seconds = timed_load(training, lambda: load(STEP), digest, name)
    system.close()
    return {(name, "restore from memory" if from_memory else "restore"): [seconds]}


def limits(size: Size, folder: Path, _shared: Path) -> Samples:
    """What bounds a restore, in a process that has only begun, too."""
    nbytes = size.nbytes // size.ranks
    bounds = {("first touch", "restore from memory"): first_touch(nbytes)}
    bounds |= Limits(nbytes, folder).of_loading()
    return {key: [seconds] for key, seconds in bounds.items()}


def timed_load(training: Training, load: Callable[[], None], digest: str, name: str) -> float:
    """Seconds until all ranks have loaded, and have touched every page of what they loaded.

    Raises:
        WrongState: it is not the state of that digest.
    """
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
