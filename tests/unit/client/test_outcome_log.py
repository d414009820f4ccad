"""What rank 0 learns of a save reaches the other ranks: each a process that asks no server."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import pytest
import torch

from tests.support.answers import server
from tests.support.job import Job
from tests.unit.conftest import Open
from trinity_sync.client.commit_watcher import MANY, CommitWatcher
from trinity_sync.client.outcomes import UNANNOUNCED_S, Outcome, OutcomeLog, OutcomeLogs
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.client.save_trigger import SaveTrigger
from trinity_sync.errors import SaveTimeoutError
from trinity_sync.settings import Settings

RANK = """
import json, sys, time
from pathlib import Path
from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.save_trigger import SaveTrigger
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.job_identity import read_identity
from trinity_sync.snapshot.spool import JobSpool

rank, root, spool, url, images = json.loads(sys.argv[1])
trigger = SaveTrigger(Settings(spool=Path(spool).parent), url)
watcher = CommitWatcher(trigger, JobSpool(Path(spool)), rank=rank, world_size=2)
save = {"root": root, "step": 4, "run": 1, "identity": read_identity(root)}
request = SaveRequest(**save, components=["model"])
watcher.follow(request, images=images)
print("follows", flush=True)
for line in sys.stdin:
    failures = watcher.wait(time.monotonic() + 60)
    seconds = list(watcher.commit_seconds.values())
    asked = "httpx" in sys.modules
    print(json.dumps({"failures": failures, "seconds": seconds, "asked": asked}), flush=True)
watcher.close()
"""
ZEROS = {"model": {"w": torch.zeros(3)}}


class Rank:
    """A rank in a process of its own, which follows the save of step 4."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin
        assert process.stdout
        self.process = process
        self.stdin: IO[str] = process.stdin
        self.stdout: IO[str] = process.stdout

    def begin_to_wait(self) -> None:
        print("wait", file=self.stdin, flush=True)

    def told(self) -> dict[str, Any]:
        """What its wait has ended with."""
        return dict(json.loads(self.stdout.readline()))

    def wait(self) -> dict[str, Any]:
        self.begin_to_wait()
        return self.told()


@contextmanager
def rank_of(job: Job, rank: int, url: str, images: list[str] | None = None) -> Iterator[Rank]:
    arguments = json.dumps([rank, str(job.root), str(job.spool.folder), url, images or []])
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    made = Rank(process)
    try:
        assert made.stdout.readline() == "follows\n"
        yield made
    finally:
        made.stdin.close()
        process.kill()
        process.wait()
        made.stdout.close()


@pytest.fixture
def pair(job: Job) -> Job:
    """A job of two ranks, which have staged the model of step 4."""
    job.world_size = 2
    for rank in range(2):
        job.stage(4, ZEROS, rank=rank)
    return job


def request_of(job: Job, step: int = 4, run: int = 1) -> SaveRequest:
    return job.request(step, run=run, components=("model",))


def images_of(job: Job, rank: int) -> list[str]:
    return [each.ticket.image for each in job.spool.tickets()[0] if each.ticket.rank == rank]


def flow_run(request: SaveRequest, state: str) -> tuple[int, str]:
    """The answer of a server whose flow run of a save is in a state."""
    named = {"type": state, "name": state.title(), "message": "the disk is full"}
    run = {
        "id": str(uuid4()),
        "idempotency_key": request.key,
        "state": {**named, "timestamp": "2026-01-01T00:00:00Z"},
    }
    return 200, json.dumps([run])


@contextmanager
def leader(job: Job, url: str, world_size: int = 2) -> Iterator[CommitWatcher]:
    trigger = SaveTrigger(Settings(spool=job.spool.folder.parent), url)
    watcher = CommitWatcher(trigger, job.spool, rank=0, world_size=world_size)
    yield watcher
    watcher.close()


def await_that(watcher: CommitWatcher, what: Callable[[], object]) -> None:
    while not what():
        with pytest.raises(SaveTimeoutError):
            watcher.wait(time.monotonic() + 0.05)


