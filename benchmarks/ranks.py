"""Gloo ranks, each a process of its own, forked from a server that has imported torch already.

A measurement of a few seconds is worth a process of its own only if that process is there at once.
"""

import multiprocessing
import os
import queue
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

PRELOADED = ["benchmarks.training"]


class RankFailed(Exception):
    """A rank raised, or died; the message has its traceback."""


def on_ranks(
    ranks: int, program: Callable[..., Any], *arguments: Any, timeout_s: float = 600.0
) -> Any:
    """Call ``program(*arguments)`` on every rank of a new process group; returns rank 0's result.

    Raises:
        RankFailed: one of them did not return a result in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    answers: Any = context.Queue()
    port = _free_port()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, answers, program, arguments))
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
                    raise RankFailed(f"{answered} within {timeout_s:g} s; dead: {dead}") from None
                continue
            if error:
                raise RankFailed(f"rank {rank}:\n{error}")
            results[rank] = result
    finally:
        for process in processes:
            process.join(timeout=10.0 if len(results) == ranks else 0.0)
            if process.is_alive() and process.pid:
                os.killpg(process.pid, signal.SIGKILL)  # with the helpers of the systems
            process.join()
    return results[0]


def _rank(
    rank: int,
    ranks: int,
    port: int,
    answers: Any,
    program: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.setpgid(0, 0)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        result = program(*arguments)
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
    else:
        answers.put((rank, None, result))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
