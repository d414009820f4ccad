"""How a flow waits for its tasks."""

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from prefect.futures import PrefectFuture

from flows.on_ray import gather_results

WHOSE: ContextVar[str] = ContextVar("WHOSE")


class Lasting(PrefectFuture[str]):
    """A task that ends when the test says so."""

    def __init__(self, end: threading.Event) -> None:
        self._end = end

    def result(self, timeout: float | None = None, raise_on_failure: bool = True) -> Any:
        self._end.wait(60)
        return WHOSE.get()

    def add_done_callback(self, fn: Callable[[PrefectFuture[str]], None]) -> None:
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> None:
        self._end.wait(timeout)


def test_many_long_tasks_of_other_flows_hold_up_no_save() -> None:
    async def flows() -> tuple[list[str], list[str]]:
        never, now = threading.Event(), threading.Event()
        now.set()
        WHOSE.set("others")
        others = [asyncio.create_task(gather_results([Lasting(never) for _ in range(100)]))]
        await asyncio.sleep(0)  # they wait before the save does
        WHOSE.set("save")
        try:
            save = await asyncio.wait_for(gather_results([Lasting(now)]), 30)
        finally:
            never.set()
        return save, await others[0]

    assert asyncio.run(flows()) == (["save"], ["others"] * 100)
