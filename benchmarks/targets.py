"""The figures that the project promises, each a ratio within one case of one run.

``python -m benchmarks.targets`` prints them from the last full runs, as in docs/benchmarks.md.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GIB = "1 GiB, 300 tensors, 1 rank"
GIB_3000 = "1 GiB, 3000 tensors, 1 rank"
RANKS = "1 GiB, 300 tensors, 2 ranks"
WITH_PREFECT = f"{GIB}, with Prefect"
GB_4 = "4 GB, 300 tensors, 1 rank"
GB_4_WITH_PREFECT = f"{GB_4}, with Prefect"
TRAINED = f"{GIB}, in training"
BACK_TO_BACK = f"{GIB}, back to back"
BOTH_CORES = f"{GIB}, beside training on both cores"
RESTORE, RESTORE_RANKS = f"restore, {GIB}", f"restore, {RANKS}"
DCP = "1 GiB, 300 tensors, 2 ranks, DCP"
DCP_LARGE = tuple(f"4 GB, 300 tensors, 2 ranks, DCP {peer}" for peer in ("process", "successor"))
SMALL_SAVES = "saves of next to no bytes"
LAYOUT = "layout, 3000 tensors"
MEMORY = "memory, 1 GiB"
OURS = "trinity_sync"
IN_PLACE = "trinity_sync, in place"
RECYCLED = "trinity_sync, recycled files"
FLOW = "trinity_sync + Prefect"
ORCHESTRATED = "trinity_sync + Prefect, recycled files"
PLUG_INS = "trinity_sync + Prefect, DCP async"
PEERS = ("torch.save", "veRL", "DCP async, thread", "DCP async, process", "torch-checkpointing")
"""Peers, and their overlapped variants; not the Trinity-style thread, which does not copy what it
saves, and so has no stall to compare."""

Measured = tuple[str, str, str]
"""Case, system and metric; system ``best peer`` is the lowest of the peers."""
Medians = dict[Measured, float]


@dataclass(frozen=True)
class Target:
    """``above / below``, or ``above`` alone, to be at most (or at least) ``bound``."""

    figure: str
    bound: float
    above: Measured
    below: Measured | None = None
    at_least: bool = False
    unit: str = ""


@dataclass(frozen=True)
class Result:
    """A target and its measured figure; None if it was not measured, or cannot be divided."""

    target: Target
    value: float | None

    @property
    def met(self) -> bool:
        """Whether it is known to hold."""
        if self.value is None:
            return False
        bound = self.target.bound
        return self.value >= bound if self.target.at_least else self.value <= bound


def targets() -> Iterator[Target]:
    staging = ((GIB, OURS), (GIB_3000, OURS), (RANKS, OURS), (GB_4, RECYCLED))
    for case, system in staging:
        stall, memcpy = (case, system, "stall"), (case, "warm memcpy", "stall")
        yield Target("stall / warm memcpy", 1.15, stall, memcpy)
        yield Target("stall / best peer's", 0.7, stall, (case, "best peer", "stall"))
        yield Target("stall / torch.save + fsync", 0.08, stall, (case, "torch.save", "stall"))
    for system in ("trinity_sync, overlapped", "trinity_sync + Prefect, overlapped"):
        stall, memcpy = (TRAINED, system, "stall in training"), (TRAINED, "warm memcpy", "stall")
        loss, least = (TRAINED, system, "loss a save"), (TRAINED, "best peer", "loss a save")
        yield Target(f"stall, {system} / memcpy", 0.1, stall, memcpy)
        yield Target(f"step-time loss a save, {system} / best peer's", 0.5, loss, least)
    raw, fresh, recycled = ((GIB, name, "durable") for name in ("raw write", OURS, RECYCLED))
    yield Target("durable throughput, fresh files / raw write", 0.9, raw, fresh, at_least=True)
    yield Target("durable throughput, recycled / raw write", 1.5, raw, recycled, at_least=True)
    for case in (WITH_PREFECT, GB_4_WITH_PREFECT):
        durable, least = (case, ORCHESTRATED, "durable"), (case, "best peer", "durable")
        figure = "time to durable with Prefect, recycled / best peer's"
        yield Target(figure, 0.6, durable, least)
    for files, *systems in (("fresh", OURS, FLOW), ("recycled", RECYCLED, ORCHESTRATED)):
        saved, stack = ((WITH_PREFECT, each, "durable") for each in systems)
        yield Target(f"durable with saver / with Prefect, {files} files", 0.85, saved, stack)
    for metric, bound, unit in (
        ("cpu a save", 0.05, " s"),
        ("cores at rest", 0.005, ""),
        ("RSS", 60, " MB"),
    ):
        yield Target(f"saver, {metric}", bound, (SMALL_SAVES, OURS, metric), unit=unit)
    for case in (DCP, *DCP_LARGE):
        for metric, bound in (("stall", 0.7), ("durable", 0.6)):
            ours, least = ((case, name, metric) for name in (PLUG_INS, "best peer"))
            yield Target(f"DCP async_save: {metric} / best peer's", bound, ours, least)
    memcpy = (BACK_TO_BACK, "warm memcpy", "stall")
    for metric, bound in (("stall of the next save", 1.3), ("slowest memcpy after it", 1.5)):
        measured = (BACK_TO_BACK, ORCHESTRATED, metric)
        yield Target(f"{metric} / warm memcpy", bound, measured, memcpy)
    loss, least = ((BOTH_CORES, name, "loss a save") for name in (ORCHESTRATED, "best peer"))
    yield Target("step-time loss a save / best peer's", 0.5, loss, least)
    read, filled, least = (
        (RESTORE, name, "restore") for name in ("raw read", IN_PLACE, "best peer")
    )
    loaded, in_place = ((RESTORE, name, "restore") for name in (OURS, "DCP async, process"))
    yield Target("load from disk / DCP's load in place", 1.1, loaded, in_place)
    yield Target("load_into from disk / raw read", 1.15, filled, read)
    yield Target("load_into from disk / best peer's", 0.8, filled, least)
    memcpy, memory = ((RESTORE, name, "restore from memory") for name in ("warm memcpy", IN_PLACE))
    yield Target("load_into from memory / warm memcpy", 1.3, memory, memcpy)
    memory, verl = (
        (RESTORE_RANKS, name, how)
        for name, how in ((IN_PLACE, "restore from memory"), ("veRL", "restore"))
    )
    yield Target("load_into from memory / veRL's from disk", 0.3, memory, verl)
    for metric, bound in (("layout, first", 0.060), ("layout, unchanged", 0.010)):
        yield Target(f"staging's {metric}", bound, (LAYOUT, OURS, metric), unit=" s")
    for slots, bound, system in (("two slots", 2.1, OURS), ("one slot", 1.1, RECYCLED)):
        used = (MEMORY, system, "memory a byte")
        yield Target(f"extra memory a byte of state, {slots}", bound, used)


def results(medians: Medians) -> list[Result]:
    """Return all targets, with what a run measured of them."""

    def value(measured: Measured) -> float | None:
        case, system, metric = measured
        if system != "best peer":
            return medians.get(measured)
        names = (name for peer in PEERS for name in (peer, f"{peer}, overlapped"))
        found = [medians[case, n, metric] for n in names if (case, n, metric) in medians]
        return min(found, default=None)

    def result(target: Target) -> Result:
        above, below = value(target.above), value(target.below) if target.below else 1.0
        if above is None or below is None or below <= 0:  # a loss may be lost in the noise
            return Result(target, None)
        return Result(target, above / below)

    return [result(target) for target in targets()]


def medians_of(path: Path) -> Medians:
    """Return the medians of the run at ``path``."""
    return {
        (record["case"], record["system"], record["metric"]): record["median"]
        for record in json.loads(path.read_text())["records"]
    }


def table() -> str:
    """Return the table of the last full runs, in Markdown."""
    lines = ["| figure | case | target | measured |", "|---|---|---|---|"]
    measured: Medians = {}
    for name in ("full", "dcp"):
        if (path := Path(__file__).parent / "results" / f"{name}.json").exists():
            measured |= medians_of(path)
    for result in results(measured):
        target = result.target
        bound = f"{'at least' if target.at_least else 'at most'} {target.bound:g}{target.unit}"
        value = "no ratio" if result.value is None else f"{result.value:.3g}{target.unit}"
        shown = _shown(value, result.met)
        lines.append(f"| {target.figure} | {target.above[0]} | {bound} | {shown} |")
    return "\n".join(lines)


def _shown(value: str, met: bool) -> str:
    return f"**{value}**" if met else value


if __name__ == "__main__":
    print(table())
