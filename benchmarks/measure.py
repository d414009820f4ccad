"""Samples, their medians, and the record of them."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Record:
    """One figure of one case, over several runs."""

    case: str
    system: str
    bytes: int
    tensors: int
    metric: str
    median: float
    min: float
    max: float
    runs: int


def record(
    case: str, system: str, nbytes: int, tensors: int, metric: str, samples: list[float]
) -> Record:
    """Sum the samples up."""
    return Record(
        case,
        system,
        nbytes,
        tensors,
        metric,
        statistics.median(samples),
        min(samples),
        max(samples),
        len(samples),
    )


def alternate(
    systems: Mapping[str, Callable[[], float]], runs: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Run the systems in turns, so that a drift of the machine's speed meets all of them."""
    samples: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(warm_up + runs):
        for name, run in systems.items():
            seconds = run()
            if turn >= warm_up:
                samples[name].append(seconds)
    return samples


def timed(work: Callable[[], Any]) -> float:
    """Seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def state_of(nbytes: int, tensors: int) -> dict[str, torch.Tensor]:
    """A model state of random float32 tensors."""
    each = nbytes // tensors // 4
    return {f"layers.{i}.weight": torch.rand(each) for i in range(tensors)}


def machine() -> str:
    """What the figures were taken on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}"


def write(path: Path, records: list[Record]) -> None:
    """Write the records as JSON, with the machine they were taken on."""
    body = {"machine": machine(), "torch": torch.__version__, "records": list(map(asdict, records))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")
