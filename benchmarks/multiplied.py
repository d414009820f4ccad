"""Many saves out of a few real ones: rows of a Prefect server's database, and folders of steps.

Rows are those of real flow runs as they lie in SQLite. A copy has new ids wherever the ids of the
save stand, in JSON and in resource names too, and all its times are earlier by the same shift;
times within JSON stay. The server must not run meanwhile.
"""

import os
import re
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

_ABOUT = "instr(resource || related || payload, :run)"
ROWS = {
    "flow_run": "id = :run",
    "task_run": "flow_run_id = :run",
    "flow_run_state": "flow_run_id = :run",
    "task_run_state": "task_run_id IN (SELECT id FROM task_run WHERE flow_run_id = :run)",
    "log": "flow_run_id = :run",
    "artifact": "flow_run_id = :run",
    "events": _ABOUT,
    "event_resources": f"event_id IN (SELECT id FROM events WHERE {_ABOUT})",
}
"""Where a save's rows are, by table."""
_UUID = re.compile(r"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})")
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?")
AT_ONCE = 100
"""Saves whose rows go in with one statement a table."""


@dataclass(frozen=True)
class _Row:
    constant: tuple[Any, ...]
    times: tuple[tuple[int, datetime], ...]
    """Cells that are times."""
    texts: tuple[tuple[int, tuple[str, ...]], ...]
    """Cells with ids of the save in them, as pieces: text and id in turn."""

    def copied(self, ids: dict[str, str], shift: timedelta) -> tuple[Any, ...]:
        cells = list(self.constant)
        for at, time in self.times:
            cells[at] = (time - shift).isoformat(" ", "microseconds")
        for at, pieces in self.texts:
            cells[at] = "".join([ids.get(piece, piece) for piece in pieces])
        return tuple(cells)


class Saves:
    """The rows of the real saves in a database, to be copied.

    Args:
        database: file of a server that is stopped.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        with sqlite3.connect(database) as connection:
            found = connection.execute("SELECT id FROM flow_run WHERE state_type = 'COMPLETED'")
            self._saves = [_rows_of(connection, run) for (run,) in found.fetchall()]
        connection.close()

    @property
    def rows(self) -> dict[str, float]:
        """Rows a save, by table."""
        each = len(self._saves)
        return {name: sum(len(s[0][name]) for s in self._saves) / each for name in ROWS}

    def multiply(self, numbers: range, every_s: float) -> None:
        """Add a copy a number, that many times ``every_s`` seconds older than its original."""
        connection = sqlite3.connect(self._database, isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-1000000"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute("BEGIN")
        for start in range(0, len(numbers), AT_ONCE):
            copies = [self._copy(n, n * every_s) for n in numbers[start : start + AT_ONCE]]
            for name in ROWS:
                rows = [row for copy in copies for row in copy[name]]
                marks = ",".join("?" * len(rows[0])) if rows else ""
                if rows:
                    connection.executemany(f'INSERT INTO "{name}" VALUES ({marks})', rows)
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.close()

    def _copy(self, number: int, shift_s: float) -> dict[str, list[tuple[Any, ...]]]:
        rows, own, key = self._saves[number % len(self._saves)]
        shift, random = timedelta(seconds=shift_s), Random(number)
        ids = {each: _later(each, shift, random) for each in own}
        ids[key] = f"{key}/{number}"
        return {name: [row.copied(ids, shift) for row in rows[name]] for name in ROWS}


def multiply_steps(root: Path, original: int, steps: Sequence[int], every_s: float) -> None:
    """Give a job more committed steps, with links to the files of one that it has."""
    from trinity_sync.layout import step_folder
    from trinity_sync.storage.manifest import read_manifest, write_manifest_into

    manifest = read_manifest(root, original)
    assert manifest, f"step {original} of {root} is not committed"

    def one(step: int) -> None:
        folder = step_folder(root, step)
        for record in manifest.files:
            (folder / record.path).parent.mkdir(parents=True, exist_ok=True)
            os.link(step_folder(root, original) / record.path, folder / record.path)
        committed_at = manifest.committed_at - (original - step) * every_s
        write_manifest_into(folder, replace(manifest, step=step, committed_at=committed_at))

    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(one, steps):
            pass


def _rows_of(
    connection: sqlite3.Connection, run: str
) -> tuple[dict[str, list[_Row]], set[str], str]:
    """The rows of a save, its own ids, and its idempotency key, which has to be unique as well."""
    raw: dict[str, list[tuple[Any, ...]]] = {}
    own = set[str]()
    for name, where in ROWS.items():
        answer = connection.execute(f'SELECT * FROM "{name}" WHERE {where}', {"run": run})
        columns = [column[0] for column in answer.description]
        raw[name] = answer.fetchall()
        own |= {row[columns.index("id")] for row in raw[name]}
    asked = connection.execute("SELECT idempotency_key FROM flow_run WHERE id = ?", (run,))
    key = str(asked.fetchone()[0])
    return {name: [_taken_apart(r, own, key) for r in rows] for name, rows in raw.items()}, own, key


def _taken_apart(row: tuple[Any, ...], own: set[str], key: str) -> _Row:
    texts = [(at, cell) for at, cell in enumerate(row) if isinstance(cell, str)]
    times = tuple((at, datetime.fromisoformat(c)) for at, c in texts if _TIME.fullmatch(c))
    pieces = ((at, (c,) if c == key else tuple(_UUID.split(c))) for at, c in texts)
    return _Row(row, times, tuple((at, p) for at, p in pieces if p == (key,) or own & {*p}))


def _later(old: str, shift: timedelta, random: Random) -> str:
    """An id of the same kind; those that begin with their time have it shifted."""
    bits = random.getrandbits(128)
    was = uuid.UUID(old)
    if was.version == 7:
        since = (was.int >> 80) - int(shift.total_seconds() * 1000)
        bits = (since << 80) | (bits & ((1 << 80) - 1))
    kind = was.version or 4
    return str(uuid.UUID(int=bits & ~(0xF << 76) & ~(3 << 62) | kind << 76 | 2 << 62))


def tables(database: Path) -> Iterator[tuple[str, int]]:
    """All tables with their numbers of rows."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    for (name,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table'"
    ).fetchall():
        yield name, connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0]
    connection.close()