def log_of(job: Job) -> str:
    return "".join(path.read_text() for path in job.root.glob(".trinity_sync/outcomes/*.jsonl"))


def test_a_rank_sees_a_commit_in_the_root_and_asks_no_server(pair: Job) -> None:
    asked: list[tuple[str, str]] = []
    with server({}, asked=asked) as url, rank_of(pair, 1, url, images_of(pair, 1)) as other:
        other.begin_to_wait()
        pair.commit(4)
        told = other.told()
    assert told["failures"] == []
    assert 0 <= told["seconds"][0] < 60
    assert not told["asked"]
    assert asked == []


def test_a_rank_that_asks_without_waiting_sees_a_commit(job: Job) -> None:
    job.stage(4, ZEROS)
    job.commit(4)
    watcher = CommitWatcher(SaveTrigger(), job.spool, rank=1, world_size=2)
    watcher.follow(request_of(job))
    until = time.monotonic() + 30
    while time.monotonic() < until and watcher._pending:
        with suppress(SaveTimeoutError):
            watcher.wait(time.monotonic())
    assert watcher.wait(time.monotonic()) == []
    watcher.close()


def test_a_rank_that_waits_late_knows_how_long_its_commit_took(pair: Job) -> None:
    request = request_of(pair)
    trigger = SaveTrigger(Settings(spool=pair.spool.folder.parent), "http://127.0.0.1:9/api")
    other = CommitWatcher(trigger, pair.spool, rank=1, world_size=2)
    other.follow(request)
    pair.commit(4)
    other._pending[request.key].since -= 3600  # an hour of training follows
    assert other.wait(time.monotonic() + 30) == []
    assert 0 <= other.commit_seconds[request.key] < 60
    other.close()


def test_a_rank_hears_from_rank_0_of_a_failure_and_asks_no_server(pair: Job) -> None:
    request = request_of(pair)
    with (
        server({"/flow_runs/filter": flow_run(request, "FAILED")}) as url,
        rank_of(pair, 1, "http://127.0.0.1:9/api") as other,
        leader(pair, url) as first,
    ):
        other.begin_to_wait()
        first.follow(request)
        failures = first.wait(time.monotonic() + 60)
        told = other.told()
    assert "the disk is full" in failures[0]
    assert told == {"failures": failures, "seconds": [], "asked": False}


def test_a_rank_that_submits_a_failed_save_again_hears_of_the_second_outcome(pair: Job) -> None:
    request = request_of(pair)
    trigger = SaveTrigger(Settings(spool=pair.spool.folder.parent), "http://127.0.0.1:9/api")
    log, other = OutcomeLog(request), CommitWatcher(trigger, pair.spool, rank=1, world_size=2)
    for attempt, why in enumerate(("the disk is full", "the disk is full again"), 1):
        request = request.model_copy(update={"attempt": attempt})
        other.follow(request, images=images_of(pair, 1))
        with pytest.raises(SaveTimeoutError):
            other.wait(time.monotonic() + 0.5)
        log.append({request.key: Outcome("pending")})
        log.append({request.key: Outcome("failed", why)})
        (failure,) = other.wait(time.monotonic() + 30)
        assert failure.endswith(why)
    log.close()
    other.close()


def test_a_rank_leaves_a_save_that_rank_0_follows_to_it(pair: Job) -> None:
    request = request_of(pair)
    asked: list[tuple[str, str]] = []
    with (
        server({"/flow_runs/filter": flow_run(request, "RUNNING")}, asked=asked) as theirs,
        server({}) as url,
        rank_of(pair, 1, theirs) as other,
        leader(pair, url) as first,
    ):
        first.follow(request)
        await_that(first, lambda: '"pending"' in log_of(pair))
        other.begin_to_wait()
        with pytest.raises(SaveTimeoutError):
            first.wait(time.monotonic() + 2.5)  # the other rank would have asked by now
        pair.commit(4)
        told = other.told()
    assert (told["failures"], told["asked"]) == ([], False)
    assert asked == []


