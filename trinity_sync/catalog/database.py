"""Open the catalog's database, and migrate its schema.

The database is SQLite in ``TRINITY_SYNC_HOME``, or the one that ``catalog.url`` names, such
as PostgreSQL for a cluster. Opening it creates or migrates the schema, one process at a time.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from trinity_sync.catalog.models import VALUES
from trinity_sync.errors import CatalogError
from trinity_sync.fs.locks import acquire_file_lock
from trinity_sync.settings import Settings, StackSettings

SCHEMA = 1
"""Number of the newest migration."""
BUSY_S = 30
"""Seconds that a writer waits for other writers."""
CONNECT_S = 5
_MIGRATION_LOCK = 7_274_106  # key of PostgreSQL's advisory lock, any unique number


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
        CatalogError: The URL is invalid, the database is away or fails, or its schema is newer.
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
        if _read_schema(engine) != SCHEMA:
            _migrate(engine, where)
        yield engine
    except (DBAPIError, UnicodeDecodeError) as error:  # the latter for a corrupted file
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


def read_rows(connection: sa.Connection, wanted: sa.Select[Any]) -> Iterator[sa.Row[Any]]:
    """Yield rows, and check that their values have the types of their columns.

    Raises:
        CatalogError: A value has another type, or is missing, as in a corrupted file.
    """
    columns = [
        (each, each.type.python_type, each.info.get(VALUES))
        for each in wanted.selected_columns.values()
    ]
    try:
        rows = connection.execute(wanted).all()
    except ValueError as error:  # not text, or not JSON
        raise make_corruption_error(connection, str(error)) from error
    for row in rows:
        for (column, kind, values), value in zip(columns, row, strict=True):
            if value is None and column.nullable:
                continue
            of_kind = isinstance(value, kind)
            if of_kind and values:
                of_kind = all(isinstance(each, values) for each in value.values())
            if not of_kind:
                raise make_corruption_error(connection, f"{column} is {value!r} in a row")
        yield row


def make_corruption_error(connection: sa.Connection, why: str) -> CatalogError:
    """Return the error for a database with values that this package has not written."""
    where = connection.engine.url.render_as_string(hide_password=True)
    return CatalogError(
        f"the catalog {where} is corrupted: {why}. Saves continue without it; run: trinity-sync "
        "jobs reindex ROOT. If that does not help, remove it, and then rebuild every root."
    )


def _read_schema(engine: sa.Engine) -> int | None:
    """Return the number of the database's schema; None for an empty database."""
    with read_consistently(engine) as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
    return int(found) if found and found.isdigit() else None


def _migrate(engine: sa.Engine, where: str) -> None:
    from alembic import command
    from alembic.config import Config

    with _migration_lock(engine):
        schema = _read_schema(engine) or 0
        if schema > SCHEMA:
            raise CatalogError(
                f"the catalog {where} has schema {schema}, this trinity_sync knows {SCHEMA}. Use "
                "the newer version here as well, or another catalog (catalog.url)."
            )
        config = Config()
        config.set_main_option("script_location", "trinity_sync.catalog:migrations")
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


@contextmanager
def _migration_lock(engine: sa.Engine) -> Iterator[None]:
    if engine.dialect.name == "sqlite":
        with acquire_file_lock(Path(f"{engine.url.database}.lock")):
            with closing(sqlite3.connect(str(engine.url.database))) as database:
                database.execute(
                    "PRAGMA journal_mode=WAL"
                )  # permanent: concurrent readers and a writer
            yield
        return
    with engine.connect() as held:
        held.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
        yield  # the lock ends with the transaction
