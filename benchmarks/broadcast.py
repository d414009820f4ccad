"""What packing, checking and confirming cost a broadcast, compared with the bytes alone.

::

    python -m benchmarks.broadcast [MIB]

Two processes over gloo and loopback send MIB (1024 by default) of bf16 weights, shaped like a small
model's, by ``send_weights`` and ``receive_weights``, and the same bytes as one flat buffer in one
``broadcast``; in turn, seven times, after one of each that does not count. A turn ends when both
sides have all bytes. The ratio wanted is at most 1.15. CPU seconds are of one turn, threads and
kernel included: where two sides have two cores, their sum is the limit.
"""

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trinity_sync.weights.broadcast import receive_weights, send_weights
from trinity_sync.weights.weight_group import WeightGroup, WeightGroupHost, join_weight_group

TURNS = 7
LAYER = {"mlp": (3 * 4864, 896), "attention": (1152, 896), "out": (896, 896), "norm": (896,)}
EMBEDDING = (151_936, 896)


@dataclass(frozen=True)
class Turn:
    """One broadcast, as one side saw it."""

    name: str
    seconds: float
    cpu_s: float
    counts: bool


def _model(mib: int) -> dict[str, torch.Tensor]:
    """Return names and shapes of a Qwen2 of half a billion, with as many layers as fit."""
    left, made = mib << 19, dict[str, torch.Tensor]()
    shapes: Iterable[tuple[str, tuple[int, ...]]] = [("embedding", EMBEDDING)]
    while left > 0:
        for name, shape in shapes:
            count = min(left, int(torch.Size(shape).numel()))
            full = count == torch.Size(shape).numel()
            made[f"{len(made)}.{name}"] = torch.ones(shape if full else count, dtype=torch.bfloat16)
            left -= count
        shapes = LAYER.items() if left > 0 else []
    return {name: tensor for name, tensor in made.items() if tensor.numel()}


def _packed(group: WeightGroup, model: dict[str, torch.Tensor]) -> None:
    if group.rank == 0:
        send_weights(model.items(), group, version=1)
    else:
        with receive_weights(group) as (_, tensors):
            for _ in tensors:
                pass


def _flat(group: WeightGroup, flat: torch.Tensor) -> None:
    group.wait([group.broadcast(flat)])
    group.barrier()


def receive(port: int, mib: int, answer: Any) -> None:
    """Take part in all turns as rank 1."""
    group = join_weight_group("127.0.0.1", port, rank=1, world_size=2, timeout_s=120)
    answer.send(run(group, mib))


def run(group: WeightGroup, mib: int) -> list[Turn]:
    """Take part in all turns."""
    torch.set_num_threads(1)
    model = _model(mib) if group.rank == 0 else {}
    flat = torch.ones(mib << 20, dtype=torch.uint8)
    turns = list[Turn]()
    ways: list[tuple[str, Any, Any]] = [("packed", _packed, model), ("flat", _flat, flat)]
    for number in range(TURNS + 1):
        for name, way, what in ways if number % 2 else reversed(ways):
            group.barrier()
            begun, cpu = time.perf_counter(), time.process_time()
            way(group, what)
            turns.append(
                Turn(name, time.perf_counter() - begun, time.process_time() - cpu, number > 0)
            )
    group.close()
    return turns


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    host = WeightGroupHost(address="127.0.0.1")
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    reader = spawn.Process(target=receive, args=(host.port, mib, theirs))
    reader.start()
    sides = run(host.join(world_size=2, timeout_s=120), mib), ours.recv()
    reader.join()
    medians = dict[str, float]()
    for name in ("packed", "flat"):
        sent, received = ([t for t in side if t.name == name and t.counts] for side in sides)
        seconds = [turn.seconds for turn in sent]
        medians[name] = statistics.median(seconds)
        cpu = [statistics.median(turn.cpu_s for turn in side) for side in (sent, received)]
        print(
            f"{name:7} {medians[name] * 1e3:7.0f} ms ({min(seconds) * 1e3:.0f} to "
            f"{max(seconds) * 1e3:.0f}), {mib / 1024 / medians[name]:.2f} GiB/s, CPU "
            f"{cpu[0]:.2f} s to send and {cpu[1]:.2f} s to receive"
        )
    print(f"ratio   {medians['packed'] / medians['flat']:7.2f}")


if __name__ == "__main__":
    main()
