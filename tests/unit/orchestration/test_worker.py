"""What holds a worker up, and what it says of its trouble, without a Prefect server."""

import asyncio
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import anyio
import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.exceptions import ObjectNotFound, ParameterBindError
from prefect.states import Failed, exception_to_failed_state

from tests.conftest import environment
from tests.support.answers import server
from tests.support.job import Job
from trinity_sync.client.prefect_api import PrefectApi
from trinity_sync.errors import PrefectApiError
from trinity_sync.orchestration import worker as worker_module
from trinity_sync.orchestration.worker import TrinitySyncWorker
from trinity_sync.saves.journal import read_entry
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import WORKER, check_worker


@pytest.fixture(autouse=True)
def settings(job: Job, tmp_path: Path) -> Iterator[Settings]:
    named = {
        "PREFECT_API_URL": "http://127.0.0.1:9/api",
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "TRINITY_SYNC_HOME": str(tmp_path / "home"),
        "TRINITY_SYNC_SPOOL": str(job.spool.folder.parent),
    }
    from prefect.context import refresh_global_settings_context

    with environment(named):
        refresh_global_settings_context()
        yield Settings()
    refresh_global_settings_context()


def test_a_spool_that_cannot_be_used_is_said_and_a_server_that_is_away_is_none(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.spool.chmod(0o755)

    def said() -> list[str]:
        return [each.message for each in caplog.records if "restarting it" in each.message]

    async def start_and_wait() -> None:
        async with TrinitySyncWorker(work_pool_name="any"):
            while not said():
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(start_and_wait(), 60))
    (message,) = said()
    assert f"run: chmod 700 {settings.spool}" in message


def test_savers_know_whether_a_worker_and_its_server_begin_runs(settings: Settings) -> None:
    async def stand_by(worker: TrinitySyncWorker, url: str) -> bool | None:
        os.utime(settings.spool / ".runs.lock", (0, 0))
        with suppress(PrefectApiError):
            worker._api = PrefectApi(settings, url)
            await worker.stand_by()
        return check_worker(settings.spool)

    async def work() -> None:
        worker = TrinitySyncWorker(work_pool_name="any")
        (settings.spool / ".runs.lock").touch()
        with server({"/admin/version": (200, '"3"')}) as url:
            assert await stand_by(worker, url)
            assert await stand_by(worker, "http://127.0.0.1:9/api") is False
            assert await stand_by(worker, url)
        worker._unlock(WORKER)
        assert check_worker(settings.spool) is None

    asyncio.run(work())


class Failing(TrinitySyncWorker):
    """A worker without its server, whose runs fail before they have begun."""

    type = "failing"
    entrypoint = ""

    async def _find_entrypoint(self, _: FlowRun) -> str:
        return self.entrypoint

    async def _run_until_cancelled(self, *_: object) -> State[Any]:
        return Failed(message="the request has format 0")


async def refuse(*_: object, **__: object) -> None:
    raise ParameterBindError("colour, as the deployment was edited")


