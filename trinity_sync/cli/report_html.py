"""Render the report of a job with the template ``report.html.j2``, and draw its charts.

Charts are inline SVG: no script, linear axes from zero, axis labels and a legend. Each function
returns a `Chart`; colours are classes of the page's style sheet. Many saves are drawn as groups of
consecutive saves, so that a chart has at most `MAX_BARS` bars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import mean, median
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trinity_sync.cli.output import format_time
from trinity_sync.orchestration.quantities import format_bytes, format_duration
from trinity_sync.storage.runs import Run, find_superseding_run

if TYPE_CHECKING:
    from trinity_sync.orchestration.report.facts import JobReport
    from trinity_sync.storage.save_timing import LoggedSave

MAX_BARS = 120
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 190, 62, 12, 10, 40
NARROW, WIDE = 480, 976
SHAPES = {
    "checkpoint": "<circle cx='{x}' cy='{y}' r='4'/>",
    "state_dict": "<circle cx='{x}' cy='{y}' r='2'/>",
    "superseded": "<circle cx='{x}' cy='{y}' r='4'/>",
    "failed": "<path d='M{l} {t}L{r} {b}M{l} {b}L{r} {t}'/>",
    "evicted": "<path d='M{l} {t}L{r} {b}M{l} {b}L{r} {t}'/>",
    "corrupted": "<path d='M{x} {t}L{r} {b}L{l} {b}Z'/>",
}
"""Marks by what they mean."""
ON_LINE = ("checkpoint", "state_dict", "superseded")
"""Marks that others are drawn over."""


@dataclass(frozen=True)
class Chart:
    """A chart and what to write above it."""

    title: str
    summary: str
    """The numbers that matter, in words; also its text for screen readers."""
    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()
    """Class and name of each series."""


@dataclass(frozen=True)
class Bar:
    """The values of one save, stacked from the bottom."""

    label: str
    """Label of the x axis: its step."""
    values: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """A save in the chart of progress."""

    at: float
    """Seconds since the epoch."""
    step: int
    mark: str
    """One of `SHAPES`."""
    title: str


def is_drawable(value: float) -> bool:
    """Return whether a value can be drawn: it is finite, and so are sums of it."""
    return math.isfinite(value) and abs(value) < 1e300


def draw_bars(
    title: str,
    summary: str,
    bars: Sequence[Bar],
    names: Sequence[str],
    label: Callable[[float], str],
    *,
    combine: Callable[[Sequence[float]], float] = mean,
) -> Chart:
    """Draw a bar for each save, in order of time.

    Those with a value that is not finite are left out; without any, the chart is empty. ``names``
    are those of the series, from the bottom. ``combine`` makes the value of a group of saves.
    """
    bars = [bar for bar in bars if all(map(is_drawable, bar.values))]
    size = math.ceil(len(bars) / MAX_BARS) or 1
    groups = [bars[start : start + size] for start in range(0, len(bars), size)]
    heights = [
        [combine([bar.values[number] for bar in group]) for number in range(len(names))]
        for group in groups
    ]
    top = _round_up(max((sum(values) for values in heights), default=0.0))
    width, height = NARROW - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    pitch = width / max(len(groups), 1)
    parts = [_draw_y_axis(top, label, NARROW)]
    for number, (group, values) in enumerate(zip(groups, heights, strict=True)):
        y, x = float(TOP + height), LEFT + number * pitch
        for series, value in enumerate(values):
            tall, wide = value / top * height, max(min(pitch * 0.8, 40), 0.8)
            y -= tall
            parts.append(
                Markup(
                    "<rect class='s{}' x='{:.1f}' y='{:.1f}' width='{:.2f}' height='{:.2f}'>"
                ).format(series, x + (pitch - wide) / 2, y, wide, tall)
                + Markup("<title>step {}{}: {}</title></rect>").format(
                    group[0].label,
                    f" to {group[-1].label}" if len(group) > 1 else "",
                    f"{names[series]} {label(value)}".strip(),
                )
            )
    parts += [
        _draw_text(LEFT + (number + 0.5) * pitch, HEIGHT - BOTTOM + 15, groups[number][0].label)
        for number in _choose_labels(len(groups))
    ]
    axis = "step" if size == 1 else f"step ({size} saves a bar)"
    parts.append(_draw_text(LEFT + width / 2, HEIGHT - 6, axis))
    legend = tuple((f"s{number}", name) for number, name in enumerate(names) if name)
    return Chart(title, summary, _wrap(parts, NARROW, f"{title}: {summary}"), legend)


def draw_lines(
    title: str, summary: str, points: Sequence[tuple[int, float]], label: Callable[[float], str]
) -> Chart:
    """Draw a value over steps as a line; its axis need not begin at zero.

    ``points`` are at least one pair of step and value.
    """
    low, high = min(value for _, value in points), max(value for _, value in points)
    if low == high:
        low, high = low - 0.5, high + 0.5
    first, last = points[0][0], points[-1][0]
    width, height = NARROW - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    placed = [
        (
            LEFT + (step - first) / max(last - first, 1) * width,
            TOP + height - (value - low) / (high - low) * height,
        )
        for step, value in points
    ]
    parts = [_draw_y_axis(high, label, NARROW, low)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    parts.append(Markup("<polyline class='line' points='{}'/>").format(line))
    for (x, y), (step, value) in zip(placed, points, strict=True):
        circle = Markup("<circle class='s1' cx='{:.1f}' cy='{:.1f}' r='2.5'>").format(x, y)
        parts.append(circle + Markup("<title>step {}: {}</title></circle>").format(step, value))
    for x, step in {LEFT: first, LEFT + width: last}.items():
        parts.append(_draw_text(x, HEIGHT - BOTTOM + 15, str(step)))
    parts.append(_draw_text(LEFT + width / 2, HEIGHT - 6, "step"))
    return Chart(title, summary, _wrap(parts, NARROW, f"{title}: {summary}"))


def draw_progress(lines: Sequence[Sequence[Point]], marks: Sequence[Point]) -> Chart | None:
    """Draw steps over time, a line for each run: a slope is progress, a resume a jump back.

    ``lines`` are the committed saves of each run, in order of time, and ``marks`` what is on no
    line, such as failed saves.
    """
    points = [*(point for line in lines for point in line), *marks]
    if not points:
        return None
    start, end = min(point.at for point in points), max(point.at for point in points)
    top = _round_up(max(point.step for point in points) or 1)
    width, height = WIDE - LEFT - RIGHT, HEIGHT + 40 - TOP - BOTTOM

    def place(point: Point) -> tuple[float, float]:
        x = LEFT + (point.at - start) / max(end - start, 1.0) * width
        return x, TOP + height - point.step / top * height

    parts = [_draw_y_axis(top, lambda step: f"{step:,.0f}", WIDE, height=height)]
    for line in lines:
        path = " ".join("{:.1f},{:.1f}".format(*place(point)) for point in line)
        parts.append(Markup("<polyline class='line' points='{}'/>").format(path))
    for point in sorted(points, key=lambda each: (each.mark not in ON_LINE, each.at)):
        parts.append(_draw_mark(*place(point), point))
    shown = "%H:%M" if end - start < 86400 else "%d %b %H:%M"
    shown = "%H:%M:%S" if end - start < 900 else shown
    count = 5 if end - start >= 60 else 2
    for number in range(count):
        at = start + (end - start) * number / (count - 1)
        x = LEFT + width * number / (count - 1)
        anchor = "start" if number == 0 else "end" if number == count - 1 else "middle"
        text = f"{datetime.fromtimestamp(at).astimezone():{shown}}"
        parts.append(_draw_text(x, TOP + height + 16, text, anchor))
    zone = datetime.fromtimestamp(end).astimezone().tzname()
    parts.append(_draw_text(LEFT + width / 2, TOP + height + 34, f"time ({zone})"))
    parts.append(_draw_text(LEFT, TOP - 2, "step", "start"))
    used = [mark for mark in SHAPES if any(point.mark == mark for point in points)]
    summary = f"{sum(map(len, lines)):,} saves in {len(lines)} run{'s' * (len(lines) != 1)}"
    legend = tuple((mark, "weights only" if mark == "state_dict" else mark) for mark in used)
    svg = _wrap(parts, WIDE, f"Steps over time: {summary}", HEIGHT + 40)
    return Chart("Steps over time", summary, svg, legend)


def draw_key(name: str) -> Markup:
    """Return the sign of a series or mark, which its class names, for a legend."""
    if name in SHAPES:
        shape = _draw_mark(8, 8, Point(0, 0, name, ""))
    else:
        shape = Markup("<rect class='{}' x='2' y='2' width='12' height='12'/>").format(name)
    return Markup("<svg class='key' viewBox='0 0 16 16' aria-hidden='true'>{}</svg>").format(shape)


def choose_duration_label(longest: float) -> Callable[[float], str]:
    """Return a formatter of durations in the unit that fits the longest, in seconds."""
    units = ((7200, 3600, "h"), (120, 60, "min"), (1, 1, "s"), (0, 0.001, "ms"))
    _, unit, name = next(each for each in units if longest >= each[0])
    return lambda seconds: f"{seconds / unit:.3g} {name}"


def choose_size_label(largest: float, suffix: str = "") -> Callable[[float], str]:
    """Return a formatter of bytes in the largest's unit, with a suffix such as ``/s``."""
    power = min(int(math.log10(largest) / 3) if largest >= 1 else 0, 5)
    name = ("B", "kB", "MB", "GB", "TB", "PB")[power]
    return lambda nbytes: f"{nbytes / 1000**power:.3g} {name}{suffix}"