@pytest.mark.parametrize("value", [0, 1])
def test_a_rank_whose_image_comes_after_the_commit_compares_it(job: Job, value: int) -> None:
    job.stage(4, ZEROS)
    job.commit(4)
    job.stagers.pop(0).close()
    job.stage(4, {"model": {"w": torch.full((3,), float(value))}})
    late = images_of(job, 0)
    with (
        server({}) as url,
        rank_of(job, 1, url, late) as other,
        leader(job, url) as first,
    ):
        first.follow(request_of(job))  # with the images that were committed
        assert first.wait(time.monotonic() + 60) == []
        told = other.wait()
    assert not told["asked"]
    if value:
        assert "model of step 4, role actor, rank 0 is not saved" in told["failures"][0]
    else:
        assert told["failures"] == []
        assert job.spool.tickets() == ([], [])


def test_a_rank_whose_rank_0_was_killed_asks_the_server_itself(pair: Job) -> None:
    request = request_of(pair)
    answers = {"/flow_runs/filter": flow_run(request, "RUNNING")}
    with server(answers) as url, rank_of(pair, 1, url) as other:
        with rank_of(pair, 0, url) as first:
            first.begin_to_wait()
            while '"pending"' not in log_of(pair):
                assert first.process.poll() is None
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
        answers["/flow_runs/filter"] = flow_run(request, "FAILED")
        told = other.wait()
    assert told["asked"]
    assert "the disk is full" in told["failures"][0]


def test_a_rank_asks_itself_about_a_save_that_rank_0_never_submits(
    pair: Job,
) -> None:
    request, earlier = request_of(pair), request_of(pair, step=3)
    failed = {"/flow_runs/filter": flow_run(request, "FAILED")}
    running = {"/flow_runs/filter": flow_run(earlier, "RUNNING")}
    with server(failed) as url, server(running) as to_first, leader(pair, to_first) as first:
        first.follow(earlier)  # it lives, and could not stage step 4
        await_that(first, lambda: log_of(pair))
        other = CommitWatcher(
            SaveTrigger(Settings(spool=pair.spool.folder.parent), url),
            pair.spool,
            rank=1,
            world_size=2,
        )
        other.follow(request)
        with pytest.raises(SaveTimeoutError):
            other.wait(time.monotonic() + 1.5)
        other._pending[request.key].since -= UNANNOUNCED_S
        assert "the disk is full" in other.wait(time.monotonic() + 30)[0]
        other.close()


def test_a_rank_that_requests_a_flow_run_itself_asks_for_it_itself(pair: Job) -> None:
    request = request_of(pair)
    asked: list[tuple[str, str]] = []
    answers = {
        "/flow_runs/filter": flow_run(request, "FAILED"),
        "/deployments/name": (200, json.dumps({"id": str(uuid4())})),
        "/deployments": (201, json.dumps({"id": str(uuid4())})),
    }
    with server(answers, asked=asked) as url:
        trigger = SaveTrigger(Settings(spool=pair.spool.folder.parent), url)
        other = CommitWatcher(trigger, pair.spool, rank=1, world_size=2)
        other.follow(request, submit=True)
        while not any(path.endswith("create_flow_run") for path, _ in asked):
            time.sleep(0.01)
        assert "the disk is full" in other.wait(time.monotonic() + 30)[0]
        other.close()


def test_a_rank_that_never_waits_keeps_few_saves_and_no_thread(job: Job) -> None:
    with server({}) as url, leader(job, url) as first:
        trigger = SaveTrigger(Settings(spool=job.spool.folder.parent), "http://127.0.0.1:9/api")
        other = CommitWatcher(trigger, job.spool, rank=1, world_size=2)
        job.stage(4, ZEROS)
        job.commit(4)
        for number in range(MANY - 1):
            other.follow(request_of(job).model_copy(update={"run_key": f"key {number}"}))
        assert other._thread is None
        assert len(other._pending) == MANY - 1
        other.follow(request_of(job))
        while (thread := other._thread) or len(other._pending):
            if thread:
                thread.join()
        assert other.wait(time.monotonic()) == []
        assert len(other.commit_seconds) == MANY
        other.close()
        assert first.wait(time.monotonic()) == []


