"""Render the report of a job with the template ``report.html.j2``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from trinity_sync.cli.charts import (
    HEIGHT,
    WIDE,
    Bar,
    Chart,
    Point,
    draw_bars,
    draw_key,
    draw_points,
    is_drawable,
    round_up,
    summarize_values,
)
from trinity_sync.cli.output import format_time
from trinity_sync.orchestration.quantities import format_bytes, format_duration
from trinity_sync.storage.runs import Run, find_superseding_run

if TYPE_CHECKING:
    from trinity_sync.orchestration.report.facts import JobReport
    from trinity_sync.storage.save_timing import LoggedSave

OPEN_ROWS = 20
"""Steps that are shown at once."""
MAX_ROWS = 500
"""Steps that are listed in all; a browser takes long for more."""
MAX_METRICS = 6
KINDS = {"checkpoint": "Checkpoints", "state_dict": "Weights"}
DAY_S = 86_400
MARKS = {"Superseded": "superseded", "Evicted": "evicted"}


def render_report(report: JobReport) -> str:
    """Return the report of a job as one HTML page that loads nothing else."""
    environment = Environment(
        loader=PackageLoader("trinity_sync", "cli"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        size=format_bytes, time=format_time, duration=format_duration, key=draw_key
    )
    newest_first = sorted(report.steps, key=lambda row: (row.run or 0, row.step), reverse=True)
    return environment.get_template("report.html.j2").render(
        report=report,
        figures=summarize(report),
        progress=draw_job(report),
        charts={
            title: charts for kind, title in KINDS.items() if (charts := chart_saves(report, kind))
        },
        metrics=list(chart_metrics(report)),
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


def draw_job(report: JobReport) -> Chart | None:
    """Return the chart of steps over time; None if nothing was submitted."""
    runs = [Run(row.number, "", row.resumed_from) for row in report.runs]
    status = {(row.run, row.step): row.status for row in report.steps}
    lines: dict[int, list[Point]] = {}
    points: dict[tuple[int, int, str], float] = {
        (each.run, each.step, each.timing.kind): each.committed_at for each in report.saves
    }
    for row in report.steps:  # imported steps are not in the log
        if row.run is not None and row.committed_at and not row.timings:
            kind = "checkpoint" if "checkpoint" in row.kinds else "state_dict"
            points.setdefault((row.run, row.step, kind), row.committed_at)
    for (run, step, kind), at in sorted(points.items(), key=lambda item: item[1]):
        superseded = find_superseding_run(runs, run, step) is not None
        mark = "superseded" if superseded else kind
        mark = "corrupted" if status.get((run, step)) == "corrupted" else mark
        title = f"step {step} of run {run}, {mark}, {format_time(at)}"
        lines.setdefault(run, []).append(Point(at, step, title, mark, step))
    marks = [
        Point(
            each.at,
            each.step,
            f"step {each.step}, {each.state}, {format_time(each.at)}",
            MARKS.get(each.state, "failed"),
            each.step,
        )
        for each in report.marks
        if each.at
    ]
    drawn = [*(point for line in lines.values() for point in line), *marks]
    if not drawn:
        return None
    start, end = min(point.x for point in drawn), max(point.x for point in drawn)
    shown = "%H:%M:%S" if end - start < 900 else "%H:%M" if end - start < DAY_S else "%d %b %H:%M"
    count = 5 if end - start >= 60 else 2
    times = [start + (end - start) * number / (count - 1) for number in range(count)]
    saves = sum(map(len, lines.values()))
    return draw_points(
        "Steps over time",
        f"{saves:,} saves in {len(lines)} run{'s' * (len(lines) != 1)}",
        [lines[run] for run in sorted(lines)],
        marks,
        top=round_up(max(point.y for point in drawn) or 1),
        label=lambda step: f"{step:,.0f}",
        ticks=[(at, f"{datetime.fromtimestamp(at).astimezone():{shown}}") for at in times],
        axis=f"time ({datetime.fromtimestamp(end).astimezone().tzname()})",
        width=WIDE,
        height=HEIGHT + 40,
    )


def chart_saves(report: JobReport, kind: str) -> list[Chart]:
    """Return the charts of the saves of a kind: stall, time to commit, speed, size."""
    saves = [each for each in report.saves if each.timing.kind == kind]
    if not saves:
        return []
    charts = []
    if stalled := [each for each in saves if each.timing.stalls]:
        worst = max(stalled, key=_get_stall)
        slow = worst.timing.longest_stall
        where = f" (step {worst.step}, {slow.role} rank {slow.rank})" if slow else ""
        charts.append(
            draw_bars(
                "Trainer stall",
                summarize_values([*map(_get_stall, stalled)], format_duration) + where,
                [Bar(str(each.step), (_get_stall(each),)) for each in stalled],
                ("",),
                format_duration,
                combine=max,
            )
        )
    charts.append(
        draw_bars(
            "Submitted to committed",
            summarize_values([each.timing.total_s for each in saves], format_duration),
            [
                Bar(
                    str(each.step), (each.timing.queue_s, each.timing.write_s, each.timing.commit_s)
                )
                for each in saves
            ],
            ("queue", "write", "commit"),
            format_duration,
        )
    )
    for title, values, suffix in (
        ("Write speed", [each.timing.bytes_per_s for each in saves], "/s"),
        ("Size", [float(each.timing.nbytes) for each in saves], ""),
    ):
        bars = [Bar(str(each.step), (value,)) for each, value in zip(saves, values, strict=True)]
        finite = [value for value in values if is_drawable(value)] or [0.0]
        write = partial(_write_size, suffix=suffix)
        charts.append(draw_bars(title, summarize_values(finite, write), bars, ("",), write))
    return charts


def _write_size(nbytes: float, suffix: str) -> str:
    return f"{format_bytes(nbytes)}{suffix}"


def chart_metrics(report: JobReport) -> Iterator[Chart]:
    """Yield a chart of each recorded metric, with the steps that are on disk."""
    names = sorted({name for row in report.steps for name in row.metrics})
    for name in names[:MAX_METRICS]:
        values = {row.step: row.metrics[name] for row in report.steps if name in row.metrics}
        points = [
            Point(step, value, f"step {step}: {value}")
            for step, value in values.items()
            if is_drawable(value)
        ]
        if points:
            best = max(points, key=lambda point: point.y)
            low, high = min(point.y for point in points), best.y
            room = 0.5 if low == high else 0.0
            chart = draw_points(
                name,
                f"last {points[-1].y:.4g}, highest {best.y:.4g} at step {best.x}",
                [points],
                low=low - room,
                top=high + room,
                label=lambda value: f"{value:.3g}",
                ticks=[(point.x, str(point.x)) for point in (points[0], points[-1])],
                axis="step",
            )
            yield replace(chart, legend=())


def _get_stall(save: LoggedSave) -> float:
    longest = save.timing.longest_stall
    return longest.seconds if longest else 0.0
