"""Samples, their medians, and the record of them."""

import json
import os
import platform
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.training import Size

Samples = dict[tuple[str, str], list[float]]
"""Figures by system and metric, one for each turn."""

BASELINE = "no saves"
"""System whose windows of training the others' are compared with."""

VERSIONS = ("torch", "verl", "prefect", "ray", "torch-checkpointing", "transformers")


@dataclass(frozen=True)
class Record:
    """One figure of one system in one case, over several turns."""

    case: str
    system: str
    bytes: int
    tensors: int
    ranks: int
    metric: str
    median: float
    min: float
    max: float
    runs: int


def records_of(case: str, size: Size, samples: Samples) -> list[Record]:
    return [
        Record(
            case,
            system,
            size.nbytes,
            size.tensors,
            size.ranks,
            metric,
            statistics.median(values),
            min(values),
            max(values),
            len(values),
        )
        for (system, metric), values in samples.items()
    ]


def joined(*parts: Samples) -> Samples:
    together: Samples = defaultdict(list)
    for part in parts:
        for key, values in part.items():
            together[key] += values
    return dict(together)


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    about = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in about if line.startswith("model name")), "")
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return ", ".join(filter(None, (f"{os.cpu_count()} cores", model, f"{memory:.0f} GiB", system)))


def versions() -> dict[str, str]:
    """Return the versions of the systems that are compared."""
    found = {"python": platform.python_version()}
    for package in VERSIONS:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def write(path: Path, records: list[Record], absent: dict[str, str]) -> None:
    """Write the records as JSON, with what they were taken on and which systems are absent."""
    body = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "unavailable": absent,
        "records": list(map(asdict, records)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")
