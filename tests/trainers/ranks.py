"""Trainings on two real gloo ranks, forked from a process that has imported their trainer.

The process is a new one, since a library that one trainer imports may disturb another's test.
"""

import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from tests.support.states import copied, differences

WORLD_SIZE = 2


@contextmanager
def own_process(module: str) -> Iterator[Callable[..., Any]]:
    """A new process that imports a module of this package; call functions of it by name."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(int).result()  # it starts with its module's first test, not within it
        yield lambda function, *arguments: pool.submit(_call, module, function, arguments).result()


def _call(module: str, function: str, arguments: tuple[Any, ...]) -> Any:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    if (name := f"tests.trainers.{module}") not in sys.modules:
        gc.disable()
        import_module(name)
        gc.freeze()  # ranks that are forked would copy its memory
        gc.enable()
    return getattr(sys.modules[name], function)(*arguments)


def on_ranks(
    scratch: Path, program: Callable[..., Any], *arguments: Any, world_size: int = WORLD_SIZE
) -> list[Any]:
    """Call ``program(*arguments)`` on each rank; return the results, or raise the first error."""
    folder, codes = _run(scratch, world_size, program, arguments)
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert codes == [0] * world_size, "\n".join(errors) or f"exit codes {codes}"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def killed_ranks(scratch: Path, program: Callable[..., Any], *arguments: Any) -> None:
    """Call ``program(*arguments)`` on each rank, and require that it kills them all."""
    folder, codes = _run(scratch, WORLD_SIZE, program, arguments)
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert codes == [-signal.SIGKILL] * WORLD_SIZE, "\n".join(errors) or f"exit codes {codes}"


def kill_all_ranks() -> None:
    """Kill this rank once the others are here as well."""
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def whole_state(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """The whole state on each rank, which PyTorch alone has gathered."""
    options = StateDictOptions(full_state_dict=True)
    return {
        "model": copied(get_model_state_dict(model, options=options)),
        "optimizer": copied(get_optimizer_state_dict(model, optimizer, options=options)),
    }


def require_same(expected: Any, found: Any) -> None:
    """Require that two states are equal in every bit; pytest shows nothing of another process."""
    different = differences(expected, found)
    assert not different, f"different: {different}"


def _run(
    scratch: Path, world_size: int, program: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Path, list[int | None]]:
    folder = scratch / f"ranks-{time.time_ns()}"
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, folder, program, arguments))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 120
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    assert not late, "ranks hang"
    return folder, [process.exitcode for process in ranks]


def _rank(
    rank: int, world_size: int, folder: Path, program: Callable[..., Any], arguments: tuple[Any]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",  # the group exists already
        TORCHELASTIC_RUN_ID="tests",  # for Lightning
        GROUP_RANK="0",
    )
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
        )
        torch.save(program(*arguments), folder / f"{rank}.pt")
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
