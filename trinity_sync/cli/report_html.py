"""Render the report of a job with the template ``report.html.j2``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from trinity_sync.cli.output import format_time
from trinity_sync.layout import name_job
from trinity_sync.orchestration.quantities import format_bytes, format_duration

if TYPE_CHECKING:
    from trinity_sync.orchestration.report.facts import JobReport
    from trinity_sync.storage.health import ComponentHealth
    from trinity_sync.storage.save_timing import LoggedSave

OPEN_ROWS = 20
"""Steps that are shown at once."""
MAX_ROWS = 500
"""Steps that are listed in all; a browser takes long for more."""
MAX_BARS = 120
"""Bars of a chart; of more saves, several consecutive ones have a bar."""
KINDS = {"checkpoint": "Checkpoints", "state_dict": "Weights"}


@dataclass(frozen=True)
class Bar:
    """A save, or consecutive saves, in a chart."""

    title: str
    """Its steps and values, in words."""
    heights: tuple[float, ...]
    """Percent of the chart's height, from the bottom."""


@dataclass(frozen=True)
class Chart:
    """A value of each save, in order of time."""

    title: str
    summary: str
    """The numbers that matter, in words."""
    bars: tuple[Bar, ...]
    names: tuple[str, ...]
    """Names of the parts of a bar, from the bottom."""
    most: float
    """Value of the highest bar."""
    top: str
    """The same in words."""
    ends: tuple[str, str]
    """The first and the last step."""


