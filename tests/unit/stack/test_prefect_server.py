"""What blocks a server on SQLite: its garbage, its vacuum, its transactions."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import environment
from tests.support.forked import Program

STORY = """
import sqlite3, sys, threading
from trinity_sync.stack.prefect_server import collect_garbage_in_thread

if sys.argv[2] == "in a thread":
    collect_garbage_in_thread()
first, second = (
    sqlite3.connect(sys.argv[1], timeout=4, isolation_level=None, check_same_thread=False)
    for _ in range(2)
)
cursor = second.execute("SELECT 1 UNION ALL SELECT 2")  # not at its end, and reads no table
cursor.fetchone()
first.execute("BEGIN IMMEDIATE")
waiting, found = threading.Event(), []

def wait_for_the_first():
    waiting.set()
    try:
        second.execute("BEGIN IMMEDIATE")
        found.append("went on")
    except sqlite3.OperationalError as error:
        found.append(error)

thread = threading.Thread(target=wait_for_the_first)
thread.start()
waiting.wait()
threading.Event().wait(0.5)  # it is in the call
garbage = [cursor]
garbage.append(garbage)
del cursor, garbage
kept = [[] for _ in range(10**6)]  # the collector looks at these many times
first.execute("COMMIT")
thread.join()
print(found[0])
"""


def story(tmp_path: Path, collected: str) -> str:
    command = [sys.executable, "-c", STORY, str(tmp_path / "db"), collected]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_transaction_ends_although_others_wait_and_garbage_is_collected(tmp_path: Path) -> None:
    assert story(tmp_path, "in a thread") == "went on"


@pytest.mark.upstream
def test_pythons_own_collector_locks_the_database(tmp_path: Path) -> None:
    """If this fails, `trinity_sync.stack.prefect_server` is no longer needed."""
    assert story(tmp_path, "as it comes") == "database is locked"


VACUUM = """
import asyncio, sqlite3, sys
from datetime import datetime, timedelta, timezone
from uuid import uuid4
from prefect.server.database import provide_database_interface
from prefect.server.services import db_vacuum
from trinity_sync.stack.prefect_server import pause_vacuum_between_batches

pause_vacuum_between_batches()
old, found, sleep = datetime.now(timezone.utc) - timedelta(days=2), [], asyncio.sleep

async def looked_at(seconds):
    if seconds > 0.1:  # as long as SQLite waits between two tries
        with sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            found.append(*other.execute("SELECT count(*) FROM event_resources").fetchone())
            other.execute("ROLLBACK")
    await sleep(0)

async def story():
    db = provide_database_interface()
    engine = await db.engine()
    async with engine.begin() as connection:
        await connection.run_sync(db.EventResource.__table__.create)
        row = {"occurred": old, "resource_id": "x", "resource_role": "x", "resource": {}}
        rows = [{**row, "event_id": uuid4()} for _ in range(15)]
        await connection.execute(db.EventResource.__table__.insert(), rows)
    asyncio.sleep = looked_at
    too_old = db.EventResource.occurred < old + timedelta(days=1)
    await db_vacuum._batch_delete(db, db.EventResource, too_old, 5)
    await engine.dispose()

asyncio.run(story())
print(*found)
"""


READ_SETTINGS = """
from prefect.context import refresh_global_settings_context
refresh_global_settings_context()
"""


def told(story: str, tmp_path: Path, argument: str) -> str:
    """What a story on a database of Prefect's ends with, in a fork of a process with the server."""
    env = {
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path / 'prefect.db'}",
    }
    with environment(env):
        server = ["prefect.server.database", "prefect.server.services.db_vacuum"]
        return Program(READ_SETTINGS + story, argument, preloaded=server).end().strip()


def test_between_two_batches_of_the_vacuum_others_may_write(tmp_path: Path) -> None:
    assert told(VACUUM, tmp_path, str(tmp_path / "prefect.db")) == "10 5 0 0"


WRITERS = """
import asyncio, sys
from datetime import datetime, timezone
from uuid import uuid4
from prefect.server.database import provide_database_interface
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from sqlalchemy.sql.functions import count
from trinity_sync.orchestration.prefect_compat import begin_transactions_as_writers

if sys.argv[1] == "in turn":
    begin_transactions_as_writers()

async def story():
    db = provide_database_interface()
    engine = await db.engine()
    async with engine.begin() as connection:
        await connection.run_sync(db.EventResource.__table__.create)
    has_read, other_is_done = asyncio.Event(), asyncio.Event()
    how_many = select(count()).select_from(db.EventResource)

    def row():
        now = datetime.now(timezone.utc)
        return db.EventResource(
            occurred=now, resource_id="x", resource_role="x", resource={}, event_id=uuid4())

    async def slow():
        async with db.session_context(begin_transaction=True) as session:
            await session.scalar(how_many)
            has_read.set()
            await asyncio.wait([asyncio.create_task(other_is_done.wait())], timeout=1)
            session.add(row())

    async def quick():
        await has_read.wait()
        async with db.session_context(begin_transaction=True) as session:
            session.add(row())
        other_is_done.set()

    try:
        await asyncio.gather(slow(), quick())
        async with db.session_context() as session:
            print("rows", await session.scalar(how_many))
    except OperationalError as error:
        print(error.orig)
    await engine.dispose()

asyncio.run(story())
"""


def test_a_transaction_that_reads_and_then_writes_is_not_refused_because_another_was_quicker(
    tmp_path: Path,
) -> None:
    assert told(WRITERS, tmp_path, "in turn") == "rows 2"


NESTED = """
import asyncio
from prefect.server.database import provide_database_interface
from sqlalchemy import text
from trinity_sync.orchestration.prefect_compat import begin_transactions_as_writers

begin_transactions_as_writers()

async def story():
    db = provide_database_interface()
    async with asyncio.timeout(30), db.session_context(begin_transaction=True) as session:
        await session.execute(text("CREATE TABLE t (a)"))
        async with db.session_context() as other:
            print(await other.scalar(text("SELECT count(*) FROM sqlite_master WHERE name = 't'")))
    async with db.session_context(begin_transaction=True) as session:
        await session.execute(text("INSERT INTO t VALUES (1)"))
    async with db.session_context() as other:
        print(await other.scalar(text("SELECT count(*) FROM t")))
    await (await db.engine()).dispose()

asyncio.run(story())
"""


def test_a_session_within_a_transaction_does_not_wait_for_its_end(tmp_path: Path) -> None:
    """It reads what was there before, as with Prefect's own transactions."""
    assert told(NESTED, tmp_path, "").split() == ["0", "1"]


@pytest.mark.upstream
def test_prefects_own_transactions_refuse_the_slower_writer(tmp_path: Path) -> None:
    """If this fails, `begin_transactions_as_writers` is no longer needed."""
    assert told(WRITERS, tmp_path, "as they come") == "database is locked"
