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
"""What each metric is a multiple of."""

UNITS = {"cpu a GB": "s", "memory a byte": "bytes"}
"""Of what is not milliseconds."""

FIRST = (
    "stall",
    "durable",
    "after the stall",
    "restore",
    "restore from memory",
    "stall in training",
    "loss a save",
    "loss a save and durable",
)
"""Columns; others follow."""

WIDTH = 150
"""Columns of a table that no terminal bounds."""


def show(records: Sequence[Record], absent: dict[str, str]) -> None:
    """One table a case: a row a system, a column a metric, each beside its limit."""
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
    """Stall and time to durable of one case, as multiples of the limits."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    own = [record for record in records if record.case == case]
    figure, axes = plt.subplots(1, 2, figsize=(12, 3.8), layout="constrained")
    for axis, metric in zip(axes, ("stall", "durable"), strict=True):
        limit = _limit(own, metric)
        bars = [r for r in own if r.metric == metric and r.system not in _BOUNDS]
        bars.sort(key=lambda record: record.median, reverse=True)
        if limit is None or not bars:
            continue
        multiples = [record.median / limit for record in bars]
        ours = ["#d1495b" if r.system.startswith("trinity_sync") else "#8d99ae" for r in bars]
        axis.barh([record.system for record in bars], multiples, color=ours)
        for row, (record, multiple) in enumerate(zip(bars, multiples, strict=True)):
            label = f" {multiple:.1f} x, {1e3 * record.median:,.0f} ms"
            axis.text(multiple, row, label, va="center", fontsize=8)
        axis.axvline(1, color="black", linewidth=1)
        axis.set_xscale("log")
        axis.set_xlim(min(0.7, *multiples) / 1.5, 12 * max(multiples))  # room for the labels
        axis.set_title(f"{metric}, times a {LIMITS[metric]} of the same bytes", fontsize=10)
    figure.suptitle(f"{case}; {machine()}", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


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
