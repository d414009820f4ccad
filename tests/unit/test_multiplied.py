"""Copies of a save's rows, in a database with the tables of a Prefect server."""

import json
import sqlite3
import uuid
from pathlib import Path

import pytest

from benchmarks.multiplied import ROWS, Saves, multiply_steps
from trinity_sync.layout import step_folder
from trinity_sync.storage.manifest import FileRecord, Manifest, read_manifest, write_manifest
from trinity_sync.storage.steps import committed_steps, require_committed

RUN, STATE, EVENT = "0198c1d0-0000-7000-8000-000000000001", str(uuid.uuid4()), str(uuid.uuid4())
ALL_SAVES = str(uuid.uuid4())
"""The id of a deployment, which copies share."""
AT = "2026-11-21 12:00:00.500000"
COLUMNS = {
    "flow_run": "id, state_type, idempotency_key, state_id, deployment_id, start_time",
    "flow_run_state": "id, flow_run_id, timestamp",
    "task_run": "id, flow_run_id",
    "task_run_state": "id, task_run_id",
    "log": "id, flow_run_id, message",
    "artifact": "id, flow_run_id",
    "events": "id, resource, related, payload, occurred",
    "event_resources": "id, event_id, resource_id",
}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "prefect.db"
    with sqlite3.connect(path) as connection:
        for name in ROWS:
            connection.execute(f"CREATE TABLE {name} ({COLUMNS[name]})")
        run = (RUN, "COMPLETED", "job/run1/step7", STATE, ALL_SAVES, AT)
        connection.execute("INSERT INTO flow_run VALUES (?, ?, ?, ?, ?, ?)", run)
        connection.execute("INSERT INTO flow_run_state VALUES (?, ?, ?)", (STATE, RUN, AT))
        resource = json.dumps({"prefect.resource.id": f"prefect.flow-run.{RUN}"})
        event = (EVENT, resource, "[]", "{}", AT)
        connection.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", event)
        named = (str(uuid.uuid4()), EVENT, f"prefect.flow-run.{RUN}")
        connection.execute("INSERT INTO event_resources VALUES (?, ?, ?)", named)
    connection.close()
    return path


def test_copies_are_whole_and_share_nothing_but_what_all_saves_share(database: Path) -> None:
    Saves(database).multiply(range(1, 4), 3600.0)
    with sqlite3.connect(database) as connection:
        runs = connection.execute("SELECT * FROM flow_run ORDER BY start_time DESC").fetchall()
        hours = [run[5].removesuffix(":00:00.500000") for run in runs]
        assert hours == [f"2026-11-21 {hour}" for hour in ("12", "11", "10", "09")]
        assert len({run[0] for run in runs}) == len({run[2] for run in runs}) == 4
        assert {run[4] for run in runs} == {ALL_SAVES}
        assert [run[0] for run in runs] == sorted((run[0] for run in runs), reverse=True)
        for run, *_, state, _, at in runs:
            assert connection.execute(
                "SELECT timestamp FROM flow_run_state WHERE id = ? AND flow_run_id = ?",
                (state, run),
            ).fetchall() == [(at,)]
            assert connection.execute(
                "SELECT instr(resource, ?) > 0, occurred FROM events JOIN event_resources "
                "ON event_id = events.id WHERE resource_id = ?",
                (run, f"prefect.flow-run.{run}"),
            ).fetchall() == [(1, at)]
    connection.close()


def test_copied_steps_are_committed_ones(tmp_path: Path) -> None:
    content = b"a shard"
    folder = step_folder(tmp_path, 9) / "actor"
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(content)
    record = FileRecord("actor/model.pt", len(content), "digest", "actor", "model", 0, 1)
    write_manifest(tmp_path, Manifest("job", 1, 9, ("checkpoint",), (record,), (), 9000.0))
    multiply_steps(tmp_path, 9, range(1, 4), 100.0)
    assert [m.step for m in committed_steps(tmp_path)] == [1, 2, 3, 9]
    assert require_committed(tmp_path, 2).file("actor/model.pt") == record
    oldest = read_manifest(tmp_path, 1)
    assert oldest
    assert oldest.committed_at == 8200.0
