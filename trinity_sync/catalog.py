"""The catalog: an SQL index of jobs and steps, which can be rebuilt from the files of the jobs.

The database is SQLite in ``TRINITY_SYNC_HOME``, or the one that ``catalog.url`` names, such
as PostgreSQL for a cluster. Opening it creates missing tables, one process at a time. Tables are
not migrated: their names have the number of the schema, and those of another one are other tables.

A writer reads the files before its transaction, because a root that hangs must not keep the lock of
SQLite from other jobs. It reads them again, in the transaction, if another has written the job's
rows meanwhile. So the last of several writers has read the newest files.
"""

import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from json import JSONDecodeError
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from trinity_sync.errors import CatalogError, FormatError, ManifestError
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.fs.records import describe
from trinity_sync.layout import steps_on_disk
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.settings.values import show_value
from trinity_sync.snapshot.identity import job_id
from trinity_sync.storage.discovery import read_manifest_state
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.metrics import read_metrics

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Number of the schema, in the names of the tables; it is raised with each change of them."""
BUSY_S = 30
"""Seconds that a writer waits for other writers."""
CONNECT_S = 5
_CREATION_LOCK = 7_274_106  # key of PostgreSQL's advisory lock, any unique number


def get_catalog_url(settings: Settings, stack: StackSettings | None = None) -> str:
    """Return the URL of the catalog that the settings name.

    Without ``stack``, the settings of the environment and the file count.
    """
    return (
        stack or StackSettings()
    ).catalog.url or f"sqlite:///{settings.home.absolute() / 'catalog.db'}"


@contextmanager
def open_catalog(url: str) -> Iterator[sa.Engine]:
    """Open the catalog, and turn database errors within the block into a `CatalogError`.

    Raises:
        CatalogError: The URL is invalid, or the database is away or fails.
    """
    try:
        engine = _create_engine(url)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        why = str(error).replace(url, show_value(url))
        raise CatalogError(
            f"the catalog {show_value(url)} cannot be opened: {why}. Set "
            "catalog.url to one like postgresql+psycopg://user@host/database or "
            "sqlite:////folder/a.db, or unset it."
        ) from error
    where = engine.url.render_as_string(hide_password=True)
    if engine.dialect.name == "sqlite" and engine.url.database:
        Path(engine.url.database).parent.mkdir(parents=True, exist_ok=True)
    try:
        _create_tables(engine)
        yield engine
    except (DBAPIError, UnicodeDecodeError, JSONDecodeError) as error:  # corrupted text or JSON
        why = " ".join(str(getattr(error, "orig", error)).split())
        raise CatalogError(
            f"the catalog {where} does not answer or fails: {why}. Saves continue without "
            "it; when it is back, run: trinity-sync reconcile ROOT"
        ) from error


@lru_cache(maxsize=4)
def _create_engine(url: str) -> sa.Engine:
    """Return the engine of a URL, which keeps the statements it has compiled, but no connection."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        arguments: dict[str, Any] = {"connect_timeout": CONNECT_S}
        return sa.create_engine(parsed, poolclass=sa.NullPool, connect_args=arguments)
    if not parsed.database or parsed.database == ":memory:":
        raise ArgumentError("it names no file, so each process would have its own catalog")
    # Python's sqlite3 would begin transactions as readers, so `_begin_sqlite` begins them
    arguments = {"timeout": BUSY_S, "isolation_level": None}
    engine = sa.create_engine(parsed, poolclass=sa.NullPool, connect_args=arguments)
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: sa.Connection) -> None:
    """Begin a transaction as reader or writer: one that becomes a writer later cannot wait."""
    reads = connection.get_execution_options().get("reads")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


