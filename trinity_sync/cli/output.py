"""Formats of the command's output: ``-o table|json``.

A command prints dataclasses. Their fields are the keys of JSON, and it names those that are columns
of its table. On a terminal a table has headings, ages and colours; elsewhere it is tab-separated,
with full values and no headings. What a value is, a size or a time, its key tells: `KEYS`, `TIMES`.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trinity_sync.fs.direct_io import OnProgress, no_progress
from trinity_sync.orchestration.quantities import format_bytes, format_duration

SCHEMA = 1
"""Version of the JSON documents, which is in each of them."""
KEYS = {
    "found": "message",
    "nbytes": "bytes",
    "state": "status",
    "todo": "hint",
    "why": "reason",
    "wrong": "reason",
}
"""Keys of fields that have another name in the package."""
TIMES = ("at", "since", "as_of")
"""Keys of times in seconds since the epoch, with those that end in ``_at``."""
HEADINGS = {
    "bytes": "SIZE",
    "committed_at": "AGE",
    "path": "FILE",
    "pinned_at": "AGE",
    "seconds": "TIME",
    "since": "AGE",
    "stale_s": "STALE FOR",
    "updated_at": "UPDATED",
    "url": "ADDRESS",
}
"""Headings of columns that are not the key."""

Output = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="Format.")]
Color = Literal["auto", "always", "never"]

STYLES = {
    "green": ("valid", "running", "external", "online", "ok", "committed", "completed", "restored"),
    "red": ("corrupted", "failed", "fail", "dead", "away", "truncated", "missing", "crashed"),
    "yellow": ("writing", "pending", "warn", "would be removed", "cancelled"),
    "dim": ("superseded", "absent", "not used", "idle", "not committed", "removed", "replaced"),
}
"""Colour of each status word; other words have none."""

color: Color = "auto"
"""Value of ``--color``, set by the command before it prints."""


def is_time(key: str) -> bool:
    """Return whether the value of a key is a time."""
    return key in TIMES or key.endswith("_at")


def write_utc(seconds: float) -> str | None:
    """Write a time as RFC 3339 in UTC; None for 0, which is no time, and after the year 9999."""
    try:
        when = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return when.isoformat(timespec="seconds").replace("+00:00", "Z") if seconds else None


def format_time(seconds: float) -> str:
    """Format a time as local time to the second."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def to_json(value: Any, key: str = "") -> Any:
    """Return a value of a key as JSON can represent it."""
    if is_dataclass(value) and not isinstance(value, type):
        names = {each.name: KEYS.get(each.name, each.name) for each in fields(value)}
        return {key: to_json(getattr(value, name), key) for name, key in names.items()}
    if isinstance(value, Mapping):
        return {str(name): to_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, float) and is_time(key):
        return write_utc(value)
    if isinstance(value, Path):
        return str(value)
    return None if value == "" else value


def print_rows(
    noun: str, rows: Sequence[Any], output: Output, columns: str, *, empty: str = ""
) -> None:
    """Print rows in a format.

    ``noun`` is their key in the JSON document, such as ``steps``, and ``columns`` the keys that a
    table has, between spaces. ``empty`` is a sentence for stderr if there are no rows.
    """
    if output == "json":
        print_document(noun, rows)
    elif rows:
        print_table(rows, columns)
    elif empty:
        typer.echo(empty, err=True)


def print_object(
    noun: str, value: Any, output: Output, text: str | Callable[[], None] = ""
) -> None:
    """Print the result of a command that has no rows.

    ``noun`` is its key in the JSON document, such as ``pin``. ``text`` is what ``table`` prints, or
    a function that prints it.
    """
    if output == "json":
        print_document(noun, value)
    elif callable(text):
        text()
    else:
        typer.echo(text)


def print_document(noun: str, value: Any) -> None:
    """Print a JSON document."""
    typer.echo(json.dumps({"schema": SCHEMA, noun: to_json(value)}, indent=2))


def print_table(rows: Sequence[Any], columns: str) -> None:
    """Print rows as a table, which wraps texts on a terminal."""
    keys = columns.split()
    names = {KEYS.get(each.name, each.name): each.name for each in fields(rows[0])}
    on_terminal = sys.stdout.isatty()
    shown = {}
    for key in keys:
        values = [getattr(row, names.get(key, key)) for row in rows]
        cells = [write_cell(key, value, on_terminal) for value in values]
        shown[key] = values, [*map(paint, cells)] if key == "status" else cells
    if not on_terminal:
        for line in zip(*(cells for _, cells in shown.values()), strict=True):
            typer.echo("\t".join(line), color=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(color_system="standard" if use_color() else None)
    between = 2 if console.width >= 80 else 1
    table = Table(box=None, pad_edge=False, padding=(0, between, 0, 0), header_style="")
    for key, (values, cells) in shown.items():
        is_number = {*map(type, values)} <= {int, float, type(None)}
        heading = HEADINGS.get(key, key.upper().replace("_", " "))
        texts = [Text.from_ansi(cell).plain for cell in cells]
        if not is_number:  # numbers have units
            texts = " ".join(texts).split()
        table.add_column(
            heading,
            justify="right" if is_number else "left",
            # what is longer, such as a path, is broken on a narrow terminal
            min_width=max(len(each) for each in (*texts, *heading.split()) if len(each) <= 20),
            overflow="fold",
        )
    for line in zip(*(cells for _, cells in shown.values()), strict=True):
        last = "" if line[-1] == "-" else line[-1]
        table.add_row(*map(Text.from_ansi, line[:-1]), Text(last))
    console.print(table)


def write_cell(key: str, value: Any, on_terminal: bool) -> str:
    """Return the value of a key as text: rounded on a terminal, all digits elsewhere."""
    if value is None or value == "" or value in ([], ()):
        return "-" if on_terminal else ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        between = "; " if key == "notes" else ", "
        return between.join(" ".join(str(each).split()) for each in value)
    if key == "kind":  # a table calls a state_dict weights
        return "weights" if value == "state_dict" else str(value)
    if key == "digest" and on_terminal:  # in whole, no table of files fits 80 columns
        return f"{value[:17]}…"
    if isinstance(value, str):
        return " ".join(value.split())
    if key == "bytes":
        return format_bytes(value) if on_terminal else str(value)
    if is_time(key):
        age_s = max(time.time() - value, 0.0)
        return format_duration(age_s) if on_terminal else write_utc(value) or ""
    if key == "seconds" or key.endswith("_s"):
        return format_duration(value) if on_terminal else f"{value:.3f}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def paint(word: str) -> str:
    """Return a status word in its colour, if stdout shows colours."""
    if not use_color():
        return word
    for name, words in STYLES.items():
        if word in words:
            return typer.style(word, dim=True) if name == "dim" else typer.style(word, fg=name)
    return word


def use_color() -> bool:
    """Return whether stdout shows colours: ``--color``, then ``NO_COLOR``, then a terminal."""
    if color != "auto":
        return color == "always"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


@contextmanager
def progress_bar(what: str) -> Iterator[OnProgress]:
    """Yield the callback that updates a progress bar of bytes, from its first call on.

    ``what`` describes the work, such as ``reading``.
    """
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # stdout may be a file
    )
    task = bar.add_task(what, total=None)

    def show(done: int, total: int) -> None:
        bar.start()  # not before: an error of the first step stands alone
        bar.update(task, advance=done, total=total)

    try:
        yield show
    finally:
        bar.stop()
