"""The catalog's database: where it is, and that its schema is this version's.

SQLite in ``TRINITY_SYNC_HOME`` unless ``TRINITY_SYNC_CATALOG_URL`` names another, such as a
PostgreSQL for a cluster. The schema is made and brought up to date when the catalog is opened,
by one process at a time.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from trinity_sync.catalog.models import VALUES
from trinity_sync.errors import CatalogError
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.settings import Settings

SCHEMA = 1
"""Number of the newest migration."""
BUSY_S = 30
"""Seconds for which a writer waits for others."""
CONNECT_S = 5
_MIGRATING = 7_274_106  # any number that is only ours, for PostgreSQL's advisory locks


def get_catalog_url(settings: Settings) -> str:
    """URL of the catalog that the settings name."""
    return settings.catalog_url or f"sqlite:///{settings.home.absolute() / 'catalog.db'}"


@contextmanager
def open_catalog(url: str) -> Iterator[sa.Engine]:
    """The catalog, with the schema that this version reads; trouble with it is a `CatalogError`.

    Raises:
        CatalogError: the URL is wrong, the database is away or refuses, or its schema is newer.
    """
    try:
        engine = _engine(url)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        why = str(error).replace(url, _shown(url))
        raise CatalogError(
            f"the catalog {_shown(url)} cannot be opened: {why}. Set "
            "TRINITY_SYNC_CATALOG_URL to one like postgresql+psycopg://user@host/database or "
            "sqlite:////folder/a.db, or unset it."
        ) from error
    where = engine.url.render_as_string(hide_password=True)
    try:
        if _schema(engine) != SCHEMA:
            _migrate(engine, where)
        yield engine
    except (DBAPIError, UnicodeDecodeError) as error:  # the latter of a file that is damaged
        why = " ".join(str(getattr(error, "orig", error)).split())
        raise CatalogError(
            f"the catalog {where} does not answer or refuses: {why}. Saves go on without "
            "it; when it is back: trinity-sync catalog rebuild ROOT"
        ) from error
    finally:
        engine.dispose()


def _shown(url: str) -> str:
    """A URL, which may be no good one, without what may be a password."""
    return re.sub(r"//[^/]*@", "//***@", url)


def _engine(url: str) -> sa.Engine:
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return sa.create_engine(parsed, connect_args={"connect_timeout": CONNECT_S})
    if not parsed.database or parsed.database == ":memory:":
        raise ArgumentError("it names no file, and each process would have another catalog")
    Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    # transactions begin below, not by Python's sqlite3, which would begin them as readers
    engine = sa.create_engine(parsed, connect_args={"timeout": BUSY_S, "isolation_level": None})
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: sa.Connection) -> None:
    """A writer that began as a reader could not wait for others, so it says what it is."""
    reads = connection.get_execution_options().get("reads")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


@contextmanager
def read_consistently(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection for a consistent look, which holds no writer up."""
    with engine.execution_options(reads=True).connect() as connection:
        yield connection


def read_rows(connection: sa.Connection, wanted: sa.Select[Any]) -> Iterator[sa.Row[Any]]:
    """Yield rows whose values have the types of their columns; a corrupted file may hold others.

    Args:
        connection: to the catalog.
        wanted: a selection of columns.

    Raises:
        CatalogError: a value is of another type, or none where there has to be one.
    """
    columns = [
        (each, each.type.python_type, each.info.get(VALUES))
        for each in wanted.selected_columns.values()
    ]
    try:
        rows = connection.execute(wanted).all()
    except ValueError as error:  # no text, no JSON
        raise corrupted(connection, str(error)) from error
    for row in rows:
        for (column, kind, values), value in zip(columns, row, strict=True):
            if value is None and column.nullable:
                continue
            of_kind = isinstance(value, kind)
            if of_kind and values:
                of_kind = all(isinstance(each, values) for each in value.values())
            if not of_kind:
                raise corrupted(connection, f"{column} is {value!r} in a row")
        yield row


def corrupted(connection: sa.Connection, why: str) -> CatalogError:
    """Return the error of a database with values that were not written by this package.

    Args:
        connection: to the catalog.
        why: what is wrong.
    """
    where = connection.engine.url.render_as_string(hide_password=True)
    return CatalogError(
        f"the catalog {where} is corrupted: {why}. Saves continue without it; run: trinity-sync "
        "catalog rebuild ROOT. If that does not help, remove it, and then rebuild every root."
    )


def _schema(engine: sa.Engine) -> int | None:
    """Number of the database's schema; None for an empty database."""
    with read_consistently(engine) as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
    return int(found) if found and found.isdigit() else None


def _migrate(engine: sa.Engine, where: str) -> None:
    from alembic import command
    from alembic.config import Config

    with _alone(engine):
        schema = _schema(engine) or 0
        if schema > SCHEMA:
            raise CatalogError(
                f"the catalog {where} has schema {schema}, this trinity_sync knows {SCHEMA}. Use "
                "the newer version here, too, or another catalog (TRINITY_SYNC_CATALOG_URL)."
            )
        config = Config()
        config.set_main_option("script_location", "trinity_sync.catalog:migrations")
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


@contextmanager
def _alone(engine: sa.Engine) -> Iterator[None]:
    """No other process migrates meanwhile."""
    if engine.dialect.name == "sqlite":
        with acquire_file_lock(Path(f"{engine.url.database}.lock")):
            with closing(sqlite3.connect(str(engine.url.database))) as database:
                database.execute(
                    "PRAGMA journal_mode=WAL"
                )  # for good: readers and a writer at once
            yield
        return
    with engine.connect() as held:
        held.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATING)))
        yield  # the lock ends with the transaction