def test_rank_0_removes_what_it_said_in_earlier_runs(job: Job) -> None:
    for run in (1, 2, 12):
        log = OutcomeLog(request_of(job, run=run))
        log.append({"a save": Outcome("completed")})
        log.close()
    (job.root / ".trinity_sync/outcomes/other.jsonl").touch()
    OutcomeLog(request_of(job, run=11)).append({"a save": Outcome("completed")})
    left = job.root.glob(".trinity_sync/outcomes/*")
    assert sorted(path.name.partition("-")[0] for path in left) == ["other.jsonl", "run11", "run12"]


def test_what_cannot_be_removed_of_an_earlier_run_stops_no_rank_0(job: Job) -> None:
    folder = job.root / ".trinity_sync/outcomes"
    folder.mkdir(parents=True)
    (folder / "run1-other.jsonl").symlink_to("nowhere")  # as little opened as another user's file
    (folder / "run2-other.jsonl").mkdir()
    log, logs = OutcomeLog(request_of(job, run=3)), OutcomeLogs(request_of(job, run=3))
    log.append({"one": Outcome("failed")})
    logs.read()
    assert logs.outcome("one") == Outcome("failed")
    log.close()


def test_a_later_run_leaves_what_a_living_rank_0_of_an_earlier_one_says(job: Job) -> None:
    first, second = OutcomeLog(request_of(job)), OutcomeLog(request_of(job, run=2))
    first.append({"one": Outcome("failed")})
    second.append({"two": Outcome("completed")})
    logs = OutcomeLogs(request_of(job))
    logs.read()
    assert logs.outcome("one") == Outcome("failed")
    first.close()
    second.close()


def test_a_file_that_was_removed_is_begun_again(job: Job) -> None:
    log, logs = OutcomeLog(request_of(job)), OutcomeLogs(request_of(job))
    log.append({"one": Outcome("pending")})
    (path,) = job.root.glob(".trinity_sync/outcomes/*.jsonl")
    path.unlink()
    log.append({"two": Outcome("pending")})
    logs.read()
    assert not path.exists()
    assert logs.is_followed("two", 0)
    log.close()


def test_a_line_that_is_cut_off_is_passed_over(job: Job) -> None:
    request, logs = request_of(job), OutcomeLogs(request_of(job))
    log = OutcomeLog(request)
    log.append({"one": Outcome("failed", "why", "where")})
    (path,) = job.root.glob(".trinity_sync/outcomes/*.jsonl")
    with path.open("a") as file:
        file.write('{"key": "two", "state": "comp')
    logs.read()
    assert logs.outcome("one") == Outcome("failed", "why", "where")
    assert logs.outcome("two") is None
    with path.open("a") as file:
        file.write('leted"}\n{"key": "three", "state": "completed", "message": "", "url": ""}\n')
    logs.read()
    assert logs.outcome("two") is None  # it has not all that a line has
    assert logs.outcome("three") == Outcome("completed")
    assert logs.is_followed("three", 0)
    log.close()
    assert not logs.is_followed("three", 0)


def test_a_rank_0_that_cannot_write_lets_the_other_ranks_ask(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    log, logs = OutcomeLog(request_of(job)), OutcomeLogs(request_of(job))
    log.append({"one": Outcome("pending")})
    (path,) = job.root.glob(".trinity_sync/outcomes/*.jsonl")
    path.unlink()
    path.mkdir()
    log.append({"one": Outcome("failed")})
    assert "They query the Prefect server themselves" in caplog.text
    path.rmdir()
    log.append({"two": Outcome("pending")})
    logs.read()
    assert logs.is_followed("two", 0)
    log.close()


def test_a_rank_has_a_thread_only_while_it_waits(pair: Job, coordinator_of: Open) -> None:
    before = {each.name for each in threading.enumerate()}
    other = coordinator_of(rank=1, world_size=2)
    other.save(5, ZEROS)
    assert {each.name for each in threading.enumerate()} == before
