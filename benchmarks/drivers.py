"""``python -m benchmarks.drivers``: the two drivers of a save, Prefect and the built-in saver.

They commit the same live state, into new files and into those of the step that was removed last:
in turns while a stack is there, then the saver next to a raw write of the same bytes without one,
as it is used; see `benchmarks.cases`. For each, the CPU time for a save of next to no bytes, and
what it costs a node at rest. ``QUICK=1`` takes a small state only.
"""

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.measure import Samples, records_of
from benchmarks.plan import make_case
from benchmarks.resources import cpu_seconds, tree
from benchmarks.run import Run, measure
from benchmarks.systems.trinity_drivers import list_savers
from benchmarks.targets import ORCHESTRATED, SAVED, SAVER_ALONE, STACK_ALONE
from benchmarks.training import Size
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.settings import Settings
from trinity_sync.stack.local_stack import find

OF_SAVER = (SAVED, f"{SAVED}, recycled files")
TURNS = 11
WARM_UP = 3
SAVES = 10
"""Saves over which a CPU time, which the kernel counts in hundredths of a second, is the mean."""
REST_S = 30.0
SETTLE_S = 2.0
"""Seconds after a commit until the stack has stored what its tasks and its worker tell."""


def full(run: Run) -> Iterator[str]:
    """Measure 1 GiB, then the saver alone."""
    yield from drivers(run, Size(1 << 30, 300), TURNS)


def quick(run: Run) -> Iterator[str]:
    """Measure a small state, then the saver alone."""
    yield from drivers(run, Size(1 << 27, 300), turns=3)


def drivers(run: Run, size: Size, turns: int) -> Iterator[str]:
    """Measure both drivers, then the saver without a stack."""
    systems = (*OF_SAVER, "trinity_sync + Prefect", ORCHESTRATED)
    with run.stack():
        case = make_case(size, systems, turns, what="both drivers")
        yield case.name
        run.case(case, held=5)
        yield STACK_ALONE
        samples = run.on_ranks(1, "benchmarks.drivers:alone", "trinity_sync + Prefect", turns)
        run.records += records_of(STACK_ALONE, Size(0, 3), samples)
    case = make_case(size, OF_SAVER, turns, what="with the saver")
    yield case.name
    run.case(case, held=3)
    yield SAVER_ALONE
    samples = run.on_ranks(1, "benchmarks.drivers:alone", SAVED, turns)
    run.records += records_of(SAVER_ALONE, Size(0, 3), samples)
    yield (name := "shared memory over intervals")
    samples = run.on_ranks(1, "benchmarks.memory:shared_over_intervals", size)
    run.records += records_of(name, size, samples)


def alone(system: str, runs: int, folder: Path, shared: Path) -> Samples:
    """Save one step after the other, three components and a folder each; then rest.

    The stack's figures are those of all its processes, and of the saver that requests its runs;
    the CPU time of a save includes what they take at rest meanwhile.
    """
    metadata = folder / "metadata"
    metadata.mkdir()
    (metadata / "config.json").write_text("{}")
    settings, stack = Settings(), None
    if system == SAVED:
        settings = Settings(spool=shared / "spool", home=shared / "home", saver="built-in")
    else:
        stack = find(settings)
        assert stack, "no stack is there"
    cpu, committed = [], []

    def list_roots() -> list[int]:
        return [
            *list_savers(settings.spool),
            *(each.pid for each in (stack.daemons if stack else ())),
        ]

    with CheckpointCoordinator(folder / "ckpts", settings=settings) as saves:
        for step in range(1, WARM_UP + runs * SAVES + 1):
            weight = torch.full((100,), float(step))
            states = {name: {"w": weight} for name in ("model", "optim", "extra_state")}
            saves.save(step, states, metadata=metadata)
            saves.wait_all(60)
            committed += list(saves.commit_seconds.values())[-1:]
            if step >= WARM_UP and (step - WARM_UP) % SAVES == 0:
                time.sleep(SETTLE_S if stack else 0)
                cpu.append(cpu_seconds(list_roots()))
        roots = list_roots()
        time.sleep(REST_S)
        at_rest = (cpu_seconds(roots) - cpu[-1]) / REST_S
        memory = [process.memory_full_info() for process in tree(roots)]
    return {
        (system, "cpu a save"): [(b - a) / SAVES for a, b in pairwise(cpu)],
        (system, "committed"): committed[WARM_UP:],
        (system, "cores at rest"): [at_rest],
        (system, "RSS"): [sum(each.rss for each in memory) / 1e6],
        (system, "PSS"): [sum(each.pss for each in memory) / 1e6],
    }


if __name__ == "__main__":
    measure("drivers-quick", quick) if os.environ.get("QUICK") else measure("drivers", full)
