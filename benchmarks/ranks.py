"""Gloo ranks, each a process of its own, forked at once from a server that has imported torch."""

import importlib
import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity_sync.stack.daemon import free_port

PRELOADED = ["benchmarks.training"]


class RankFailed(Exception):
    """A rank raised, or died; the message has its traceback."""


def on_ranks(
    ranks: int,
    program: str,
    *arguments: Any,
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float = 900.0,
) -> Any:
    """Call a function on every rank of a new process group; return rank 0's result.

    ``program`` is ``module:function``, imported once the environment is set; ``environment`` is
    added to that of each rank. The log of ranks and their helpers is shown only if something fails.

    Raises:
        RankFailed: a rank did not return a result in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    answers: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(
            target=_rank,
            args=(answers, program, arguments, {**environment, **_group(rank, ranks, port)}, log),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(results) < ranks:
            try:
                rank, error, result = answers.get(timeout=1.0)
            except queue.Empty:
                dead = [n for n, p in enumerate(processes) if p.exitcode and n not in results]
                if dead or time.monotonic() > deadline:
                    answered = f"only ranks {sorted(results)} of {ranks} answered"
                    raise RankFailed(f"{answered}; dead: {dead}\n{_tail(log)}") from None
                continue
            if error:
                raise RankFailed(f"{_tail(log)}\nrank {rank}:\n{error}")
            results[rank] = result
    finally:
        for process in processes:
            process.join(timeout=10.0 if len(results) == ranks else 0.0)
            if process.is_alive() and process.pid:
                os.killpg(process.pid, signal.SIGKILL)  # with the helpers of the systems
            process.join()
    return results[0]


def _rank(
    answers: Any,
    program: str,
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    log: Path,
) -> None:
    os.setpgid(0, 0)
    os.environ.update(environment)
    rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    with log.open("ab", buffering=0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        dist.init_process_group("gloo")
        module, _, function = program.partition(":")
        result = getattr(importlib.import_module(module), function)(*arguments)
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
    else:
        answers.put((rank, None, result))


def _group(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that ``init_process_group`` and the helpers of some systems read."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-30:])
