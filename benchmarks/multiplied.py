"""Many saves made of a few real ones: rows of a Prefect server's database, and folders of steps.

A copy of a flow run's rows has new ids wherever the ids of the save stand, in JSON and in resource
names too, and all its times are earlier by the same shift; times within JSON stay. The server must
not run meanwhile.
"""

import os
import re
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.databases import Database

_ABOUT = "CAST(resource AS text) || CAST(related AS text) || CAST(payload AS text) LIKE '%{run}%'"
ROWS = {
    "flow_run": "id = '{run}'",
    "task_run": "flow_run_id = '{run}'",
    "flow_run_state": "flow_run_id = '{run}'",
    "task_run_state": "task_run_id IN (SELECT id FROM task_run WHERE flow_run_id = '{run}')",
    "log": "flow_run_id = '{run}'",
    "artifact": "flow_run_id = '{run}'",
    "events": _ABOUT,
    "event_resources": f"event_id IN (SELECT id FROM events WHERE {_ABOUT})",
}
"""Conditions that select the rows of the save of a ``run``, by table."""
_UUID = re.compile(r"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)((?:\.\d+)?(?:\+00)?)")
AT_ONCE = 100
"""Saves whose rows are inserted with one statement a table."""


@dataclass(frozen=True)
class _Row:
    constant: tuple[Any, ...]
    times: tuple[tuple[int, datetime, str], ...]
    """Cells that are times: up to the second, and the rest."""
    texts: tuple[tuple[int, tuple[str, ...]], ...]
    """Cells with ids of the save in them, as pieces: text and id in turn."""

    def copied(self, ids: dict[str, str], shift: timedelta) -> tuple[Any, ...]:
        cells = list(self.constant)
        for at, time, rest in self.times:
            cells[at] = f"{time - shift}{rest}"
        for at, pieces in self.texts:
            cells[at] = "".join([ids.get(piece, piece) for piece in pieces])
        return tuple(cells)


class Saves:
    """The rows of the real saves in a database, to be copied; its server is stopped."""

    def __init__(self, database: Database) -> None:
        self._database = database
        found = database.read("SELECT id FROM flow_run WHERE state_type = 'COMPLETED'")
        self._saves = [_rows_of(database, run) for (run,) in found]

    @property
    def rows(self) -> dict[str, float]:
        """Mean number of rows a save, by table."""
        each = len(self._saves)
        return {name: sum(len(s[0][name]) for s in self._saves) / each for name in ROWS}

    def multiply(self, numbers: range, every_s: int) -> None:
        """Add a copy for each number, which is number times ``every_s`` seconds older."""
        with self._database.filling() as insert:
            for start in range(0, len(numbers), AT_ONCE):
                copies = [self._copy(n, n * every_s) for n in numbers[start : start + AT_ONCE]]
                for name in ROWS:
                    if rows := [row for copy in copies for row in copy[name]]:
                        insert(name, rows)

    def _copy(self, number: int, shift_s: int) -> dict[str, list[tuple[Any, ...]]]:
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


def _rows_of(database: Database, run: str) -> tuple[dict[str, list[_Row]], set[str], str]:
    """Return a save's rows, its ids, and its idempotency key, which has to be unique as well."""
    of = {name: f'"{name}" WHERE {where.format(run=run)}' for name, where in ROWS.items()}
    own = {each for rows in of.values() for (each,) in database.read(f"SELECT id FROM {rows}")}
    key = str(database.read(f"SELECT idempotency_key FROM {of['flow_run']}")[0][0])
    raw = {name: database.read(f"SELECT * FROM {rows}") for name, rows in of.items()}
    return {name: [_taken_apart(r, own, key) for r in rows] for name, rows in raw.items()}, own, key


def _taken_apart(row: tuple[Any, ...], own: set[str], key: str) -> _Row:
    texts = [(at, cell) for at, cell in enumerate(row) if isinstance(cell, str)]
    matches = ((at, _TIME.fullmatch(c)) for at, c in texts)
    times = tuple((at, datetime.fromisoformat(m[1]), m[2]) for at, m in matches if m)
    pieces = ((at, (c,) if c == key else tuple(_UUID.split(c))) for at, c in texts)
    return _Row(row, times, tuple((at, p) for at, p in pieces if p == (key,) or own & {*p}))


def _later(old: str, shift: timedelta, random: Random) -> str:
    """Return an id of the same kind; the time in one that begins with it is shifted."""
    bits = random.getrandbits(128)
    was = uuid.UUID(old)
    if was.version == 7:
        since = (was.int >> 80) - int(shift.total_seconds() * 1000)
        bits = (since << 80) | (bits & ((1 << 80) - 1))
    kind = was.version or 4
    return str(uuid.UUID(int=bits & ~(0xF << 76) & ~(3 << 62) | kind << 76 | 2 << 62))