@contextmanager
def read_consistently(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open a connection with a consistent view that blocks no writer."""
    with engine.execution_options(reads=True).connect() as connection:
        yield connection


def _create_tables(engine: sa.Engine) -> None:
    with read_consistently(engine) as connection:
        if sa.inspect(connection).has_table(Step.__tablename__):
            return
    with ExitStack() as held:
        if engine.dialect.name == "sqlite":
            held.enter_context(acquire_file_lock(Path(f"{engine.url.database}.lock")))
            with closing(sqlite3.connect(str(engine.url.database))) as database:
                # permanent: concurrent readers and a writer
                database.execute("PRAGMA journal_mode=WAL")
        connection = held.enter_context(engine.begin())
        if engine.dialect.name == "postgresql":  # until the end of the transaction
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATION_LOCK)))
        Base.metadata.create_all(connection)


class Base(DeclarativeBase):
    """Base class of all tables."""


class Job(Base):
    """A job, identified by its root."""

    __tablename__ = f"jobs_{SCHEMA}"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    """See `layout.job_id`."""
    root: Mapped[str] = mapped_column(Text)
    mirrored_at: Mapped[float] = mapped_column(Double)
    """When its files were last read, in seconds since the epoch."""


class Step(Base):
    """A committed step."""

    __tablename__ = f"steps_{SCHEMA}"

    job: Mapped[str] = mapped_column(ForeignKey(Job.id, ondelete="CASCADE"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    run: Mapped[int] = mapped_column(BigInteger)
    kinds: Mapped[str] = mapped_column(Text)
    """Comma-separated."""
    nbytes: Mapped[int] = mapped_column(BigInteger)
    committed_at: Mapped[float] = mapped_column(Double)
    corruption: Mapped[str] = mapped_column(Text)
    """Why the step is corrupted; empty for a valid step."""
    metrics: Mapped[dict[str, float]] = mapped_column(JSON)
    """Metrics of the step, by name."""


@dataclass(frozen=True)
class ListedStep:
    """A committed step, as a list of jobs needs it."""

    run: int
    step: int
    nbytes: int


@dataclass(frozen=True)
class JobSteps:
    """A job and its committed steps, oldest first."""

    job: str
    root: str
    mirrored_at: float
    steps: tuple[ListedStep, ...]


def list_jobs(engine: sa.Engine) -> list[JobSteps]:
    """Read all jobs with their steps, sorted by root, by two statements in all."""
    steps: dict[str, list[ListedStep]] = defaultdict(list)
    columns = sa.select(Step.job, Step.run, Step.step, Step.nbytes).order_by(Step.run, Step.step)
    with read_consistently(engine) as connection:
        try:
            for job, *values in connection.execute(columns):
                steps[job].append(ListedStep(*values))
            found = [
                JobSteps(job.id, job.root, job.mirrored_at, tuple(steps[job.id]))
                for job in connection.execute(sa.select(Job.__table__).order_by(Job.root))
            ]
            return msgspec.convert([asdict(each) for each in found], describe(list[JobSteps]))
        except (ValueError, TypeError, AttributeError) as error:  # values that we have not written
            where = engine.url.render_as_string(hide_password=True)
            raise CatalogError(
                f"the catalog {where} is corrupted: {error}. Saves continue without it; run: "
                "trinity-sync reconcile ROOT. If that does not help, remove it, and then "
                "reconcile every root."
            ) from error


def mirror(engine: sa.Engine, root: str | Path, steps: Iterable[int]) -> None:
    """Update the rows of some steps, which were committed, measured or removed, from the files."""
    chosen = list(steps)
    _replace_rows(engine, root, lambda: chosen, Step.step.in_(chosen))


def try_mirror(
    settings: Settings, root: str | Path, steps: Iterable[int], stack: StackSettings | None = None
) -> None:
    """Update the catalog of the settings with `mirror`; a failure is only logged.

    The next reconcile adds what is missing.
    """
    try:
        with open_catalog(get_catalog_url(settings, stack)) as engine:
            mirror(engine, root, steps)
    except Exception as error:  # the catalog is best effort, the files count
        logger.warning(
            "cannot update the catalog for %s, which the next reconcile does: %s", root, error
        )


def rebuild(engine: sa.Engine, root: str | Path) -> int:
    """Write all rows of a job again from its files, and return the number of committed steps."""
    return _replace_rows(engine, root, lambda: steps_on_disk(root), sa.true())


def remove_job(engine: sa.Engine, root: str | Path) -> bool:
    """Remove all rows of a job, and of earlier jobs at its root; return whether there were any."""
    with engine.begin() as connection:
        at_root = Job.root == str(Path(root).resolve())
        return bool(connection.execute(sa.delete(Job).where(at_root)).rowcount)


def is_current(engine: sa.Engine, root: str | Path) -> bool:
    """Return whether the catalog says of a job's steps what their files say.

    Raises:
        ValueError: A column is not JSON.
    """
    job = job_id(root)
    with read_consistently(engine) as connection:
        wanted = sa.select(Step.__table__).where(Step.job == job).order_by(Step.step)
        steps = [row._asdict() for row in connection.execute(wanted)]
    return steps == _make_step_rows(job, root, sorted(steps_on_disk(root)))


def _replace_rows(
    engine: sa.Engine,
    root: str | Path,
    steps: Callable[[], Iterable[int]],
    replaced: sa.ColumnElement[bool],
) -> int:
    """Replace the ``replaced`` rows of steps, and the job's row; return the number of new ones.

    ``steps`` returns the steps to read, and is called again if another writer was faster.
    """
    job, real = job_id(root), str(Path(root).resolve())
    with read_consistently(engine) as connection:
        before = _read_version(connection, job)
    rows, now = _make_step_rows(job, root, steps()), time.time()
    with engine.begin() as connection:
        _lock_job(connection, job, real)
        if _read_version(connection, job) != before:
            rows, now = _make_step_rows(job, root, steps()), time.time()
        connection.execute(sa.delete(Step).where(Step.job == job, replaced))
        if rows:
            connection.execute(sa.insert(Step), rows)
        connection.execute(sa.update(Job).where(Job.id == job).values(mirrored_at=now))
    return len(rows)


_NEVER = 0.0
"""``mirrored_at`` of a row that is being created."""


def _lock_job(connection: sa.Connection, job: str, root: str) -> None:
    """Create or update the job's row, which locks it until the end of the transaction."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    row = insert(Job).values(id=job, root=root, mirrored_at=_NEVER)
    connection.execute(row.on_conflict_do_update(index_elements=["id"], set_={"root": root}))


def _read_version(connection: sa.Connection, job: str) -> float:
    """Return when the job's rows were written last."""
    found = connection.execute(sa.select(Job.mirrored_at).where(Job.id == job)).scalar()
    return _NEVER if found is None else float(found)


def _make_step_rows(job: str, root: str | Path, steps: Iterable[int]) -> list[dict[str, Any]]:
    """Make the rows of steps from their files; those that are not committed have none."""
    rows = []
    for step in steps:
        try:
            manifest = read_manifest(root, step)
        except (ManifestError, FormatError):
            continue
        if manifest is None:
            continue
        metrics = read_metrics(root, manifest.run, step)
        rows.append(
            {
                "job": job,
                "step": step,
                "run": manifest.run,
                "kinds": ",".join(manifest.kinds),
                "nbytes": manifest.nbytes,
                "committed_at": manifest.committed_at,
                "corruption": read_manifest_state(root, manifest, runs=()).reason,
                # JSON has no NaN
                "metrics": {name: value for name, value in metrics.items() if isfinite(value)},
            }
        )
    return rows
