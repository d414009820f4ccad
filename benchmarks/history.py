"""What a long history costs: the same questions of 10 saves and of 10,000, beside each other.

::

    python -m benchmarks.history [SAVES] [--postgres]

Two Prefect servers on SQLite, or each on a database of a PostgreSQL server of the benchmark's own,
with the defaults of that; one has a job of ten real saves, one of three (server, trigger, flow,
tasks, files and catalog are real; tasks run in threads, without Ray; the catalog is SQLite). The
three's rows and steps are then multiplied to SAVES (see ``benchmarks.multiplied``), one save every
five minutes into the past, all their events included. Both are asked in turn what our own code
asks, what the pages of the UI ask, and for a save from its trigger to its commit; medians count. At
last the retention that the embedded server ships with removes what is too old, while saves go on,
and a quarter as many saves again show whether the database grows beyond what it was.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.databases import Database, PostgreSQL, SQLite
from benchmarks.multiplied import ROWS, Saves, multiply_steps

REAL, MODELS, EVERY_S, TURNS = 10, 3, 300, 3
SAVE = "a save, from its trigger to the end of its run"
ASKED_AGAIN = "trigger: a run that was asked for already"
PASSING = "automation_bucket"
"""Rows of the automation that looks out for silent runs, which it removes minutes later."""
FAR = 10.0**6
"""Hours: longer than any history here."""
SPAWN = multiprocessing.get_context("spawn")


@dataclass
class Side:
    """A server with a history, and the process that asks it."""

    folder: Path
    database: Database
    first_step: int
    keep_h: tuple[float, float] = (FAR, FAR)
    """Hours for which events and runs are kept."""
    steps: int = 0
    state: Any = None
    pipe: Any = None
    asking: Any = None

    @property
    def root(self) -> Path:
        """The job's root."""
        return self.folder / "job"

    @property
    def settings(self) -> Any:
        """Settings of the job."""
        from trinity_sync.settings import Settings

        return Settings(home=self.folder / "home", spool=self.folder / "spool")

    @property
    def stack_settings(self) -> Any:
        """Settings of the server."""
        from trinity_sync.settings import MaintenanceSettings, ServerSettings, StackSettings

        events, runs = (timedelta(hours=hours) for hours in self.keep_h)
        return StackSettings(
            server=ServerSettings(port=0, password="none", keep_events=events, keep_runs=runs),
            maintenance=MaintenanceSettings(schedules=False),
        )

    def start(self) -> float:
        """Start the server; return the seconds until it answers."""
        from trinity_sync.orchestration.deploy import deploy
        from trinity_sync.stack import daemon, services

        settings, began = self.settings, time.perf_counter()
        settings.home.mkdir(parents=True, exist_ok=True)
        settings.spool.mkdir(mode=0o700, exist_ok=True)
        os.environ |= self.database.environment
        state = self.state = services.start_server(
            settings, self.stack_settings, services.StackState()
        )
        assert state.server
        daemon.await_ready(
            "the Prefect server",
            state.server,
            lambda: services.is_server_ready(state),
            time.monotonic() + 300,
        )
        took = time.perf_counter() - began
        deploy(self.stack_settings, state.api_url)
        self.pipe, theirs = SPAWN.Pipe()
        variables = {
            "PREFECT_API_URL": state.api_url,
            "TRINITY_SYNC_HOME": str(settings.home),
            "TRINITY_SYNC_SPOOL": str(settings.spool),
        }
        first = self.first_step + self.steps
        self.asking = SPAWN.Process(target=_asking, args=(theirs, variables, self.root, first))
        self.asking.start()
        return took

    def ask(self, name: str) -> float:
        """Put a question; return the seconds that the answer took."""
        self.pipe.send(name)
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise SystemExit(f"{name}: {answer}")
        self.steps += name == SAVE
        return float(answer)

    def stop(self, *, settled: bool = False) -> None:
        """End both processes, ``settled`` only after the server has stored its events."""
        from trinity_sync.stack import daemon

        if self.state:
            state, self.state = self.state, None
            try:
                if settled:
                    _settled(self.database)
                if self.asking:
                    self.pipe.send(None)
                    self.asking.join()
            except OSError:
                pass  # it has ended
            finally:
                daemon.stop(state.server, 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("saves", nargs="?", type=int, default=10_000)
    parser.add_argument("--postgres", action="store_true", help="instead of SQLite")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are to end with this
    os.environ |= {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",
        "DO_NOT_TRACK": "1",
    }
    with _sides(asked.saves, asked.postgres) as (short, long):
        found, real = _compare(short, long, asked.saves)
        short.stop()
        found += _retain(long, real, asked.saves)
    print("\n".join(found) or "our own questions stay quick, and the database stays bounded")
    sys.exit(bool(found))


@contextmanager
def _sides(saves: int, postgres: bool) -> Iterator[tuple[Side, Side]]:
    """Yield the server with the short and that with the long history; they end with the block."""
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="bench-history-")))
        names = ("short", "long")
        databases: list[Database] = [
            SQLite(folder / name / "home/prefect/prefect.db") for name in names
        ]
        if postgres:
            from tests.support.postgres import Postgres

            if not (tools := Postgres.tools()):
                sys.exit("no PostgreSQL with pg_trgm; install postgresql and postgresql-contrib")
            url = ends.enter_context(Postgres.running(tools)).url
            databases = [PostgreSQL(url, name) for name in names]
        short, long = (
            Side(folder / name, database, saves + 1)
            for name, database in zip(names, databases, strict=True)
        )
        ends.callback(short.stop)
        ends.callback(long.stop)
        yield short, long


