"""Formats of the command's output: ``-o table|wide|json|jsonl|name``.

A command declares what it prints as a dataclass (see `schema`). Its fields are the keys of JSON,
and those annotated with a `Column` are also columns of the table. On a terminal a table has
headings, ages and colours; elsewhere it is tab-separated, with full values and no headings.
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from trinity_sync.fs.direct_io import OnProgress, no_progress
from trinity_sync.orchestration.quantities import format_bytes

SCHEMA = 1
"""Version of the JSON documents, which is in each of them."""


Output = Annotated[
    Literal["table", "wide", "json", "jsonl", "name"],
    typer.Option(
        "--output",
        "-o",
        metavar="FORMAT",
        help="table, wide, json, jsonl or name (one name on each line).",
        show_default=False,
    ),
]
Color = Literal["auto", "always", "never"]
Mode = Literal["short", "wide", "plain"]
"""How a value is written: for a terminal, for ``wide`` on a terminal, or for a file or pipe."""

STYLES = {
    "green": ("valid", "running", "external", "online", "ok", "committed", "completed", "restored"),
    "red": ("corrupted", "failed", "fail", "dead", "away", "truncated", "missing", "crashed"),
    "yellow": ("writing", "pending", "warn", "another format", "would be removed", "cancelled"),
    "dim": ("superseded", "evicted", "absent", "not committed", "removed", "replaced", "same"),
}
"""Colour of each status word; other words have none."""

LAST_WIDTH, LEAST_WIDTH = 20, 12
"""Characters of the last column, and of another text, that are shown however narrow a terminal."""

color: Color = "auto"
"""Value of ``--color``, set by the command before it prints."""


@dataclass(frozen=True)
class Column:
    """How a field of a row appears in the table.

    ``wide`` is whether only that format shows it. ``form`` writes a value, by default according to
    its type.
    """

    heading: str
    right: bool = False
    wide: bool = False
    form: Callable[[Any, Mode], str] | None = None

    def write(self, value: Any, mode: Mode) -> str:
        """Return a value as text."""
        if value is None or value == "" or value == []:
            return "" if mode == "plain" else "-"
        if self.form:
            return self.form(value, mode)
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, datetime):
            return write_time(value, mode)
        if isinstance(value, (list, tuple)):
            return ", ".join(" ".join(str(each).split()) for each in value)
        return " ".join(value.split()) if isinstance(value, str) else str(value)


# Values


def utc(seconds: float) -> datetime:
    """Return a time in seconds since the epoch as a datetime."""
    return datetime.fromtimestamp(seconds, timezone.utc)


def format_time(when: datetime | float) -> str:
    """Format a time, or seconds since the epoch, as local time to the second."""
    if not isinstance(when, datetime):
        when = utc(when)
    return when.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def format_age(seconds: float) -> str:
    """Format an age, such as ``45s``, ``12m``, ``5h`` or ``3d``; a time to come is ``0s``."""
    seconds = max(seconds, 0.0)
    for unit, length, limit in (("s", 1, 120), ("m", 60, 7200), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def format_duration(seconds: float) -> str:
    """Format a duration, such as ``0.52s``, ``9.1s``, ``3m12s`` or ``2h05m``."""
    if seconds < 10:
        return f"{seconds:.2g}s" if seconds < 1 else f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest}s"
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def write_size(value: int, mode: Mode) -> str:
    """Write a number of bytes: rounded on a terminal, all digits elsewhere."""
    return str(value) if mode == "plain" else format_bytes(value)


def write_duration(value: float, mode: Mode) -> str:
    """Write a duration: rounded on a terminal, seconds elsewhere."""
    return f"{value:.3f}" if mode == "plain" else format_duration(value)


def write_time(value: datetime, mode: Mode) -> str:
    """Write a time: its age, local time for ``wide``, UTC elsewhere."""
    if mode == "short":
        return format_age(time.time() - value.timestamp())
    return format_time(value) if mode == "wide" else write_utc(value)


def write_utc(value: datetime) -> str:
    """Write a time as RFC 3339 in UTC."""
    return value.astimezone(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def to_json(value: Any) -> Any:
    """Return a row, or a value in one, as JSON can represent it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    if isinstance(value, datetime):
        return write_utc(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# Printing


def is_text(output: Output) -> bool:
    """Return whether a format is read by people."""
    return output in ("table", "wide")


def print_rows(noun: str, rows: Sequence[Any], output: Output, *, empty: str = "") -> None:
    """Print rows in a format.

    ``noun`` is their key in the JSON document, such as ``steps``. ``empty`` is a sentence for
    stderr if there are none.
    """
    if output == "json":
        _print_document(noun, rows)
    elif output == "jsonl":
        for each in rows:
            typer.echo(json.dumps(to_json(each)))
    elif output == "name":
        for each in rows:
            typer.echo(_name(each))
    elif rows:
        print_table(type(rows[0]), rows, output)
    elif empty:
        typer.echo(empty, err=True)


def print_object(
    noun: str, value: Any, output: Output, text: str | Callable[[], None] = ""
) -> None:
    """Print the result of a command that has no rows.

    ``noun`` is its key in the JSON document, such as ``pin``. ``text`` is what ``table`` and
    ``wide`` print, or a function that prints it.
    """
    if output == "json":
        _print_document(noun, value)
    elif output == "jsonl":
        typer.echo(json.dumps(to_json(value)))
    elif output == "name":
        if value is not None:
            typer.echo(_name(value))
    elif callable(text):
        text()
    else:
        typer.echo(text)


def print_table(row: type, rows: Sequence[Any], output: Output) -> None:
    """Print rows as a table, whose lines fit into the width of a terminal unless it is wide.

    The last column is cut first, down to `LAST_WIDTH`, then the longest other texts in the middle.
    """
    wide = output == "wide"
    shown = [(name, each) for name, each in list_columns(row).items() if wide or not each.wide]
    on_terminal = sys.stdout.isatty()
    mode: Mode = "plain" if not on_terminal else "wide" if wide else "short"
    cells = [[each.write(getattr(one, name), mode) for name, each in shown] for one in rows]
    if not on_terminal:
        for line in cells:
            styled = [paint(cell) if _is_status(name) else cell
                      for cell, (name, _) in zip(line, shown, strict=True)]  # fmt: skip
            typer.echo("\t".join(styled), color=True)
        return
    for line in cells:
        line[-1] = "" if line[-1] == "-" else line[-1]
    lines = [[each.heading for _, each in shown], *cells]
    widths = [max(len(line[at]) for line in lines) for at in range(len(shown))]
    room = max(widths)
    if not wide:
        room = shutil.get_terminal_size().columns - 2 * (len(widths) - 1)
        texts = [
            at
            for at, (name, each) in enumerate(shown[:-1])
            if not each.right and not _is_status(name)
        ]
        _narrow(widths, texts, room - min(widths[-1], LAST_WIDTH))
        room = max(room - sum(widths[:-1]), LAST_WIDTH)
        widths[-1] = min(widths[-1], room)
    for index, line in enumerate(lines):
        line[:-1] = [
            _cut_middle(cell, width) for cell, width in zip(line[:-1], widths[:-1], strict=True)
        ]
        if len(line[-1]) > room:
            line[-1] = line[-1][: room - 1] + "…"
        padded = [
            cell.rjust(width) if each.right else cell.ljust(width)
            for cell, width, (_, each) in zip(line, widths, shown, strict=True)
        ]
        if index:
            for at, (name, _) in enumerate(shown):
                if _is_status(name):
                    padded[at] = padded[at].replace(line[at], paint(line[at]), 1)
        typer.echo("  ".join(padded).rstrip(), color=True)


def _narrow(widths: list[int], texts: Sequence[int], room: int) -> None:
    """Reduce the widest columns of text until all columns but the last fit, if they can.

    ``texts`` are the columns that may be cut, and ``room`` is for all columns but the last.
    """
    for _ in range(sum(widths[:-1]) - room):
        widest = max(texts, key=lambda at: widths[at], default=None)
        if widest is None or widths[widest] <= LEAST_WIDTH:
            return
        widths[widest] -= 1


def _cut_middle(text: str, width: int) -> str:
    """Return a text with … in the place of what does not fit, so that both its ends are seen."""
    if len(text) <= width:
        return text
    tail = width // 2
    return f"{text[: width - tail - 1]}…{text[-tail:]}"


def list_columns(row: type) -> dict[str, Column]:
    """Return the columns of the table of a dataclass, by the name of the field."""
    hints = get_type_hints(row, include_extras=True)
    return {
        name: each
        for name, hint in hints.items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, Column)
    }


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


def _is_status(name: str) -> bool:
    return name in ("status", "state")


def _name(value: Any) -> str:
    """Return the first field of a row, which names it."""
    return str(getattr(value, fields(value)[0].name))


def _print_document(noun: str, value: Any) -> None:
    typer.echo(json.dumps({"schema": SCHEMA, noun: to_json(value)}, indent=2))


@contextmanager
def progress_bar(what: str, *, of_steps: bool = False) -> Iterator[OnProgress]:
    """Show a progress bar of bytes or steps, and yield the callback that updates it.

    ``what`` describes the work, such as ``reading``.
    """
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich import progress
    from rich.console import Console

    bytes_columns = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
    with progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        *([progress.MofNCompleteColumn()] if of_steps else bytes_columns),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # stdout may be a file
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, advance=done, total=total)
