"""A run is retried only when no process of this node executes it, without a Prefect server."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Literal
from uuid import UUID, uuid4

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.support.answers import server, serving
from tests.support.job import Job
from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.prefect_api import PrefectApi, ask_server
from trinity_sync.client.saver_control import SERVED, SaveTrigger
from trinity_sync.errors import SaveTimeoutError
from trinity_sync.orchestration.recovery import node
from trinity_sync.orchestration.recovery.flow_runs import (
    ACQUIRED_BY,
    ATTEMPTS,
    WAITING,
    recover_run,
    try_allow_eviction,
)
from trinity_sync.orchestration.recovery.node import NodeRecovery
from trinity_sync.orchestration.worker import TrinitySyncWorker
from trinity_sync.pipeline.pending import find_pending_saves
from trinity_sync.saves.journal import Entry, Journal, SaveState, append
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import try_run_lock

NODE = "this-node"
DEAD = f"{ACQUIRED_BY}{NODE}/1/1"
"""How a process of this node that is dead took a run: pid 1 began at another time."""
RUN, FLOW = str(uuid4()), str(uuid4())
SAVE = SaveRequest(root="/ckpts", step=4, run=1)


@contextmanager
def at_work(spool: Path, run: str = RUN) -> Iterator[subprocess.Popen[str]]:
    """Another process of this node that executes a run, as a worker does."""
    script = (
        "import sys; from pathlib import Path; from uuid import UUID\n"
        "from trinity_sync.snapshot.spool import try_run_lock\n"
        f"with try_run_lock(Path({str(spool)!r}), UUID({run!r})) as free:\n"
        "    print(free, flush=True); sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "True\n"
            yield process
        finally:
            process.kill()


@contextmanager
def prefect(*states: tuple[str, str, str]) -> Iterator[list[dict[str, Any]]]:
    """A server that knows the run, with the states (type, name, message) that it went through.

    Yields:
        The states that the run is set to.
    """
    history = [
        {
            "id": str(uuid4()),
            "type": kind,
            "name": name,
            "message": message,
            "timestamp": f"2026-01-01T00:00:0{number}Z",
        }
        for number, (kind, name, message) in enumerate(states)
    ]
    run = {
        "id": RUN,
        "flow_id": FLOW,
        "name": "save actor step 4",
        "idempotency_key": SAVE.key,
        "state": history[-1],
    }
    accepted = {"status": "ACCEPT", "details": {"type": "accept_details"}, "state": history[-1]}
    asked: list[tuple[str, str]] = []
    answers = {
        f"/flow_runs/{RUN}/set_state": (201, json.dumps(accepted)),
        f"/flow_runs/{RUN}": (200, json.dumps(run)),
        "/flow_run_states": (200, json.dumps(history)),
        "/flow_runs/filter": (200, json.dumps([run])),
        "/task_runs/filter": (200, "[]"),
        "/admin/version": (200, '"3.8.8"'),
    }
    seen: list[dict[str, Any]] = []
    with server(answers, asked=asked) as url, temporary_settings({PREFECT_API_URL: url}):
        yield seen
        seen += [json.loads(body)["state"] for path, body in asked if path.endswith("set_state")]


def begin(spool: Path) -> None:
    ask_here(lambda api: recover_run(api, UUID(RUN), f"{NODE}/2/2", spool=spool))


def ask_here(ask: Callable[[PrefectApi], Awaitable[None]]) -> None:
    """Ask the server of `prefect`."""
    ask_server(Settings(), ask, PREFECT_API_URL.value())


CRASHED = ("PENDING", "Pending", DEAD), ("CRASHED", "Crashed", "Nothing was heard of it.")


UNDER_WAY = ("PENDING", "Pending", DEAD), ("RUNNING", "Running", "")
"""A process has the lock of a run before the server knows which worker took it."""


@pytest.mark.parametrize(
    ("states", "becomes"), [(CRASHED, "AwaitingRetry"), (UNDER_WAY, "Crashed")]
)
@pytest.mark.parametrize("executes", ["it", "another run", "it, and is killed"])
def test_a_run_is_begun_again_or_ended_only_if_no_process_executes_it_here(
    spool_folder: Path, states: tuple[tuple[str, str, str], ...], becomes: str, executes: str
) -> None:
    run = str(uuid4()) if executes == "another run" else RUN
    with prefect(*states) as seen, at_work(spool_folder, run) as process:
        if executes == "it, and is killed":
            process.kill()
            process.wait()
        begin(spool_folder)
    assert [state["name"] for state in seen] == ([] if executes == "it" else [becomes])


@pytest.mark.parametrize("name", [WAITING, "Crashed"])
def test_a_run_whose_root_was_away_at_each_start_is_begun_again_as_often_as_needed(
    spool_folder: Path, name: str
) -> None:
    start = ("PENDING", "Pending", DEAD), ("CRASHED", name, "The root is not mounted here.")
    with prefect(*start * ATTEMPTS) as states:
        begin(spool_folder)
    assert [state["name"] for state in states] == ["AwaitingRetry"] * (name == WAITING)


def test_a_worker_tells_the_processes_of_a_job_without_a_saver_that_its_root_is_away(
    job: Job,
) -> None:
    (job.spool.folder / SERVED).touch()
    settings = Settings(spool=job.spool.folder.parent, saver="stack")
    watcher = CommitWatcher(SaveTrigger(settings), job.spool, rank=1)
    watcher.follow(job.request(1))
    away = job.root.rename(job.root.with_name("away"))
    recovery = NodeRecovery(settings, f"{NODE}/2/2", lambda _: False, lambda _: None)
    api = PrefectApi(settings, "http://127.0.0.1:9/api")

    def look() -> None:
        asyncio.run(recovery.serve_images(api))

    look()
    assert not job.spool.away.exists()  # the saver tells what it sees
    (job.spool.folder / SERVED).unlink()
    look()
    with pytest.raises(SaveTimeoutError, match=f"{job.root} is not mounted here"):
        watcher.wait(time.monotonic())
    watcher.close()
    away.rename(job.root)
    look()
    assert not job.spool.away.exists()


def test_a_worker_takes_no_run_that_a_process_of_its_node_executes(
    spool_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(spool_folder))

    async def take() -> tuple[bool, bool]:
        """Whether it is taken, and whether its lock is free then."""
        worker = TrinitySyncWorker(work_pool_name="any")
        async with get_client() as worker._client:
            taken = await worker.acquire_run(FlowRun(id=UUID(RUN), flow_id=UUID(FLOW)))
            with try_run_lock(spool_folder, UUID(RUN)) as free:
                return taken, free

    with prefect(("PENDING", "Pending", DEAD)) as states, at_work(spool_folder):
        assert asyncio.run(take()) == (False, False)
    assert states == []
    with prefect(("PENDING", "Pending", DEAD)) as states:
        assert asyncio.run(take()) == (True, False)
    assert [state["name"] for state in states] == ["Pending"]


@contextmanager
def failed_run(
    request: SaveRequest,
    kind: str,
    name: str = "",
    message: str = "killed",
    key: str | None = None,
) -> Iterator[PrefectApi]:
    """A server whose flow run of a save ended at a time that this clock is far from."""
    state = {"type": kind, "name": name or kind.title(), "message": message, "id": str(uuid4())}
    run = {
        "id": RUN,
        "name": request.flow_run_name,
        "idempotency_key": request.key if key is None else key,
        "tags": request.tags,
        "parameters": request.flow_run["parameters"],
        "state": {**state, "timestamp": "2100-01-01T00:00:00Z"},
        "run_count": 1,
    }

    def answer(asked: BaseHTTPRequestHandler, body: str) -> tuple[int, str]:
        if not asked.path.endswith("/flow_runs/filter"):
            return 200, "[]"
        wanted = json.loads(body)["flow_runs"]
        is_there = kind in wanted["state"]["type"]["any_"] and RUN not in wanted["id"]["not_any_"]
        return 200, json.dumps([run] if is_there else [])

    with serving(answer) as url:
        yield PrefectApi(Settings(), f"{url}/api")


@pytest.fixture
def recovery(settings: Settings) -> NodeRecovery:
    """What a worker recovers that executes no run."""
    return NodeRecovery(settings, f"{NODE}/2/2", lambda _: False, lambda _: None)


@pytest.fixture
def save(tmp_path: Path) -> SaveRequest:
    """The save of a root."""
    (tmp_path / ".trinity_sync").mkdir()
    return SaveRequest(root=str(tmp_path), step=4, run=1)


def tell(recovery: NodeRecovery, api: PrefectApi, request: SaveRequest) -> Entry | None:
    """Have a worker poll; return what the journal tells then."""

    async def poll() -> None:
        async with api:
            await recovery.recover_flow_runs(api, "pool")

    asyncio.run(poll())
    journal = Journal.of(request)
    journal.read()
    return journal.find(request.key)


def test_a_crashed_run_has_failed_once_nothing_executes_or_retries_it(
    spool_folder: Path, recovery: NodeRecovery, save: SaveRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failed_run(save, "CRASHED") as api:
        assert tell(recovery, api, save) is None  # a worker may retry it
        monkeypatch.setattr(node, "CRASH_GRACE_S", -1.0)
        with at_work(spool_folder):
            assert tell(recovery, api, save) is None
        entry = tell(recovery, api, save)
    assert (entry.state, entry.message) == ("failed", "Crashed: killed")
    assert entry.url.endswith(f"/runs/flow-run/{RUN}")


@pytest.mark.parametrize(("is_taken_over", "state"), [(True, "begun"), (False, "failed")])
def test_a_failed_run_tells_nothing_of_a_save_that_the_saver_has_taken_over(
    recovery: NodeRecovery, save: SaveRequest, is_taken_over: bool, state: SaveState
) -> None:
    begun = append(save, "begun", start=1)
    if is_taken_over:
        append(save, "begun", over=begun)
    with failed_run(save, "FAILED") as api:
        entry = tell(recovery, api, save)
    assert entry.state == state


def test_a_run_that_waits_for_its_root_has_not_failed(
    recovery: NodeRecovery, save: SaveRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "CRASH_GRACE_S", -1.0)
    with failed_run(save, "CRASHED", name="Waiting for its root") as api:
        assert tell(recovery, api, save) is None


@pytest.mark.parametrize("known", ["nothing", "begun", "left", "failed", "completed"])
def test_a_run_that_ended_without_a_worker_is_told_once(
    recovery: NodeRecovery, save: SaveRequest, tmp_path: Path, known: SaveState | Literal["nothing"]
) -> None:
    if known != "nothing":
        append(save, known, "by its worker", start=1)
    with failed_run(save, "CANCELLED") as api:
        for _ in range(2):
            entry = tell(recovery, api, save)
    told = ("failed", "Cancelled: killed"), (known, "by its worker")
    assert (entry.state, entry.message) == told[known in ("left", "failed", "completed")]
    (path,) = tmp_path.glob(".trinity_sync/journal/*.jsonl")
    assert len(path.read_text().splitlines()) == (1 if known != "begun" else 2)


@pytest.fixture
def waiting(job: Job) -> SaveRequest:
    """A save of the job whose image waits."""
    job.stage(4, {"model": {"w": torch.ones(3)}})
    (request,) = find_pending_saves(job.spool, grace_s=0)
    return request


def test_a_save_whose_run_a_limit_of_the_server_has_cancelled_is_left_to_the_saver(
    recovery: NodeRecovery, job: Job, waiting: SaveRequest
) -> None:
    with failed_run(waiting, "CANCELLED", message="Deployment concurrency limit reached.") as api:
        for _ in range(2):
            entry = tell(recovery, api, waiting)
    assert entry.is_left
    assert [image.failed for image in job.spool.tickets()[0]] == [False]


def test_a_run_that_a_user_has_made_of_a_save_ends_no_save(
    recovery: NodeRecovery, job: Job, waiting: SaveRequest
) -> None:
    with failed_run(waiting, "CANCELLED", key="of a copy") as api:
        assert tell(recovery, api, waiting) is None
    for given in ({"request": waiting.model_dump(mode="json")}, {"another": "flow"}):
        asyncio.run(try_allow_eviction(job.spool.folder.parent, given, None, "cancelled"))
    assert [image.failed for image in job.spool.tickets()[0]] == [False]
