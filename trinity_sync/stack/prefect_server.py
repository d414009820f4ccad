"""A Prefect server on SQLite that does not block; its arguments are those of ``prefect``.

While a connection waits for another one's transaction, a minute at most, its lock is taken. A
statement that failed leaves its cursor in a traceback, and whichever thread collects that garbage
wants the lock. If it is the thread of the event loop, the transaction that all wait for cannot end,
and the server answers no request until the minute is over. So garbage is collected by a thread of
its own.

Its vacuum removes old rows batch after batch, in one transaction each. Other writers try every
tenth of a second whether the database is free, and hardly ever hit the instant between two of them.
So the vacuum pauses after each batch for as long as that took.

A transaction that reads before it writes is refused at once if another one has written in between:
a call is answered with 503, a worker's heartbeat is lost, an event reaches no automation. So each
transaction waits for the others as it begins.
"""

import asyncio
import gc
import runpy
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from trinity_sync.orchestration.prefect_compat import (
    begin_transactions_as_writers,
    wrap_vacuum_session,
)

PAUSE_S = 0.5
FULL_EVERY = 60
"""Collections, after which one looks at old objects, too."""
PAUSE_AT_LEAST_S = 0.25
"""At least: SQLite asks for a lock every 0.1 s."""


def collect_in_a_thread() -> None:
    """Have this process's garbage collected by a thread of its own, and by no other."""
    gc.disable()
    threading.Thread(target=_collect, name="collects-garbage", daemon=True).start()


def _collect() -> None:
    for number in count(1):
        time.sleep(PAUSE_S)
        gc.collect(1 if number % FULL_EVERY else 2)


def let_others_write() -> None:
    """Have the vacuum of this process's server leave the database free between its batches."""
    wrap_vacuum_session(_pause_after)


def _pause_after(session: Any) -> Any:
    @asynccontextmanager
    async def paused(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        began = time.monotonic()
        async with session(*args, **kwargs) as found:
            yield found
        await asyncio.sleep(max(time.monotonic() - began, PAUSE_AT_LEAST_S))

    return paused


if __name__ == "__main__":
    collect_in_a_thread()
    begin_transactions_as_writers()
    let_others_write()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