def summarize_durations(seconds: Sequence[float]) -> str:
    """Return the newest, middle and longest of some durations, in words."""
    return (
        f"last {format_duration(seconds[-1])}, median {format_duration(median(seconds))}, longest "
        f"{format_duration(max(seconds))}"
    )


def summarize_bytes(sizes: Sequence[float], suffix: str = "") -> str:
    """Return the newest and the middle of some sizes, in words, with a suffix such as ``/s``."""
    last, middle = format_bytes(sizes[-1]), format_bytes(median(sizes))
    return f"last {last}{suffix}, median {middle}{suffix}"


def _draw_mark(x: float, y: float, point: Point) -> Markup:
    numbers = {"x": x, "y": y, "l": x - 5, "r": x + 5, "t": y - 5, "b": y + 5}
    shape = SHAPES[point.mark].format(**{name: f"{value:.1f}" for name, value in numbers.items()})
    if not point.title:
        return Markup("<g class='{}'>{}</g>").format(point.mark, Markup(shape))
    return Markup("<g class='{}' data-step='{}'>{}<title>{}</title></g>").format(
        point.mark, point.step, Markup(shape), point.title
    )


def _draw_y_axis(
    top: float, label: Callable[[float], str], width: int, low: float = 0.0, height: int = 0
) -> Markup:
    height = height or HEIGHT - TOP - BOTTOM
    parts = []
    for number in range(5):
        y = TOP + height * (1 - number / 4)
        parts.append(
            Markup("<line class='axis' x1='{}' x2='{}' y1='{:.1f}' y2='{:.1f}'/>").format(
                LEFT, width - RIGHT, y, y
            )
        )
        parts.append(_draw_text(LEFT - 6, y + 4, label(low + (top - low) * number / 4), "end"))
    return Markup("").join(parts)


