"""Copies of a save's rows, in a database with the tables of a Prefect server."""

import json
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import sqlalchemy as sa

from benchmarks.databases import Database, PostgreSQL, SQLite
from benchmarks.multiplied import ROWS, Saves, multiply_steps
from tests.support.postgres import Postgres
from trinity_sync.layout import step_folder
from trinity_sync.storage.discovery import iter_committed_steps, require_committed
from trinity_sync.storage.manifest import FileRecord, Manifest, read_manifest, write_manifest

RUN, STATE, EVENT = "0198c1d0-0000-7000-8000-000000000001", str(uuid.uuid4()), str(uuid.uuid4())
ALL_SAVES = str(uuid.uuid4())
"""The id of a deployment, which copies share."""
AT = "2026-11-21 12:00:00.5"
Filled = tuple[Database, sa.Engine]
COLUMNS = {
    "flow_run": "id uuid, state_type text, idempotency_key text, state_id uuid, "
    "deployment_id uuid, start_time timestamptz",
    "flow_run_state": "id uuid, flow_run_id uuid, timestamp timestamptz",
    "task_run": "id uuid, flow_run_id uuid",
    "task_run_state": "id uuid, task_run_id uuid",
    "log": "id uuid, flow_run_id uuid, message text",
    "artifact": "id uuid, flow_run_id uuid",
    "events": "id uuid, resource jsonb, related jsonb, payload jsonb, occurred timestamptz",
    "event_resources": "id uuid, event_id uuid, resource_id text",
}


@pytest.fixture(params=["sqlite", "postgresql"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Filled]:
    """A database with the tables and one save in them, in which nothing enforces references."""
    with ExitStack() as ends:
        database: Database = SQLite(path := tmp_path / "prefect.db")
        url = f"sqlite:///{path}"
        if request.param == "postgresql":
            if not (tools := Postgres.tools()):
                pytest.skip("no PostgreSQL with pg_trgm; install postgresql and postgresql-contrib")
            server = ends.enter_context(Postgres.running(tools))
            database = PostgreSQL(server.url, "prefect")
            (url,) = database.environment.values()
        engine = sa.create_engine(url.replace("asyncpg", "psycopg"))
        ends.callback(engine.dispose)
        resource = json.dumps({"prefect.resource.id": f"prefect.flow-run.{RUN}"})
        rows = {
            "flow_run": (RUN, "COMPLETED", "job/run1/step7", STATE, ALL_SAVES, AT),
            "flow_run_state": (STATE, RUN, AT),
            "events": (EVENT, resource, "[]", "{}", AT),
            "event_resources": (str(uuid.uuid4()), EVENT, f"prefect.flow-run.{RUN}"),
        }
        with engine.begin() as connection:
            for name in ROWS:
                connection.exec_driver_sql(f"CREATE TABLE {name} ({COLUMNS[name]})")
            for name, row in rows.items():
                connection.exec_driver_sql(f"INSERT INTO {name} VALUES {row}")
        yield database, engine


def test_copies_are_whole_and_share_nothing_but_what_all_saves_share(filled: Filled) -> None:
    database, _ = filled
    Saves(database).multiply(range(1, 4), 3600)
    runs = database.read("SELECT * FROM flow_run ORDER BY start_time DESC")
    hours = [run[5].removesuffix("+00").removesuffix(":00:00.5") for run in runs]
    assert hours == [f"2026-11-21 {hour}" for hour in ("12", "11", "10", "09")]
    assert len({run[0] for run in runs}) == len({run[2] for run in runs}) == 4
    assert {run[4] for run in runs} == {ALL_SAVES}
    assert [run[0] for run in runs] == sorted((run[0] for run in runs), reverse=True)
    for run, *_, state, _, at in runs:
        assert database.read(
            f"SELECT timestamp FROM flow_run_state WHERE id = '{state}' AND flow_run_id = '{run}'"
        ) == [(at,)]
        assert database.read(
            "SELECT occurred FROM events JOIN event_resources ON event_id = events.id WHERE "
            f"resource_id = 'prefect.flow-run.{run}' AND CAST(resource AS text) LIKE '%{run}%'"
        ) == [(at,)]


def test_a_database_tells_its_rows_and_what_they_take(filled: Filled) -> None:
    database, engine = filled
    empty = database.in_use()
    Saves(database).multiply(range(1, 2001), 60)
    tables = ("flow_run", "flow_run_state", "events", "event_resources")
    assert database.tables() == dict.fromkeys(ROWS, 0) | dict.fromkeys(tables, 2001)
    assert database.count(f"events WHERE occurred < '{AT}'") == 2000
    full = database.in_use()
    assert empty + 2000 * 400 < full <= database.size
    with engine.begin() as connection:
        for name in tables:
            connection.exec_driver_sql(f"DELETE FROM {name} WHERE id != '{RUN}'")
    assert database.in_use() < empty + (full - empty) // 2


def test_copied_steps_are_committed(tmp_path: Path) -> None:
    content = b"a shard"
    folder = step_folder(tmp_path, 9) / "actor"
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(content)
    record = FileRecord("actor/model.pt", len(content), "digest", "actor", "model", 0, 1)
    write_manifest(tmp_path, Manifest("job", 1, 9, ("checkpoint",), (record,), (), 9000.0))
    multiply_steps(tmp_path, 9, range(1, 4), 100.0)
    assert [m.step for m in iter_committed_steps(tmp_path)] == [1, 2, 3, 9]
    assert require_committed(tmp_path, 2).find_file("actor/model.pt") == record
    oldest = read_manifest(tmp_path, 1)
    assert oldest
    assert oldest.committed_at == 8200.0
