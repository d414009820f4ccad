"""The database of a Prefect server, as a benchmark reads and fills it: SQLite or PostgreSQL.

Queries are of the SQL that both know.
"""

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

Insert = Callable[[str, Sequence[tuple[Any, ...]]], None]
"""Adds rows, at least one and with all columns, to the table of this name."""


class Database(ABC):
    """A database that a benchmark reads and fills."""

    environment: dict[str, str]
    """Variables with which a server uses the database."""
    _NAMES: str

    @abstractmethod
    def read(self, query: str) -> list[tuple[Any, ...]]:
        """Return rows with cells that `filling` takes; ids and times are text."""

    @abstractmethod
    def filling(self) -> AbstractContextManager[Insert]:
        """Fill tables, in any order, in one transaction; the server is stopped."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes on disk."""

    @abstractmethod
    def in_use(self) -> int:
        """Return the bytes on disk that new rows cannot use."""

    def count(self, rows: str) -> int:
        """Return the number of rows of a FROM clause."""
        return int(self.read(f"SELECT count(*) FROM {rows}")[0][0])

    def tables(self) -> dict[str, int]:
        """Return the number of rows of each table."""
        return {name: self.count(f'"{name}"') for (name,) in self.read(self._NAMES)}


class SQLite(Database):
    """The file of a server, which may run."""

    _NAMES = "SELECT name FROM sqlite_master WHERE type = 'table'"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.environment = {}

    def read(self, query: str) -> list[tuple[Any, ...]]:  # noqa: D102
        connection = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=60)
        rows = connection.execute(query).fetchall()
        connection.close()
        return rows

    @contextmanager
    def filling(self) -> Iterator[Insert]:  # noqa: D102
        connection = sqlite3.connect(self._path, isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-1000000"):
            connection.execute(f"PRAGMA {pragma}").fetchall()

        def insert(table: str, rows: Sequence[tuple[Any, ...]]) -> None:
            marks = ",".join("?" * len(rows[0]))
            connection.executemany(f'INSERT INTO "{table}" VALUES ({marks})', rows)

        connection.execute("BEGIN")
        yield insert
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.close()

    @property
    def size(self) -> int:  # noqa: D102
        return self._path.stat().st_size

    def in_use(self) -> int:
        """Return the bytes of all pages but the free ones."""
        size, pages, free = (
            self.read(f"PRAGMA {name}")[0][0]
            for name in ("page_size", "page_count", "freelist_count")
        )
        return int(size * (pages - free))


class PostgreSQL(Database):
    """A new database in a running PostgreSQL server, without the server's log (WAL).

    ``url`` is that of another database there, with the name and password of a superuser.
    """

    _NAMES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._execute(f'CREATE DATABASE "{name}"')
        self._url = url.rpartition("/")[0] + f"/{name}"
        self._execute("CREATE EXTENSION pg_freespacemap")
        driven = self._url.replace("postgresql:", "postgresql+asyncpg:")
        self.environment = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": driven}

    def read(self, query: str) -> list[tuple[Any, ...]]:
        """Return rows with all cells as text."""
        copied = f"COPY ({query}) TO STDOUT"
        with self._connected() as connection, connection.cursor().copy(copied) as copy:
            return list(copy.rows())

    @contextmanager
    def filling(self) -> Iterator[Insert]:  # noqa: D102
        with self._connected() as connection, connection.cursor() as cursor:
            # runs and states name each other: no order of tables pleases all foreign keys
            cursor.execute("SET session_replication_role = replica")

            def insert(table: str, rows: Sequence[tuple[Any, ...]]) -> None:
                with cursor.copy(f'COPY "{table}" FROM STDIN') as copy:
                    for row in rows:
                        copy.write_row(row)

            with connection.transaction():
                yield insert
        self._execute("VACUUM (ANALYZE)", "CHECKPOINT")

    @property
    def size(self) -> int:  # noqa: D102
        return int(self.read("SELECT pg_database_size(current_database())")[0][0])

    def in_use(self) -> int:
        """Return the bytes that a vacuum, run now rather than minutes later, does not find free."""
        self._execute("VACUUM (ANALYZE)")
        free = self.read(
            "SELECT sum(avail) FROM pg_class, LATERAL pg_freespace(oid) "
            "WHERE relkind IN ('r', 't', 'i')"
        )
        return self.size - int(free[0][0])

    def _connected(self) -> Any:
        import psycopg

        return psycopg.connect(self._url, autocommit=True, options="-c timezone=UTC")

    def _execute(self, *statements: str) -> None:
        with self._connected() as connection:
            for each in statements:
                connection.execute(each)
