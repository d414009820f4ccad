"""The figures as a table for the terminal and a plot for the README."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure import BASELINE, Record, machine

LIMITS = {
    "stall": "warm memcpy",
    "stall in training": "warm memcpy",
    "durable": "raw write",
    "after the stall": "raw write",
    "restore": "raw read",
    "restore from memory": "first touch",
}
"""Limit of which each metric is a multiple."""

UNITS = {
    "cpu a GB": "s",
    "memory a byte": "bytes",
    "cores at rest": "cores",
    "RSS": "MB",
    "PSS": "MB",
}
"""Units of metrics that are not in milliseconds."""

FIRST = (
    "stall",
    "durable",
    "after the stall",
    "restore",
    "restore from memory",
    "stall in training",
    "loss a save",
    "durable in training",
)
"""First columns; others follow."""

WIDTH = 150
"""Columns of a table outside of a terminal."""


def show(records: Sequence[Record], absent: dict[str, str]) -> None:
    """Print one table a case: a row a system, a column a metric, each next to its limit."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for case in dict.fromkeys(record.case for record in records):
        own = [r for r in records if r.case == case and r.system != BASELINE]
        metrics = sorted({record.metric for record in own}, key=_place)
        table = Table(title=f"{case}: medians, times the limit, lowest to highest", show_lines=True)
        table.add_column("")
        for metric in metrics:
            table.add_column(f"{metric}, {UNITS.get(metric, 'ms')}", justify="right")
        for system in dict.fromkeys(record.system for record in own):
            found = {record.metric: record for record in own if record.system == system}
            cells = [_cell(found[m], _limit(own, m)) if m in found else "" for m in metrics]
            table.add_row(system, *cells)
        console.print(table)
    for name, reason in absent.items():
        console.print(f"{name}: {reason}")
    console.print(machine())


def _place(metric: str) -> tuple[int, str]:
    return (FIRST.index(metric) if metric in FIRST else len(FIRST), metric)


def plot(records: Sequence[Record], case: str, path: Path) -> None:
    """Plot stall and time to durable of one case, in seconds, next to the limits.

    The same case with Prefect is included, since users run trinity_sync that way. Systems whose
    files the next step tears are left out.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    own = [record for record in records if record.case == case]
    own += [r for r in records if r.case == f"{case}, with Prefect" and "Prefect" in r.system]
    bars = [r for r in own if r.system not in _BOUNDS and r.system not in _TORN]
    durable = {r.system: r.median for r in bars if r.metric == "durable"}
    systems = sorted(durable, key=lambda system: -durable[system])
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained", sharey=True)
    for axis, metric in zip(axes, ("stall", "durable"), strict=True):
        found = {r.system: r for r in bars if r.metric == metric}
        for row, record in enumerate(found[system] for system in systems if system in found):
            ours = record.system.startswith("trinity_sync")
            axis.barh(record.system, record.median, color="#d1495b" if ours else "#8d99ae")
            axis.plot([record.min, record.max], [row, row], color="black", linewidth=1)
            label = f" {record.median:.2f} s"
            axis.text(max(record.max, record.median), row, label, va="center", fontsize=8)
        axis.set_xlim(0, 1.15 * max(record.max for record in found.values()))
        if limit := _limit(own, metric):
            axis.axvline(limit, color="black", linewidth=1, linestyle="--")
        axis.set_xlabel(f"seconds; dashed: a {LIMITS[metric]} of the same bytes", fontsize=9)
        axis.set_title("training stalls for" if metric == "stall" else "on disk after", fontsize=10)
    title = f"{case}: medians, lines from fastest to slowest; {machine()}"
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


_TORN = ("Trinity-style thread",)
"""Systems whose checkpoint may hold parts of two steps."""
_BOUNDS = {*LIMITS.values(), "raw write, existing file", "fsync alone"}


def _limit(records: Sequence[Record], metric: str) -> float | None:
    name = LIMITS.get(metric)
    # each limit is measured as the first that it bounds; the others differ by circumstances only
    measured = next((first for first, limit in LIMITS.items() if limit == name), None)
    for record in records:
        if (record.system, record.metric) == (name, measured):
            return record.median
    return None


def _cell(record: Record, limit: float | None) -> str:
    scale, digits = (1, 2) if record.metric in UNITS else (1e3, 0)
    median, low, high = (
        f"{scale * value:,.{digits}f}" for value in (record.median, record.min, record.max)
    )
    multiple = f"  {record.median / limit:.1f}x" if limit else ""
    return f"{median}{multiple}\n{low}-{high}" if record.runs > 1 else f"{median}{multiple}"
