"""The figures that the project promises, each a ratio within one case of one run.

``python -m benchmarks.targets`` prints them from the last full run, as in docs/performance.md.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB_256 = "0.25 GiB, 300 tensors, 1 rank"
GIB = "1 GiB, 300 tensors, 1 rank"
GIB_3000 = "1 GiB, 3000 tensors, 1 rank"
RANKS = "1 GiB, 300 tensors, 2 ranks"
GB_4 = "4 GB, 300 tensors, 1 rank"
RESTORE = f"restore, {GIB}"
OURS = "trinity_sync"
ORCHESTRATED = "trinity_sync + Prefect, recycled files"
PEERS = ("torch.save", "veRL", "DCP async, thread", "DCP async, process", "torch-checkpointing")
"""Not the Trinity-style thread: it does not copy what it saves, and so has no stall to compare."""


@dataclass(frozen=True)
class Target:
    """``above / below``, to be at most (or at least) ``bound``."""

    figure: str
    bound: float
    above: tuple[str, str, str]
    below: tuple[str, str, str]
    """Case, system and metric; system ``best peer`` is the lowest of the peers."""
    at_least: bool = False


@dataclass(frozen=True)
class Result:
    """A target and what was measured."""

    target: Target
    value: float

    @property
    def met(self) -> bool:
        """Whether it holds."""
        bound = self.target.bound
        return self.value >= bound if self.target.at_least else self.value <= bound


def targets() -> Iterator[Target]:
    """All of them."""
    staging = ((GIB, OURS), (GIB_3000, OURS), (RANKS, OURS), (GB_4, ORCHESTRATED))
    for case, system in staging:
        stall, memcpy = (case, system, "stall"), (case, "warm memcpy", "stall")
        yield Target("stall / warm memcpy", 1.15, stall, memcpy)
        yield Target("stall / best peer's", 0.7, stall, (case, "best peer", "stall"))
        yield Target("stall / torch.save + fsync", 0.08, stall, (case, "torch.save", "stall"))
    overlapped = "trinity_sync, overlapped"
    for case in (MIB_256, f"{GIB}, in training"):
        yield Target(
            "stall, overlapped, under training / memcpy",
            0.1,
            (case, overlapped, "stall in training"),
            (case, "warm memcpy", "stall"),
        )
        yield Target(
            "step-time loss a save, overlapped / best peer's",
            0.5,
            (case, overlapped, "loss a save"),
            (case, "best peer", "loss a save"),
        )
    raw = (GIB, "raw write", "durable")
    written = (GIB, OURS, "after the stall")
    yield Target("durable throughput, fresh files / raw write", 0.9, raw, written, at_least=True)
    written = (GIB, "trinity_sync, recycled files", "after the stall")
    yield Target("durable throughput, recycled / raw write", 1.5, raw, written, at_least=True)
    yield Target(
        "time to durable with Prefect, recycled / best peer's",
        0.5,
        (GB_4, ORCHESTRATED, "durable"),
        (GB_4, "best peer", "durable"),
    )
    restore, verl = (RESTORE, OURS, "restore"), (RESTORE, "veRL", "restore")
    yield Target("restore from disk / raw read", 1.3, restore, (RESTORE, "raw read", "restore"))
    yield Target("restore from disk / veRL's", 0.6, restore, verl)
    memory = (RESTORE, OURS, "restore from memory")
    yield Target("restore from the spool / veRL's from disk", 0.1, memory, verl)


def results(path: Path) -> list[Result]:
    """Those targets of which the run at ``path`` measured both sides."""
    medians = {
        (record["case"], record["system"], record["metric"]): record["median"]
        for record in json.loads(path.read_text())["records"]
    }

    def value(case: str, system: str, metric: str) -> float | None:
        if system != "best peer":
            return medians.get((case, system, metric))
        found = [medians[case, peer, metric] for peer in PEERS if (case, peer, metric) in medians]
        return min(found, default=None)

    found = []
    for target in targets():
        above, below = value(*target.above), value(*target.below)
        if above is not None and below:
            found.append(Result(target, above / below))
    return found


def main() -> None:
    """Print a table in Markdown."""
    path = Path(__file__).parent / "results" / "full.json"
    print("| figure | case | target | measured |\n|---|---|---|---|")
    for result in results(path):
        target = result.target
        bound = f"{'at least' if target.at_least else 'at most'} {target.bound:g}"
        value = f"**{result.value:.2f}**" if result.met else f"{result.value:.2f}, missed"
        print(f"| {target.figure} | {target.above[0]} | {bound} | {value} |")
    for record in json.loads(path.read_text())["records"]:
        if record["metric"].startswith(("layout", "memory")):
            print(f"| {record['metric']}, {record['system']} | | | {record['median']:.3f} |")


if __name__ == "__main__":
    main()
