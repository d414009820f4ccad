"""What a save of next to no bytes costs, and what the saver or the stack costs a node at rest."""

import time
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.measure import Samples
from benchmarks.resources import cpu_seconds, tree
from benchmarks.systems.trinity import list_savers
from benchmarks.targets import OURS
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.settings import Settings
from trinity_sync.stack.state_file import read_state

WARM_UP = 3
SAVES = 10
"""Saves over which a CPU time, which the kernel counts in hundredths of a second, is the mean."""
REST_S = 30.0
SETTLE_S = 2.0
"""Seconds after a commit until the stack has stored what its tasks and its worker tell."""


def small_saves(system: str, runs: int, folder: Path, shared: Path) -> Samples:
    """Save one step after the other, three components and a folder each; then rest.

    The stack's figures are those of all its processes, and of the saver that requests its runs;
    the CPU time of a save includes what they take at rest meanwhile.
    """
    metadata = folder / "metadata"
    metadata.mkdir()
    (metadata / "config.json").write_text("{}")
    settings, stack = Settings(), None
    if system == OURS:
        settings = Settings(spool=shared / "spool", home=shared / "home", saver="built-in")
    else:
        stack = read_state(settings.home)
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
