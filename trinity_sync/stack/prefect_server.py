"""A Prefect server on SQLite that does not block; takes the arguments of ``prefect``.

A transaction takes the write lock when it begins, the vacuum pauses after each batch for as long as
the batch took, and a separate thread collects garbage: ``docs/contributing/design.md`` says why.
That thread leaves out what exists half a minute after the start, the code above all: looking at it
stops the server for up to a second.

A save sends two dozen events, of which Prefect stores 17 KB each, with their indexes. Most repeat
what the tables of states, runs and artifacts say, so only the others are stored.
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
    persist_events_if,
    wrap_vacuum_session,
)

PAUSE_S = 0.5
FULL_EVERY = 60
"""Every so many collections, the oldest generation is collected as well."""
REPEATED = (
    "prefect.task-run.",
    "prefect.artifact",
    "prefect.worker.",
    "prefect.log.",
    "prefect.flow-run.Scheduled",
    "prefect.flow-run.Pending",
    "prefect.flow-run.Running",
    "prefect.flow-run.heartbeat",
)
"""Prefixes of the names of events that are not stored: the database holds what they say already."""
MIN_VACUUM_PAUSE_S = 0.25
"""SQLite retries a lock every 0.1 s."""


def collect_garbage_in_thread() -> None:
    """Collect this process's garbage in a separate thread only."""
    gc.disable()
    threading.Thread(target=_collect, name="garbage-collector", daemon=True).start()


def _collect() -> None:
    for number in count(1):
        time.sleep(PAUSE_S)
        gc.collect(1 if number % FULL_EVERY else 2)
        if number == FULL_EVERY:
            gc.freeze()


def pause_vacuum_between_batches() -> None:
    """Let other writers use the database between two batches of the server's vacuum."""
    wrap_vacuum_session(_pause_after)


def _pause_after(session: Any) -> Any:
    @asynccontextmanager
    async def paused(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        start = time.monotonic()
        async with session(*args, **kwargs) as connection:
            yield connection
        await asyncio.sleep(max(time.monotonic() - start, MIN_VACUUM_PAUSE_S))

    return paused


if __name__ == "__main__":
    collect_garbage_in_thread()
    begin_transactions_as_writers()
    pause_vacuum_between_batches()
    persist_events_if(lambda name: not name.startswith(REPEATED))
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
