"""The figures of one case: all systems on one live state, in turns, the ranks in lockstep.

A turn takes every system once, so that a drift of the machine's speed meets all of them, and each
turn in another order, since some leave work or freed memory behind that the next one feels. A
figure is that of the slowest rank, CPU time the sum of all. First come the turns that save, with
nothing else going on or under training; only then those that load, since a load may replace the
live tensors, which throws the caches of some systems away.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, TypeVar

import torch.distributed as dist

from benchmarks.limits import Limits
from benchmarks.measure import BASELINE, Samples
from benchmarks.resources import cpu_seconds, drop_page_cache
from benchmarks.restore import timed_load
from benchmarks.systems import System, find
from benchmarks.training import Size, Training
from trinity_sync.fs.atomic import sync_folder

T = TypeVar("T")

AFTERMATH_S = 1.0
"""Seconds after a save in which the work that it leaves is measured."""

BEFORE_FIRST_S = 3.0
"""Seconds of training before the first save."""

WARM_UP = 2
"""Saves of each system before any is measured: the first one makes what the second one finds."""


@dataclass(frozen=True)
class Case:
    """What is measured on a state of one size."""

    name: str
    size: Size
    systems: tuple[str, ...]
    turns: int
    window: int = 0
    """Training steps, a save at the first, over which its cost is measured; 0 is a save alone."""
    cores: int = 1
    """Cores that a training step computes on; a save finds the others, as next to a GPU."""
    back_to_back: bool = False
    """Each save is followed at once by another one, or by other work that needs all cores."""


@dataclass
class Bench:
    """One rank's side of a case."""

    case: Case
    training: Training
    systems: dict[str, System]
    samples: Samples
    steps: Iterator[int]

    def figures(self, system: str, values: dict[str, float]) -> None:
        """Keep one turn's figures, over all ranks: the highest, of CPU time the sum."""
        everyone: list[Any] = [None] * self.case.size.ranks
        dist.all_gather_object(everyone, values)
        for metric in values:
            over_ranks = sum if metric.startswith("cpu") else max
            self.samples[system, metric].append(over_ranks(each[metric] for each in everyone))

    @contextmanager
    def step(self, system: System) -> Iterator[int]:
        """Begin a step on all ranks together; remove it from the disk after the block."""
        step = next(self.steps)
        dist.barrier()
        yield step
        dist.barrier()
        if self.training.rank == 0:
            system.discard(step)
            sync_folder(system.files(step).parent)  # or the next one to fsync would pay for it
        dist.barrier()


