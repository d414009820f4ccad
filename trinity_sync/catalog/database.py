"""The catalog's database: its tables, how it is opened, and queries of all jobs.

The database is SQLite in ``TRINITY_SYNC_HOME``, or the one that ``catalog.url`` names, such
as PostgreSQL for a cluster. Opening it creates missing tables, one process at a time.

All rows can be rebuilt from the files. So tables are not migrated: their names have the number of
the schema, and those of another one are other tables.
"""

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from trinity_sync.errors import CatalogError
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.fs.records import describe
from trinity_sync.settings import Settings, StackSettings

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
        why = str(error).replace(url, _hide_password(url))
        raise CatalogError(
            f"the catalog {_hide_password(url)} cannot be opened: {why}. Set "
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
            "it; when it is back, run: trinity-sync jobs reindex ROOT"
        ) from error


def _hide_password(url: str) -> str:
    """Return a URL, which may be invalid, without a password."""
    return re.sub(r"//[^/]*@", "//***@", url)


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
                "trinity-sync jobs reindex ROOT. If that does not help, remove it, and then "
                "rebuild every root."
            ) from error