@pytest.mark.parametrize("why", ["cannot import", "has format 0", "Wrong parameters: colour"])
def test_a_save_that_this_worker_cannot_begin_is_left_to_the_saver(
    job: Job, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    states: list[State[Any]] = []
    request = job.request(1).model_dump(mode="json")
    broken = "tasks.of_another_release.save" if why == "cannot import" else "flows.save.save_step"

    async def set_state(_: UUID, state: State[Any], *, force: bool) -> None:
        states.append(state)

    async def execute(key: str | None) -> None:
        worker = Failing(work_pool_name="any")
        worker.entrypoint = broken
        if "colour" in why:
            monkeypatch.setattr(worker_module, "run_flow", refuse)
            run_flow = partial(TrinitySyncWorker._run_until_cancelled, worker)
            monkeypatch.setattr(worker, "_run_until_cancelled", run_flow)
        worker._client = SimpleNamespace(set_flow_run_state=set_state)  # type: ignore[assignment]
        given = {"request": {**request, "format": 0} if "format" in why else request}
        how = {"flow_id": UUID(int=1), "deployment_id": UUID(int=2)}
        await worker.execute_run(FlowRun(**how, parameters=given, idempotency_key=key))

    asyncio.run(execute(None))
    assert read_entry(job.request(1)) is None  # a user has made that run
    states.clear()
    asyncio.run(execute(job.request(1).key))
    told = read_entry(job.request(1))
    assert (told.is_left, why in told.message) == (True, True)
    ended = {"cannot import": ["Crashed"], "Wrong parameters: colour": ["Failed"]}
    assert [state.name for state in states] == ended.get(why, [])


@pytest.mark.parametrize(("starts", "status"), [(0, 500), (1, 500), (2, 500), (0, 404)])
def test_a_run_whose_end_the_server_has_not_taken_has_not_failed_and_runs_again(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch, starts: int, status: int
) -> None:
    async def end(*_: object, **__: object) -> State[Any]:
        async with httpx.AsyncClient() as client:
            try:
                (await client.post(f"{url}/broken")).raise_for_status()
            except httpx.HTTPStatusError as error:  # as Prefect's client and engine do
                raised = ObjectNotFound(error) if status == 404 else error
                return await exception_to_failed_state(raised)
        raise AssertionError

    async def execute() -> None:
        worker = Failing(work_pool_name="any")
        worker.entrypoint, worker._api = "flows.save.save_step", PrefectApi(settings, url)
        run_flow = partial(TrinitySyncWorker._run_until_cancelled, worker)
        monkeypatch.setattr(worker, "_run_until_cancelled", run_flow)
        await worker.execute_run(run)
        await worker._api.close()

    monkeypatch.setattr(worker_module, "run_flow", end)
    given = {"request": job.request(1).model_dump(mode="json")}
    how = {"flow_id": UUID(int=1), "deployment_id": UUID(int=2), "run_count": starts}
    run = FlowRun(**how, parameters=given, idempotency_key=job.request(1).key)
    asked: list[tuple[str, str]] = []
    again = f"/flow_runs/{run.id}/set_state"
    answers = {"/broken": (status, "{}"), again: (201 if status == 500 else 404, "{}")}
    with server(answers, asked=asked) as url:
        asyncio.run(execute())
    assert [path for path, _ in asked] == ["/broken", *[again] * (starts < 2)]
    assert all("AwaitingRetry" in body for _, body in asked[1:])
    told = read_entry(job.request(1))
    assert not told.has_ended


class Standing(TrinitySyncWorker):
    """A worker whose runs last until the test ends them."""

    type = "standing"

    def __init__(self) -> None:
        super().__init__(work_pool_name="any")
        self.ends: dict[UUID, asyncio.Event] = defaultdict(asyncio.Event)

    async def acquire_run(self, flow_run: FlowRun) -> bool:
        return True

    async def execute_run(self, flow_run: FlowRun) -> None:
        with anyio.CancelScope() as self._running[flow_run.id]:
            await self.ends[flow_run.id].wait()
        del self._running[flow_run.id]


def due_runs(queue: UUID, jobs: str) -> list[WorkerFlowRunResponse]:
    """A run of each job, by its letter, in the order in which they are due."""
    runs = [FlowRun(id=uuid4(), flow_id=UUID(int=1), tags=[f"job:{job}"]) for job in jobs]
    return [
        WorkerFlowRunResponse(work_pool_id=UUID(int=2), work_queue_id=queue, flow_run=run)
        for run in runs
    ]


def test_a_job_whose_runs_hang_gets_no_more_than_half_of_a_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_STACK__WORKER__MAX_RUNS", "4")
    worker, queue = TrinitySyncWorker(work_pool_name="any"), uuid4()
    active: dict[UUID, str] = {}
    monkeypatch.setattr(worker, "is_active", active.__contains__)

    def begin(due: list[WorkerFlowRunResponse]) -> str:
        for each in (begun := worker.select_runs(due)):
            active[each.flow_run.id] = each.flow_run.tags[0].removeprefix("job:")
            due.remove(each)
        return "".join(active[each.flow_run.id] for each in begun)

    def end(job: str) -> None:
        del active[next(run for run, of in active.items() if of == job)]

    due = due_runs(queue, "AAAAAAAA")  # they all hang
    assert begin(due) == "AA"
    assert begin(due) == ""
    due += due_runs(queue, "BBC")
    assert begin(due) == "BC"
    assert begin(due) == ""
    end("B")
    assert begin(due) == "B"
    end("B")
    end("C")
    assert begin(due) == ""
    assert begin(due_runs(uuid4(), "A")) == "A"  # of another queue
    monkeypatch.setenv("TRINITY_SYNC_STACK__WORKER__MAX_RUNS", "8")
    worker = TrinitySyncWorker(work_pool_name="any")
    begun = worker.select_runs(due_runs(uuid4(), "AAAABBC"))
    assert "".join(each.flow_run.tags[0].removeprefix("job:") for each in begun) == "ABCABA"


async def let_tasks_run() -> None:
    """Let all tasks get as far as they can without an event."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_each_queue_has_places_of_its_own_so_that_no_save_waits_for_maintenance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_STACK__WORKER__MAX_RUNS", "2")
    syncs, checkpoints, maintenance = (uuid4() for _ in range(3))

    async def work() -> None:
        worker = Standing()
        care, saves = due_runs(maintenance, "ABC"), due_runs(checkpoints, "ABC")
        async with anyio.create_task_group() as worker._runs_task_group:

            async def take(*waiting: WorkerFlowRunResponse) -> set[UUID]:
                """Runs that are under way after a look at those that wait."""
                await worker._submit_scheduled_flow_runs(worker.select_runs(waiting))
                await let_tasks_run()
                return set(worker._running)

            first_care = {run.flow_run.id for run in care[:2]}
            first_saves = {run.flow_run.id for run in saves[:2]}
            assert await take(*care) == first_care
            assert await take(*care, *saves) == first_care | first_saves
            (sync,) = due_runs(syncs, "A")
            busy = await take(sync, *saves, *care)
            assert busy == first_care | first_saves | {sync.flow_run.id}
            worker.ends[saves[0].flow_run.id].set()
            await let_tasks_run()
            now = busy - {saves[0].flow_run.id} | {saves[2].flow_run.id}
            assert await take(saves[2], care[2]) == now
            worker._runs_task_group.cancel_scope.cancel()

    asyncio.run(work())
