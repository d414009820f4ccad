"""Draw charts as inline SVG: no script, linear axes, axis labels and a legend.

Each function returns a `Chart`; colours are classes of the page's style sheet. Many saves are drawn
as groups of consecutive saves, so that a chart has at most `MAX_BARS` bars.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from markupsafe import Markup

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
    """A step in a chart of points, or the value of a metric there."""

    x: float
    y: float
    title: str
    mark: str = "checkpoint"
    """One of `SHAPES`."""
    step: int | None = None
    """Step that the page names; None for a metric."""


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
    top = round_up(max((sum(values) for values in heights), default=0.0))
    width, height = NARROW - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    pitch = width / max(len(groups), 1)
    parts = [_draw_y_axis(top, label, NARROW, 0.0, height)]
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


def draw_points(
    title: str,
    summary: str,
    lines: Sequence[Sequence[Point]],
    marks: Sequence[Point] = (),
    *,
    top: float,
    low: float = 0.0,
    label: Callable[[float], str],
    ticks: Sequence[tuple[float, str]],
    axis: str,
    width: int = NARROW,
    height: int = HEIGHT,
) -> Chart:
    """Draw points, those of a line connected, and ``marks``, which are on no line.

    The y axis is from ``low`` to ``top``; ``ticks`` are those of the x axis, from its begin to its
    end, whose name is ``axis``.
    """
    start, span = ticks[0][0], max(ticks[-1][0] - ticks[0][0], 1.0)
    wide, tall = width - LEFT - RIGHT, height - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - start) / span * wide, TOP + tall - (y - low) / (top - low) * tall

    parts = [_draw_y_axis(top, label, width, low, tall)]
    for line in lines:
        path = " ".join("{:.1f},{:.1f}".format(*place(point.x, point.y)) for point in line)
        parts.append(Markup("<polyline class='line' points='{}'/>").format(path))
    points = [*(point for line in lines for point in line), *marks]
    for point in sorted(points, key=lambda each: (each.mark not in ON_LINE, each.x)):
        parts.append(_draw_mark(*place(point.x, point.y), point))
    for number, (x, text) in enumerate(ticks):
        anchor = "start" if number == 0 else "end" if number == len(ticks) - 1 else "middle"
        parts.append(_draw_text(place(x, low)[0], TOP + tall + 16, text, anchor))
    parts.append(_draw_text(LEFT + wide / 2, TOP + tall + 34, axis))
    used = [mark for mark in SHAPES if any(point.mark == mark for point in points)]
    legend = tuple((mark, "weights only" if mark == "state_dict" else mark) for mark in used)
    return Chart(title, summary, _wrap(parts, width, f"{title}: {summary}", height), legend)


def draw_key(name: str) -> Markup:
    """Return the sign of a series or mark, which its class names, for a legend."""
    if name in SHAPES:
        shape = _draw_mark(8, 8, Point(0, 0, "", name))
    else:
        shape = Markup("<rect class='{}' x='2' y='2' width='12' height='12'/>").format(name)
    return Markup("<svg class='key' viewBox='0 0 16 16' aria-hidden='true'>{}</svg>").format(shape)


def summarize_values(values: Sequence[float], write: Callable[[float], str]) -> str:
    """Return the newest, middle and greatest of some values, in words."""
    return f"last {write(values[-1])}, median {write(median(values))}, most {write(max(values))}"


def _draw_mark(x: float, y: float, point: Point) -> Markup:
    numbers = {"x": x, "y": y, "l": x - 5, "r": x + 5, "t": y - 5, "b": y + 5}
    shape = SHAPES[point.mark].format(**{name: f"{value:.1f}" for name, value in numbers.items()})
    if not point.title:
        return Markup("<g class='{}'>{}</g>").format(point.mark, Markup(shape))
    named = "" if point.step is None else Markup(" data-step='{}'").format(point.step)
    return Markup("<g class='{}'{}>{}<title>{}</title></g>").format(
        point.mark, named, Markup(shape), point.title
    )


def _draw_y_axis(
    top: float, label: Callable[[float], str], width: int, low: float, height: int
) -> Markup:
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


def round_up(value: float) -> float:
    """Return the next number that divides into four round steps; 1 for none."""
    if value < 1e-300:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(
        each for each in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if value <= each * power
    )