def _render(template: str, **values: object) -> str:
    environment = Environment(
        loader=PackageLoader("trinity_sync", "cli"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=format_bytes, time=format_time, duration=format_duration)
    return environment.get_template(template).render(values)


def render_reports(
    reports: Sequence[JobReport], page: Callable[[JobReport], str], *, compare: bool = False
) -> str:
    """Return an HTML page of jobs, or with ``compare`` also of their figures and charts together.

    ``page`` returns the address of the report of one.
    """
    roots = [Path(each.root) for each in reports]
    names = [name_job(root, roots) for root in roots]
    figures: dict[str, list[str]] = {}
    charts: dict[str, list[Chart]] = {}
    for number, each in enumerate(reports if compare else ()):
        for caption, value in (summarize(each) | _list_settings(each)).items():
            figures.setdefault(caption, [""] * len(reports))[number] = value
        for kind, title in KINDS.items():
            for chart in (*chart_saves(each, kind), *chart_norms(each, kind)):
                of_job = replace(chart, title=names[number])
                charts.setdefault(f"{title}: {chart.title}", []).append(of_job)
    return _render(
        "reports.html.j2",
        names=list(zip(reports, names, strict=True)),
        page=page,
        figures=figures,
        charts={title: _draw_to_scale(shown) for title, shown in charts.items()},
    )


def _list_settings(report: JobReport) -> dict[str, str]:
    """Return what else may differ between jobs: settings, starts, and the newest metrics."""
    found = {"keep": report.keep or "all", "starts": f"{len(report.runs)}"}
    if report.remote:
        found["remote"] = report.remote
    rated = [row for row in report.steps if row.metrics]
    newest = max(rated, key=lambda row: (row.run or 0, row.step), default=None)
    if newest:
        found |= {f"{n} at step {newest.step}": f"{v:.4g}" for n, v in newest.metrics.items()}
    return found


def _draw_to_scale(charts: Sequence[Chart]) -> list[Chart]:
    """Return charts of the same value with the same scale."""
    highest = max(charts, key=lambda chart: chart.most)
    found = []
    for chart in charts:
        factor = chart.most / (highest.most or 1)
        bars = (replace(bar, heights=tuple(factor * h for h in bar.heights)) for bar in chart.bars)
        found.append(replace(chart, bars=tuple(bars), top=highest.top))
    return found


def render_report(report: JobReport) -> str:
    """Return the report of a job as one HTML page that loads nothing else."""
    newest_first = sorted(report.steps, key=lambda row: (row.run or 0, row.step), reverse=True)
    return _render(
        "report.html.j2",
        report=report,
        figures=summarize(report),
        charts={
            title: charts
            for kind, title in KINDS.items()
            if (charts := [*chart_saves(report, kind), *chart_norms(report, kind)])
        },
        disk=list(chart_disk(report)),
        shown=newest_first[:OPEN_ROWS],
        more=newest_first[OPEN_ROWS:MAX_ROWS],
        left_out=max(len(newest_first) - MAX_ROWS, 0),
    )


def summarize(report: JobReport) -> dict[str, str]:
    """Return the key figures of a job by their captions."""
    figures = {}
    newest: dict[str, int] = {}
    for kind, name in (("checkpoint", "newest checkpoint"), ("state_dict", "newest weights")):
        steps = [row for row in report.steps if kind in row.kinds and row.is_loadable]
        row = max(steps, key=lambda row: (row.run or 0, row.step), default=None)
        if row and row.step not in newest.values():  # a checkpoint has weights, too
            newest[name] = row.step
            age = max(report.created_at - (row.committed_at or 0.0), 0.0)
            figures[name] = f"step {row.step}, {format_duration(age)} ago"
    checkpoints = [each for each in report.saves if each.timing.kind == "checkpoint"]
    saves = (checkpoints or list(report.saves))[-20:]
    if stalls := sorted(_get_stall(each) for each in saves if each.timing.stalls):
        figures["median stall"] = format_duration(stalls[len(stalls) // 2])
    if totals := sorted(each.timing.total_s for each in saves):
        figures["median to commit"] = format_duration(totals[len(totals) // 2])
    if report.disk:
        figures["on disk"] = format_bytes(report.disk.nbytes)
        figures["disk free"] = format_bytes(report.disk.free_bytes)
    return figures


def chart_saves(report: JobReport, kind: str) -> Iterator[Chart]:
    """Yield the charts of the saves of a kind: stall, time to commit, speed, size."""
    saves = [each for each in report.saves if each.timing.kind == kind]
    stalled = [each for each in saves if each.timing.stalls]
    if stalled:
        worst = max(stalled, key=_get_stall)
        slow = worst.timing.longest_stall
        where = f" (step {worst.step}, {slow.role} rank {slow.rank})" if slow else ""
        stalls = [(each.step, (_get_stall(each),)) for each in stalled]
        yield from draw_bars("Trainer stall", stalls, format_duration, where=where, combine=max)
    phases = [
        (each.step, (each.timing.queue_s, each.timing.write_s, each.timing.commit_s))
        for each in saves
    ]
    names = ("queue", "write", "commit")
    yield from draw_bars("Submitted to committed", phases, format_duration, names=names)
    speeds = [(each.step, (each.timing.bytes_per_s,)) for each in saves]
    yield from draw_bars("Write speed", speeds, lambda nbytes: f"{format_bytes(nbytes)}/s")
    yield from draw_bars(
        "Size", [(each.step, (each.timing.nbytes,)) for each in saves], format_bytes
    )


def chart_norms(report: JobReport, kind: str) -> Iterator[Chart]:
    """Yield the charts of the norms of the weights and optimizers of the steps of a kind."""
    values: dict[str, list[tuple[int, ComponentHealth]]] = {}
    for row in report.steps:
        for each in row.health if row.kind == kind else ():
            if each.tensors:
                values.setdefault(f"{each.role}/{each.component}", []).append((row.step, each))
    for name, found in values.items():
        bad = [f"{each.nonfinite:,} at step {step}" for step, each in found if each.nonfinite]
        where = f"; non-finite values: {', '.join(bad[-5:])}" if bad else ""
        norms = [(step, (each.norm,)) for step, each in found]
        yield from draw_bars(f"Norm of {name}", norms, "{:.4g}".format, where=where)


def chart_disk(report: JobReport) -> Iterator[Chart]:
    """Yield the chart of the bytes of all steps, by save, and of what the next save found removed.

    Steps that the log of saves lacks, such as imported ones, count from their commit on.
    """
    logged = {(each.run, each.step) for each in report.saves}
    saves = [
        (each.committed_at, each.step, each.run, each.timing.nbytes) for each in report.saves
    ] + [
        (row.committed_at, row.step, row.run, row.nbytes)
        for row in report.steps
        if row.run is not None and row.committed_at and (row.run, row.step) not in logged
    ]
    removals = [(each.removed_at, each.step, each.run, None) for each in report.removals]
    on_disk: dict[int, tuple[int, int]] = {}
    bars: list[tuple[int, tuple[float, ...]]] = []
    for _, step, run, nbytes in sorted([*saves, *removals], key=lambda each: each[0]):
        of, known = on_disk.get(step, (run, 0))
        if nbytes is not None:
            on_disk[step] = run, nbytes + known * (of == run)
            bars.append((step, (sum(size for _, size in on_disk.values()), 0)))
        elif of == run and known and bars:
            del on_disk[step]
            bars[-1] = bars[-1][0], (bars[-1][1][0] - known, bars[-1][1][1] + known)
    names = ("kept", "removed after the save")
    yield from draw_bars("Disk used by steps", bars, format_bytes, names=names)


def draw_bars(
    title: str,
    saves: Sequence[tuple[int, tuple[float, ...]]],
    write: Callable[[float], str],
    *,
    names: tuple[str, ...] = ("",),
    where: str = "",
    combine: Callable[[Sequence[float]], float] = mean,
) -> Iterator[Chart]:
    """Yield a chart of the values of saves by step; none if none of them can be drawn.

    Saves with a value that is not finite are left out. ``names`` are those of the values, stacked
    from the bottom, ``where`` is added to the summary, and ``combine`` makes the value of saves
    that share a bar.
    """
    saves = [(step, values) for step, values in saves if all(map(is_drawable, values))]
    if not saves:
        return
    size = math.ceil(len(saves) / MAX_BARS)
    groups = [saves[start : start + size] for start in range(0, len(saves), size)]
    rows = [
        [combine(column) for column in zip(*(values for _, values in group), strict=True)]
        for group in groups
    ]
    top = max(map(sum, rows))
    bars = []
    for group, values in zip(groups, rows, strict=True):
        first, last = group[0][0], group[-1][0]
        steps = f"step {first}" if len(group) == 1 else f"steps {first} to {last}"
        parts = ", ".join(
            f"{name} {write(value)}".strip() for name, value in zip(names, values, strict=True)
        )
        bars.append(Bar(f"{steps}: {parts}", tuple(100 * value / (top or 1) for value in values)))
    summary = summarize_values([sum(values) for _, values in saves], write) + where
    ends = (f"step {saves[0][0]}", f"step {saves[-1][0]}")
    yield Chart(title, summary, tuple(bars), names, top, write(top), ends)


def is_drawable(value: float) -> bool:
    """Return whether a value can be drawn: it is finite, and so are sums of it."""
    return math.isfinite(value) and abs(value) < 1e300


def summarize_values(values: Sequence[float], write: Callable[[float], str]) -> str:
    """Return the newest, middle and greatest of some values, in words."""
    return f"last {write(values[-1])}, median {write(median(values))}, most {write(max(values))}"


def _get_stall(save: LoggedSave) -> float:
    longest = save.timing.longest_stall
    return longest.seconds if longest else 0.0