def _draw_text(x: float, y: float, text: str, anchor: str = "middle") -> Markup:
    return Markup("<text x='{:.1f}' y='{:.1f}' text-anchor='{}'>{}</text>").format(
        x, y, anchor, text
    )


def _wrap(parts: Sequence[Markup], width: int, label: str, height: int = HEIGHT) -> Markup:
    return Markup("<svg role='img' aria-label='{}' viewBox='0 0 {} {}'>{}</svg>").format(
        label, width, height, Markup("\n").join(parts)
    )


def _choose_labels(count: int) -> list[int]:
    """Return the bars that have a label: at most six, the first and the last among them."""
    shown = min(count, 6)
    return sorted({round(number * (count - 1) / max(shown - 1, 1)) for number in range(shown)})


def _round_up(value: float) -> float:
    """Return the next number that divides into four round steps; 1 for none."""
    if value < 1e-300:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(
        each for each in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if value <= each * power
    )


OPEN_ROWS = 20
"""Steps that are shown at once."""
MAX_ROWS = 500
"""Steps that are listed in all; a browser takes long for more."""
MAX_METRICS = 6
KINDS = {"checkpoint": "Checkpoints", "state_dict": "Weights"}
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
        lines.setdefault(run, []).append(Point(at, step, mark, title))
    marks = [
        Point(
            each.at,
            each.step,
            MARKS.get(each.state, "failed"),
            f"step {each.step}, {each.state}, {format_time(each.at)}",
        )
        for each in report.marks
        if each.at
    ]
    return draw_progress([lines[run] for run in sorted(lines)], marks)


