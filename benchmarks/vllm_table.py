"""The table of ``benchmarks.vllm_updates``, for the terminal and the documentation."""

from collections.abc import Iterator, Sequence

from benchmarks.measure import Record

OURS = "trinity_sync"
COMMIT = "trinity_sync, from a commit"
FLOOR = "vLLM's own load"
COPY = "a copy of the model"
COLUMNS = (
    "",
    "first token, ms",
    "lowest to highest",
    "trainer's stall, ms",
    "update, ms",
    "CPU, s",
    "written",
    "worker's peak",
    "trinity_sync takes",
    "copies beyond vLLM's load",
)
"""Bytes written and memory of the worker are in sizes of the model."""


def rows_of(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of one case; times are medians."""
    found = {(record.system, record.metric): record for record in records}
    ours, floor, copy = (found[way, "first token"].median for way in (OURS, FLOOR, COPY))
    for way in dict.fromkeys(record.system for record in records):
        total = found[way, "first token"]
        cells = [f"{1e3 * total.median:,.1f}", f"{1e3 * total.min:,.0f} to {1e3 * total.max:,.0f}"]
        for metric, unit, digits in (
            ("stall", 1e-3, 1),
            ("update", 1e-3, 1),
            ("cpu", 1.0, 2),
            ("written", total.bytes, 2),
            ("memory", total.bytes, 2),
        ):
            each = found.get((way, metric))
            cells.append(f"{each.median / unit:,.{digits}f}" if each else "")
        ratio = "" if way in (OURS, COPY) else f"{ours / total.median:.2f}"
        beyond = "" if way in (FLOOR, COPY) else f"{(total.median - floor) / copy:.1f}"
        yield way, *cells, ratio, beyond
