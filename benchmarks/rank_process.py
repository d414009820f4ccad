"""All ranks of a job in a few processes: real coordinators, which save one after the other."""

import gc
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from trinity_sync.layout import Component

COMPONENTS: tuple[Component, ...] = ("model", "optim", "extra_state")
RANKS_A_PROCESS = 1024
"""A rank has nine files open, and a process may have some ten thousand."""
SAMPLE = 16
"""Ranks of a process, other than 0, whose `wait_all` is measured."""
SLOT_BYTES = 4096
"""Multiple to which slots are rounded up, in a job 2 MiB: 4,096 ranks have 12,288 slots."""


class RankProcesses:
    """The processes of the ranks, which are spread evenly over the nodes.

    ``memory`` is the folder of the nodes' spools.
    """

    def __init__(self, root: Path, memory: Path, ranks: int, nodes: int) -> None:
        from trinity_sync.client.init_root import open_root

        open_root(root)
        context = multiprocessing.get_context("spawn")
        self._blocks: list[tuple[BaseProcess, Connection]] = []
        for first in range(0, ranks, RANKS_A_PROCESS):
            block = range(first, min(first + RANKS_A_PROCESS, ranks))
            pipe, theirs = context.Pipe()
            arguments = theirs, root, memory, ranks, nodes, block
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._blocks.append((process, pipe))
        for _, pipe in self._blocks:
            pipe.recv()

    def save(self, step: int) -> dict[str, Any]:
        """Save on all ranks, on rank 0 last, which then asks for the flow run.

        Return ``request``; ``triggered_at`` in seconds since the epoch; ``cpu_s`` of a rank.
        """
        if others := self._ask(self._blocks[1:], ("save", step)):
            return self._ask(self._blocks[:1], ("save", step))[0] | {"cpu_s": _mean(others)}
        return self._ask(self._blocks, ("save", step))[0]

    def wait(self) -> dict[str, Any]:
        """Have rank 0 and some others wait for the save, which has ended.

        Return ``rank_0_cpu_s`` since `save`, ``cpu_s`` of another rank, and rank 0's ``calls``.
        """
        answers = self._ask(self._blocks, ("wait", 0))
        return answers[0] | {"cpu_s": _mean(answers)}

    def close(self) -> None:
        """End the ranks."""
        for process, pipe in self._blocks:
            pipe.send(("close", 0))
            process.join(120)

    def _ask(
        self, blocks: Sequence[tuple[BaseProcess, Connection]], what: tuple[str, int]
    ) -> list[dict[str, Any]]:
        for _, pipe in blocks:
            pipe.send(what)
        return [pipe.recv() for _, pipe in blocks]


def _mean(answers: Sequence[dict[str, Any]]) -> float:
    return float(statistics.mean(each["cpu_s"] for each in answers))


def place_ranks(memory: Path, ranks: int, nodes: int) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return spool and ranks of each node, by its name."""
    each = ranks // nodes
    return {
        f"node{number}": (memory / f"node{number}", (*range(number * each, (number + 1) * each),))
        for number in range(nodes)
    }


def _serve(
    pipe: Connection, root: Path, memory: Path, ranks: int, nodes: int, block: range
) -> None:
    import torch

    from benchmarks.scale import CALLS
    from trinity_sync.snapshot import slot

    slot._ROUND_TO = SLOT_BYTES
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(1)
    places = place_ranks(memory, ranks, nodes)
    coordinators = _make_coordinators(root, places, root.name, block)
    first = coordinators.pop(0) if block[0] == 0 else None
    configuration = memory / "configuration"
    configuration.mkdir(exist_ok=True)
    (configuration / "config.json").write_text("{}")
    state = {name: {"w": torch.zeros(16)} for name in COMPONENTS}
    CALLS.count()
    gc.collect()
    gc.freeze()  # a rank has one coordinator to look through, not a thousand
    pipe.send({})
    calls, cpu = 0, 0.0
    while True:
        match pipe.recv():
            case "save", int(step):
                began = time.process_time()
                for each in coordinators:
                    each.save(step, state)
                answer = {"cpu_s": (time.process_time() - began) / max(1, len(coordinators))}
                calls, cpu = CALLS.number, time.process_time()
                if first:
                    answer["triggered_at"] = time.time()
                    first.save(step, state, metadata=configuration)
                    answer["request"] = _get_request(root, step)
                pipe.send(answer)
            case "wait", _:
                answer = {}
                if first:
                    first.wait_all(60)
                    answer |= {
                        "rank_0_cpu_s": time.process_time() - cpu,
                        "calls": CALLS.number - calls,
                    }
                sample = coordinators[:: max(1, len(coordinators) // SAMPLE)]
                began = time.process_time()
                for each in sample:
                    each.wait_all(60)
                pipe.send(answer | {"cpu_s": (time.process_time() - began) / max(1, len(sample))})
            case _:
                os._exit(0)  # thousands of others would wait for their save first


def _get_request(root: Path, step: int) -> Any:
    """Return the request that rank 0 sends."""
    from trinity_sync.saves.save_request import SaveRequest
    from trinity_sync.snapshot.identity import read_identity
    from trinity_sync.storage.runs import find_newest_run

    run = find_newest_run(root)
    assert run
    return SaveRequest(
        root=str(root),
        step=step,
        run=run.number,
        run_key=run.key,
        identity=read_identity(root),
        components=(*COMPONENTS, "metadata"),
    )


def _make_coordinators(
    root: Path, places: dict[str, tuple[Path, tuple[int, ...]]], run_key: str, block: range
) -> list[Any]:
    from trinity_sync.client.coordinator import CheckpointCoordinator
    from trinity_sync.settings import Settings
    from trinity_sync.snapshot.identity import job_id, open_identity
    from trinity_sync.storage.placement import NodeRanks

    open_identity(root)
    job = job_id(root)
    world = [NodeRanks(node, str(spool / job), ranks) for node, (spool, ranks) in places.items()]
    size = sum(len(place.ranks) for place in world)
    made = []
    for node, (spool, ranks) in places.items():
        settings = Settings(node=node, spool=spool)
        made += [
            CheckpointCoordinator(
                root, rank=rank, world_size=size, places=world, run_key=run_key, settings=settings
            )
            for rank in ranks
            if rank in block
        ]
    return made
