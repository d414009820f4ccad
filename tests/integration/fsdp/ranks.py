"""Run a function on real gloo ranks, each a process of its own.

They are forked from a process that has imported veRL, which takes a core ten seconds.
"""

import itertools
import os
import queue
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.forked import forking

PRELOADED = "tests.integration.fsdp.preloaded"


def on_ranks(
    program: Callable[..., Any],
    *arguments: Any,
    scratch: Path,
    world_size: int = 2,
    timeout_s: float = 250.0,
    preloaded: str = PRELOADED,
) -> list[Any]:
    """Call ``program(*arguments)`` on every rank of a new process group; returns their results."""
    rendezvous = scratch / f"rendezvous-{time.time_ns()}"
    with forking(preloaded) as context:
        answers: Any = context.Queue()
        given = (world_size, rendezvous, answers, program, arguments, dict(os.environ))
        ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(world_size)]
        for rank in ranks:
            rank.start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(results) < world_size:
            try:
                rank, error, result = answers.get(timeout=1.0)
            except queue.Empty:
                codes = {n: r.exitcode for n, r in enumerate(ranks) if n not in results}
                if any(codes.values()):
                    pytest.fail(f"ranks died without an answer; exit codes: {codes}")
                if time.monotonic() > deadline:
                    pytest.fail(f"only ranks {sorted(results)} answered within {timeout_s:g} s")
                continue
            if error:
                pytest.fail(f"rank {rank} failed:\n{error}")
            results[rank] = result
    finally:
        for process in ranks:
            if len(results) < world_size:
                process.kill()
            process.join()
    return [results[rank] for rank in range(world_size)]


class Turns:
    """The ranks of a process as fewer ranks, or as all of them, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.rank = dist.get_rank()
        self._meetings = (f"file://{folder}/meet-{turn}" for turn in itertools.count())

    def become(self, world_size: int) -> bool:
        """Begin the next process group; return whether this rank is in it, or sits out."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        meeting, is_in = next(self._meetings), self.rank < world_size
        if is_in:
            group = {"rank": self.rank, "world_size": world_size}
            dist.init_process_group("gloo", init_method=meeting, **group)
        return is_in


def _rank(
    rank: int,
    world_size: int,
    rendezvous: Path,
    answers: Any,
    program: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    os.environ.setdefault("TRINITY_SYNC_SPOOL", str(rendezvous.parent / "spool"))
    try:
        from grpo_copy.cpu_platform import use_cpu

        use_cpu()
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        result = program(*arguments)
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
        raise
    answers.put((rank, None, result))