def _compare(short: Side, long: Side, saves: int) -> tuple[list[str], Saves]:
    """Put the same questions to both; return which of ours grow, and the long one's real saves."""
    began: dict[str, int] = {}
    for side in (short, long):
        side.start()
        began = side.database.tables()
        for _ in range(REAL if side is short else MODELS):
            side.ask(SAVE)
    long.stop(settled=True)
    grown = {name: (rows - began[name]) / MODELS for name, rows in long.database.tables().items()}
    print("rows a save:", {name: round(rows, 1) for name, rows in grown.items() if rows >= 1})
    known = {*ROWS, PASSING}
    found = [
        f"{n} grows and is not multiplied" for n, r in grown.items() if r >= 1 and n not in known
    ]
    before, then, real = long.database.size, time.perf_counter(), Saves(long.database)
    real.multiply(range(1, saves + 1), EVERY_S)
    filled = long.database.size - before
    print(f"{saves} saves into the database: {time.perf_counter() - then:.0f} s, "
          f"{filled / 1e6:.0f} MB, {filled / saves / 1e6:.3f} MB a save")  # fmt: skip
    multiply_steps(long.root, saves + 1, range(1, saves + 1), EVERY_S)
    print(f"the server starts within {long.start():.1f} s")
    print(f"trinity-sync reconcile: {long.ask('trinity-sync reconcile'):.1f} s")
    long.ask(SAVE)
    print(f"| question | {REAL} saves, ms | {saves} saves, ms | ratio |\n|---|---|---|---|")
    for name in _names():
        answers: dict[int, list[float]] = {id(short): [], id(long): []}
        for _ in range(TURNS + 1):
            for side in (short, long):
                answers[id(side)].append(side.ask(name) * 1e3)
        one, many = (statistics.median(each[1:]) for each in answers.values())
        print(f"| {name} | {one:.0f} | {many:.0f} | {many / one:.1f} |", flush=True)
        if name.startswith(("trigger", "watch", "worker", "a save")) and many > 3 * one + 20:
            found.append(f"{name} takes {many:.0f} ms instead of {one:.0f}")
    return found, real


def _retain(long: Side, real: Saves, saves: int) -> list[str]:
    """Measure what the shipped retention removes and leaves."""
    from trinity_sync.settings import ServerSettings

    shipped = ServerSettings().keep_events.total_seconds() / 3600, _runs_h()
    peaks = []
    for turn in range(2):
        long.stop(settled=True)
        if turn:
            real.multiply(range(saves + 1, saves + saves // 4 + 1), EVERY_S)
        peaks.append(long.database.size)
        long.keep_h = shipped
        then, slowest = time.perf_counter(), dict.fromkeys((SAVE, ASKED_AGAIN), 0.0)
        now = datetime.now(UTC).replace(tzinfo=None)
        long.start()
        while left := _too_old(long.database, now, *shipped):
            for name in slowest:
                slowest[name] = max(slowest[name], long.ask(name))
            if time.perf_counter() - then > 1800:
                return [f"the retention has left {left} rows after half an hour"]
        print(
            f"retention of {shipped[0]:g} h of events and {shipped[1]:g} h of runs: "
            f"{time.perf_counter() - then:.0f} s, {peaks[-1] / 1e6:.0f} MB on disk, in use then "
            f"{long.database.in_use() / 1e6:.0f} MB; meanwhile at most "
            + ", ".join(f"{took * 1e3:.0f} ms for {name!r}" for name, took in slowest.items()),
            flush=True,
        )
    return ["the database grows beyond its first peak"] if peaks[1] > 1.1 * peaks[0] else []


def _runs_h() -> float:
    from trinity_sync.settings import ServerSettings

    return ServerSettings().keep_runs.total_seconds() / 3600


def _too_old(database: Database, now: datetime, events_h: float, runs_h: float) -> int:
    """Return the rows that were too old ``now`` and that retention has still to remove."""
    return sum(
        database.count(f"{table} WHERE {column} < '{now - timedelta(hours=hours)}'")
        for table, column, hours in (
            ("event_resources", "occurred", events_h),
            ("events", "occurred", events_h),
            ("flow_run", "end_time", runs_h),
        )
    )


def _settled(database: Database) -> None:
    """Wait until the server has written all of its events."""
    seen: dict[str, int] = {}
    while seen != (now := database.tables()):
        seen = now
        time.sleep(3.0)


def _names() -> list[str]:
    from benchmarks.questions import NAMES

    return [*NAMES, SAVE]


def _asking(pipe: Any, variables: dict[str, str], root: Path, first_step: int) -> None:
    """Put questions to one server, in a process of its own."""
    os.environ |= variables
    from benchmarks.questions import Questions

    questions = Questions(root, first_step)
    ask: dict[str, Callable[[], Any]] = {**questions.by_name, SAVE: questions.save}
    while (name := pipe.recv()) is not None:
        try:
            began = time.perf_counter()
            given = ask[name]()
            pipe.send(given if name == SAVE else time.perf_counter() - began)
        except Exception as error:
            pipe.send(repr(error))


if __name__ == "__main__":
    main()
