"""How a flow waits for its tasks."""

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from uuid import uuid4

from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_API_URL, temporary_settings
from ray.exceptions import RayError, WorkerCrashedError

from flows.on_ray import gather_outcomes, gather_results

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


class Killed(Lasting):
    """A task whose Ray process was killed before it created its task run."""

    def __init__(self) -> None:
        super().__init__(threading.Event())
        self._task_run_id = uuid4()

    def result(self, timeout: float | None = None, raise_on_failure: bool = True) -> Any:
        raise WorkerCrashedError


class NoTaskRuns(BaseHTTPRequestHandler):
    """A Prefect server that knows of no task run."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def test_the_error_of_a_task_is_returned_if_it_died_before_its_task_run_was_created() -> None:
    server = HTTPServer(("127.0.0.1", 0), NoTaskRuns)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/api"
    try:
        with temporary_settings({PREFECT_API_URL: url}):
            (outcome,) = asyncio.run(gather_outcomes([Killed()]))
    finally:
        server.shutdown()
        server.server_close()
    assert isinstance(outcome, RayError)