def measure(case: Case, folder: Path, shared: Path) -> tuple[Samples, dict[str, str]]:
    """Run one rank; return the samples, and why some systems could not take part.

    Raises:
        WrongState: a system loaded other bits than it was given.
    """
    training = Training(case.size, shared, cores=case.cores)
    systems, absent = _opened(case, training, folder)
    bench = Bench(case, training, systems, defaultdict(list), count(1))
    (raw := folder / f"raw-{training.rank}").mkdir()
    limits = Limits(case.size.nbytes // case.size.ranks, raw)
    for system in systems.values():
        for _ in range(WARM_UP):
            with bench.step(system) as step:
                _save(system, step)
    limits.of_saving()
    for turn in range(case.turns):
        for (name, metric), seconds in limits.of_saving().items():
            bench.figures(name, {metric: seconds})
        for name in shuffled((BASELINE, *systems) if case.window else systems, turn):
            if name == BASELINE:
                bench.figures(name, _window(bench, None, 0))
                continue
            with bench.step(systems[name]) as step:
                system = systems[name]
                if case.back_to_back:
                    how = _save_twice(bench, system, step, limits)
                elif case.window:
                    how = _window(bench, system, step)
                else:
                    how = _save(system, step)
                bench.figures(name, how)
    for name, system in systems.items():
        with bench.step(system) as step:
            bench.figures(name, _load(bench, system, step))
        system.close()  # now, since what the next one loads needs the memory
    return _losses(case, bench.samples), absent


def _opened(
    case: Case, training: Training, folder: Path
) -> tuple[dict[str, System], dict[str, str]]:
    systems: dict[str, System] = {}
    absent: dict[str, str] = {}
    for name in case.systems:
        own = folder / name.replace(" ", "-")
        own.mkdir(exist_ok=True)
        system = find(name)
        if isinstance(system, str):
            absent[name] = system
        else:
            systems[name] = system(training, own)
        dist.barrier()
    return systems, absent


def shuffled(names: Iterable[T], turn: int) -> list[T]:
    """Return the order of a turn, which is random, but the same on all ranks and in all runs."""
    every = list(names)
    return Random(turn).sample(every, len(every))


def _save(system: System, step: int) -> dict[str, float]:
    """Save while nothing else runs; return the stall, and the time from the call to durable."""
    roots = (os.getpid(), *system.daemons())
    cpu = cpu_seconds(roots)
    start = time.perf_counter()
    system.save(step)
    system.before_update()
    stall = time.perf_counter() - start
    system.wait()
    durable = time.perf_counter() - start
    cpu = cpu_seconds(roots) - cpu
    return {"stall": stall, "durable": durable, "after the stall": durable - stall, "cpu": cpu}


def _save_twice(bench: Bench, system: System, step: int, limits: Limits) -> dict[str, float]:
    """Save twice without a pause, then time memcpys while the last save still works."""
    first = _save(system, step)
    with bench.step(system) as again:
        second = _save(system, again)
        copies = [limits.memcpy_s()]
        end = time.perf_counter() + AFTERMATH_S
        while time.perf_counter() < end:
            copies.append(limits.memcpy_s())
    return {
        "stall": first["stall"],
        "stall of the next save": second["stall"],
        "durable": second["durable"],
        "slowest memcpy after it": max(copies),
        "memcpy after it": median(copies),
    }


def _window(bench: Bench, system: System | None, step: int) -> dict[str, float]:
    """Train with one save at the beginning, for the case's steps and until all is durable."""
    blocked = 0.0

    def blocking(call: Callable[[], None]) -> None:
        nonlocal blocked
        begin = time.perf_counter()
        call()
        blocked += time.perf_counter() - begin

    def wait() -> float:
        if system is not None:
            system.wait()
        return time.perf_counter() - start

    dist.barrier()
    start = time.perf_counter()
    if system is None:
        bench.training.step()
    else:
        blocking(lambda: system.save(step))
        bench.training.step(lambda: blocking(system.before_update))
    steps = 1
    with ThreadPoolExecutor(1, "durable") as thread:
        durable = thread.submit(wait)
        while steps < bench.case.window or not durable.done():
            bench.training.step()
            steps += 1
    trained = time.perf_counter() - start
    return {
        "stall in training": blocked,
        "durable in training": durable.result(),
        "trained": trained,
        "steps": steps,
    }


def _load(bench: Bench, system: System, step: int) -> dict[str, float]:
    """Require that a system loads what it saved."""
    training = bench.training
    saved = training.digest()
    system.save(step)
    system.before_update()
    if system.snapshots:
        training.step()
    system.wait()
    if not system.snapshots:
        training.step()
    dist.barrier()
    drop_page_cache(system.files(step))
    what = f"{bench.case.name}: {system.name}"
    return {"restore": timed_load(training, lambda: system.load(step), saved, what)}


def _losses(case: Case, samples: Samples) -> Samples:
    """Turn windows into losses a save, compared with those without one, and CPU time a GB."""
    result: Samples = {}
    windows = samples.get((BASELINE, "trained"), [0.0]), samples.get((BASELINE, "steps"), [1])
    step_s = median(trained / steps for trained, steps in zip(*windows, strict=True))
    for (system, metric), values in samples.items():
        if metric == "trained" and system != BASELINE:
            steps = samples[system, "steps"]
            losses = [trained - n * step_s for trained, n in zip(values, steps, strict=True)]
            result[system, "loss a save"] = losses
        elif metric == "cpu":
            gigabytes = case.size.nbytes / 1e9
            result[system, "cpu a GB"] = [value / gigabytes for value in values]
        elif metric != "steps" and (system != BASELINE or metric == "trained"):
            result[system, metric] = values
    return result


def first_save(size: Size, name: str, folder: Path, shared: Path) -> Samples:
    """Return the stall of a process's first save, after some seconds of training, and a memcpy."""
    system_type = find(name)
    if isinstance(system_type, str):
        return {}
    training = Training(size, shared)
    limit = Limits(size.nbytes // size.ranks, folder)
    system = system_type(training, folder)
    until = time.monotonic() + BEFORE_FIRST_S
    while time.monotonic() < until:
        training.step()
    dist.barrier()
    began = time.perf_counter()
    system.save(1)
    system.before_update()
    stall = time.perf_counter() - began
    system.wait()
    system.close()
    return {(name, "stall"): [stall], ("warm memcpy", "stall"): [limit.memcpy_s()]}