def chart_saves(report: JobReport, kind: str) -> list[Chart]:
    """Return the charts of the saves of a kind: stall, time to commit, speed, size."""
    saves = [each for each in report.saves if each.timing.kind == kind]
    if not saves:
        return []
    charts = []
    if stalled := [each for each in saves if each.timing.stalls]:
        stalls = [_get_stall(each) for each in stalled]
        worst = max(stalled, key=_get_stall)
        slow = worst.timing.longest_stall
        where = f" (step {worst.step}, {slow.role} rank {slow.rank})" if slow else ""
        charts.append(
            draw_bars(
                "Trainer stall",
                summarize_durations(stalls) + where,
                [Bar(str(each.step), (_get_stall(each),)) for each in stalled],
                ("",),
                choose_duration_label(max(stalls)),
                combine=max,
            )
        )
    timings = [each.timing for each in saves]
    totals = [timing.total_s for timing in timings]
    charts.append(
        draw_bars(
            "Submitted to committed",
            summarize_durations(totals),
            [
                Bar(
                    str(each.step), (each.timing.queue_s, each.timing.write_s, each.timing.commit_s)
                )
                for each in saves
            ],
            ("queue", "write", "commit"),
            choose_duration_label(max(totals)),
        )
    )
    sizes = {
        "Write speed": ([timing.bytes_per_s for timing in timings], "/s"),
        "Size": ([float(timing.nbytes) for timing in timings], ""),
    }
    for title, (values, suffix) in sizes.items():
        bars = [Bar(str(each.step), (value,)) for each, value in zip(saves, values, strict=True)]
        values = [value for value in values if is_drawable(value)] or [0.0]
        label = choose_size_label(max(values), suffix)
        charts.append(draw_bars(title, summarize_bytes(values, suffix), bars, ("",), label))
    return charts


def chart_metrics(report: JobReport) -> Iterator[Chart]:
    """Yield a chart of each recorded metric, with the steps that are on disk."""
    names = sorted({name for row in report.steps for name in row.metrics})
    for name in names[:MAX_METRICS]:
        points = [(row.step, row.metrics[name]) for row in report.steps if name in row.metrics]
        points = [(step, value) for step, value in points if is_drawable(value)]
        if points:
            best = max(points, key=lambda point: point[1])
            summary = f"last {points[-1][1]:.4g}, highest {best[1]:.4g} at step {best[0]}"
            yield draw_lines(name, summary, points, lambda value: f"{value:.3g}")


def _get_stall(save: LoggedSave) -> float:
    longest = save.timing.longest_stall
    return longest.seconds if longest else 0.0
