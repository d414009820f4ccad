"""A save that a stack does not begin is committed by the saver of its node, and only once."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from uuid import UUID

import pytest
import torch

from tests.support.answers import server, serving
from tests.support.command import invoke
from tests.support.driven_saver import Line
from tests.support.job import Job
from tests.support.savers import await_that, is_announced, savers_of
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator, SaveFailedError, Settings, saver
from trinity_sync.client import commit_watcher
from trinity_sync.client.prefect_api import PrefectApi
from trinity_sync.client.saver_control import (
    LOG,
    SERVED,
    SaverControl,
    name_saver,
    read_served,
    wake_path,
)
from trinity_sync.pipeline.pending import find_pending_saves
from trinity_sync.saver import FlowRunRequests, Saver, is_left_to_stack
from trinity_sync.saves.journal import append, read_entry
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot import slot_pool
from trinity_sync.snapshot.spool import WORKER, check_worker, try_run_lock
from trinity_sync.storage.commit import acquire_commit_lock
from trinity_sync.storage.discovery import read_latest_pointer, require_committed
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.restore import load_states

AWAY = "http://127.0.0.1:9/api"
RUN = UUID(int=7)
TAKEN = {"": (200, json.dumps({"id": str(RUN)}))}
PYTHON = sys.executable

FLOW_RUN = """
import sys, time
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.pipeline.save import commit_images, list_shares, persist_share
from trinity_sync.settings import StackSettings
from trinity_sync.storage.placement import await_node_shards

request = SaveRequest.model_validate_json(sys.argv[1])
(shards,) = await_node_shards(request.save, rank_timeout_s=60)
shares = list_shares(request, shards, commits=False)
persisted = [persist_share(request, share, shards, StackSettings()) for share in shares]
print("persisted", flush=True)
sys.stdin.readline()
commit_images(request, persisted, shards, StackSettings(), time.time(), time.time())
"""
"""What the tasks of a flow run do, which commits once it reads a line."""


@pytest.fixture
def known(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings of trainers whose stack takes flow runs, and begins none."""
    with server(TAKEN) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        yield settings.model_copy(update={"saver_after_s": 1.0})


@pytest.fixture
def saves(job: Job, known: Settings) -> Iterator[CheckpointCoordinator]:
    coordinator = CheckpointCoordinator(job.root, settings=known)
    yield coordinator
    coordinator.close(timeout=0)


@contextmanager
def flow_run(job: Job) -> "Iterator[subprocess.Popen[str]]":
    """A process that does what a flow run does, and has persisted the pending save."""
    (request,) = find_pending_saves(job.spool, grace_s=0)
    command = [PYTHON, "-c", FLOW_RUN, request.model_dump_json()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "persisted\n"
        yield process


def is_by_saver(root: Path, step: int) -> bool:
    (timing,) = require_committed(root, step).timings
    return timing.by_saver


def test_a_stack_that_begins_nothing_delays_no_commit_for_long(
    saves: CheckpointCoordinator, job: Job
) -> None:
    for step in (1, 2):
        saves.save(step, {"model": {"w": torch.full((9,), float(step))}}).wait(250)
        assert is_by_saver(job.root, step)
    assert load_states(job.root, 2, "actor")["model"]["w"].tolist() == [2.0] * 9


@pytest.mark.parametrize(
    "answers", [None, {}, {"": (500, "{}")}, {"/deployments/name": TAKEN[""], "": (422, "{}")}]
)
def test_a_stack_that_takes_no_save_delays_no_commit(
    job: Job,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[str, tuple[int, str]] | None,
) -> None:
    patient = settings.model_copy(update={"saver_after_s": 600.0})
    with nullcontext(AWAY) if answers is None else server(answers) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        with CheckpointCoordinator(job.root, settings=patient) as saves:
            for step in (1, 2):  # the second waits for the request of the first
                saves.save(step, {"model": {"w": torch.ones(9)}})
            saves.wait_all(250)
            assert is_by_saver(job.root, 2)


@pytest.mark.parametrize(("server", "told"), [("", "alone"), (AWAY, 0.0)])
def test_a_saver_in_a_hurry_requests_flow_runs_and_one_alone_does_not(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch, server: str, told: object
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", server)
    trigger, name = Line(settings), job.spool.folder.name
    trigger.ensure_saver(name)
    trigger.hurry(name, 0.0)
    assert read_served(job.spool.folder, name_saver()) == told


def test_a_save_that_waits_for_a_slot_and_a_start_that_waits_for_a_save_have_the_saver_commit(
    job: Job, known: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_pool, "LONG_WAIT_S", 0.2)
    monkeypatch.setattr(commit_watcher, "HURRY_S", 0.2)
    patient = known.model_copy(update={"saver_after_s": 600.0, "slots": 1})
    saves = CheckpointCoordinator(job.root, settings=patient)
    for step in (1, 2):
        saves.save(step, {"model": {"w": torch.full((9,), float(step))}})
    assert is_by_saver(job.root, 1)
    assert find_pending_saves(saves.spool, grace_s=0)
    saves.close(timeout=0)
    again = CheckpointCoordinator(job.root, settings=patient)
    assert again.latest_step() == 2
    again.close(timeout=0)


@pytest.fixture
def trainer(job: Job, known: Settings) -> Iterator[SaverControl]:
    """A trainer that has done nothing since it submitted step 1, which waits for its stack long."""
    job.stage(1, {"model": {"w": torch.ones(9)}})
    control = SaverControl(known.spool, known.home)
    control.serve(job.spool.folder.name, 600.0)
    control.connect()
    yield control
    control.close()


def leave_to_saver(job: Job, step: int) -> None:
    append(job.request(step), "left", "Ray is gone", start=1)
    await_that(lambda: read_latest_pointer(job.root, "checkpoint") == step, "its commit")


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "commits nothing"])
def test_what_the_stack_leaves_to_its_saver_ends_although_its_trainer_hangs(
    job: Job, trainer: SaverControl, commits: bool
) -> None:
    assert read_latest_pointer(job.root, "checkpoint") is None
    if commits:
        leave_to_saver(job, 1)
        assert is_by_saver(job.root, 1)
    else:
        trainer.serve(job.spool.folder.name, math.inf)
        append(job.request(1), "left", "Ray is gone", start=1)
        await_that(lambda: all(each.failed for each in job.spool.tickets()[0]), "its mark")
    entry = read_entry(job.request(1))
    told = entry.message, entry.takes_over, entry.has_failed
    assert told == ("Ray is gone", True, not commits)


@pytest.mark.parametrize("ends", ["the node", "the last trainer", "the worker", "its answers"])
def test_a_save_waits_for_no_stack_at_the_end_of_what_it_would_wait_for(
    job: Job, known: Settings, request: pytest.FixtureRequest, ends: str
) -> None:
    with ExitStack() as worker:
        if ends != "the last trainer":
            worker.enter_context(try_run_lock(known.spool, WORKER))
        trainer: SaverControl = request.getfixturevalue("trainer")
        leave_to_saver(job, 1)  # so the saver has seen trainer and worker
        job.stage(2, {"model": {"w": torch.ones(9)}})
        if ends == "the last trainer":
            trainer.close()
        elif ends == "the worker":
            worker.close()
        elif ends == "its answers":
            os.utime(known.spool / ".runs.lock", (0, 0))
        else:
            (saver,) = savers_of(known.spool)
            saver.terminate()
        await_that(lambda: read_latest_pointer(job.root, "checkpoint") == 2, "its commit")
    assert is_by_saver(job.root, 2)


@pytest.mark.parametrize("worker_lives", [True, False])
def test_a_save_of_the_last_trainer_is_left_to_a_worker_that_lives(
    job: Job, known: Settings, worker_lives: bool
) -> None:
    job.stage(1, {"model": {"w": torch.ones(9)}})
    (job.spool.folder / SERVED).write_text(f"600 {name_saver()}")
    saver, wake = Saver(known.spool, StackSettings()), wake_path(known.spool, name_saver())
    os.mkfifo(wake)
    with ExitStack() as ending:
        pipe = os.open(wake, os.O_RDONLY | os.O_NONBLOCK)
        ending.callback(os.close, pipe)
        trainer = os.open(wake, os.O_WRONLY)
        os.write(trainer, b"\n")
        os.close(trainer)
        saver._pause(pipe)
        if worker_lives:
            ending.enter_context(try_run_lock(known.spool, WORKER))
        saver._look()
        for thread in [*saver._looks.values(), *saver._saves.values()]:
            thread.join()
    assert read_latest_pointer(job.root, "checkpoint") == (None if worker_lives else 1)


def test_a_look_for_a_worker_needs_no_room_in_shared_memory(tmp_path: Path) -> None:
    assert check_worker(tmp_path) is None
    assert [*tmp_path.iterdir()] == []
    with try_run_lock(tmp_path, WORKER):
        assert check_worker(tmp_path)
        for jump_s in (-3600, 3600):  # of the clock; the worker's next touch mends it
            os.utime(tmp_path / ".runs.lock", (time.time() + jump_s,) * 2)
            assert check_worker(tmp_path) is False
    assert check_worker(tmp_path) is None


def test_the_flow_run_of_a_save_that_the_saver_has_committed_is_requested_nevertheless(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = threading.Event()

    def answer(request: BaseHTTPRequestHandler, _: str) -> tuple[int, str]:
        if request.path.endswith("/create_flow_run"):
            if read_latest_pointer(job.root, "checkpoint") is None:
                return 500, "{}"
            requested.set()
        return 201, json.dumps({"id": str(RUN)})

    with serving(answer) as url:
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        hasty = settings.model_copy(update={"saver_after_s": 0.2})
        with CheckpointCoordinator(job.root, settings=hasty) as saves:
            saves.save(1, {"model": {"w": torch.ones(3)}}).wait(250)
            assert requested.wait(250)


def test_a_flow_run_that_is_gone_is_requested_again_while_its_save_waits(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    save = job.request(1)

    def count_requests() -> int:
        requests.want(job.spool.folder, [save])
        return sum(save.key in body for _, body in asked)

    with server({"": (201, json.dumps({"id": str(RUN)}))}, asked=asked) as url:
        requests = FlowRunRequests(PrefectApi(settings, url), lambda: None)
        until(count_requests, "the first request")
        until(lambda: not requests._untaken, "its answer")
        assert count_requests() == 1  # the run waits, too
        assert not requests._untaken
        monkeypatch.setattr(saver, "REQUEST_S", 0.0)
        until(lambda: count_requests() > 1, "another request")
    waits = FlowRunRequests(PrefectApi(settings, url), lambda: None)
    waits._runs = True  # its thread waits for a server that is away
    for _ in range(2):
        waits.want(job.spool.folder, [save])
    assert waits._wanted.qsize() == 1


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_save_whose_flow_run_a_user_has_set_to_completed_waits_for_its_commit(
    job: Job, settings: Settings, has_begun: bool
) -> None:
    """By what has begun it, otherwise by the saver, at once."""
    job.stage(1, {"model": {"w": torch.ones(3)}})
    state = {"type": "COMPLETED", "timestamp": "2026-01-01T00:00:00Z"}
    with server({"": (201, json.dumps({"id": str(RUN), "state": state}))}) as url:
        requests = FlowRunRequests(PrefectApi(settings, url), lambda: None)
        told = append(job.request(1), "begun", start=1) if has_begun else None
        requests.want(job.spool.folder, [job.request(1)])
        until(lambda: not requests._untaken, "its answer")
    known = read_entry(job.request(1))
    assert known == told if has_begun else known.is_left
    assert [each.step for each in find_pending_saves(job.spool, grace_s=0)] == [1]


def test_a_failed_save_whose_flow_run_is_gone_is_retried_by_the_saver(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = settings.model_copy(update={"saver_after_s": 0.2})
    command = partial(invoke, env=settings.to_variables())
    write_job_settings(job.root, {"on_nonfinite": "refuse"})
    with server({"/flow_runs/filter": (200, "[]"), **TAKEN}) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        with CheckpointCoordinator(job.root, settings=hasty) as saves:
            saves.save(1, {"model": {"w": torch.tensor(math.nan)}})
            with pytest.raises(SaveFailedError):
                saves.wait_all(250)
            ((image,), _) = job.spool.tickets()
            request = SaveRequest(**vars(image.ticket.save))
            append(request, "failed", "as its worker tells", url=f"{url}/{RUN}", start=1)
            write_job_settings(job.root, {"on_nonfinite": "warn"})
            retried = command("retry", job.root, 1)
            assert retried.exit_code == 0, retried.output
            assert command("wait", job.root, 1).exit_code == 0


@pytest.mark.parametrize("it_began", ["before the saver", "after the saver"])
def test_a_failure_of_the_saver_is_told_in_the_place_of_a_flow_run_whose_worker_has_died(
    job: Job, known: Settings, it_began: str
) -> None:
    how = {"job": {"rank_timeout_s": 1.0}, "roles": ("actor", "critic")}
    with CheckpointCoordinator(job.root, settings=known, **how) as saves:  # type: ignore[arg-type]
        saves.save(4, {"model": {"w": torch.ones(3)}}, role="actor")
        (request,) = find_pending_saves(saves.spool, grace_s=0)
        if it_began == "after the saver":
            await_that(lambda: is_announced(job, 4), "the saver has begun")
        append(request, "begun", start=1)
        with pytest.raises(SaveFailedError, match="role critic has submitted nothing"):
            saves.wait_all(250)
        append(request, "failed", "its process died", start=1)
        entry = read_entry(request)  # as the other ranks do
        assert (entry.state, "role critic" in entry.message) == ("failed", True)


def test_a_saver_that_cannot_be_started_leaves_the_saves_to_the_stack(
    saves: CheckpointCoordinator,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    saves.save(1, {"model": {"w": torch.ones(3)}})
    assert "Saves that the stack does not begin wait for it: the saver cannot" in caplog.text
    with flow_run(job) as process:
        process.communicate("\n")
    saves.wait_all(250)
    assert not is_by_saver(job.root, 1)


@pytest.mark.parametrize("then", ["goes on", "dies"])
def test_a_flow_run_that_stops_in_mid_save_is_overtaken(
    saves: CheckpointCoordinator, job: Job, then: str
) -> None:
    saves.save(1, {"model": {"w": torch.ones(3)}, "optim": {"a": 1}})
    (saver,) = savers_of(saves.settings.spool)
    saver.suspend()
    with flow_run(job) as process:
        saver.resume()
        if then == "dies":
            process.send_signal(signal.SIGKILL)
        saves.wait_all(250)
        assert is_by_saver(job.root, 1)
        before = require_committed(job.root, 1)
        if then == "goes on":
            process.communicate("\n")
            assert process.returncode == 0
    assert require_committed(job.root, 1) == before
    assert not [*job.root.rglob("*.tmp")]


def test_a_flow_run_and_the_saver_that_commit_at_once_do_no_harm(
    saves: CheckpointCoordinator, job: Job, known: Settings
) -> None:
    saves.save(1, {"model": {"w": torch.ones(3)}, "optim": {"a": 1}})
    with ExitStack() as ending, acquire_commit_lock(job.root):
        step = job.root / "global_step_1"
        await_that(lambda: len([*step.rglob("*.tmp")]) == 2, "the saver has written both files")
        process = ending.enter_context(flow_run(job))
        assert len([*step.rglob("*.tmp")]) == 4
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.returncode == 0
    saves.wait_all(250)
    await_that(lambda: "save actor step 1" in (known.home / LOG).read_text(), "the saver ends it")
    assert "has failed" not in (known.home / LOG).read_text()
    assert load_states(job.root, 1, "actor")["optim"] == {"a": 1}
    assert not [*job.root.rglob("*.tmp")]


def test_what_a_flow_run_writes_is_left_to_it(
    saves: CheckpointCoordinator, job: Job, known: Settings
) -> None:
    saves.save(1, {"model": {"w": torch.ones(3)}})
    (saver,) = savers_of(known.spool)
    saver.suspend()
    with flow_run(job) as process:
        saver.resume()
        slow = job.root / "global_step_1/actor/.of a slower rank.tmp"
        (image,) = job.spool.tickets()[0]
        now = job.root / ".trinity_sync/.now"
        looks = set[int]()

        def has_looked() -> bool:  # its looks at what is due ask for the root's time
            looks.add(now.stat().st_mtime_ns if now.exists() else 0)
            slow.touch()
            return len(looks) > 3 and image.ticket.sealed_at < now.stat().st_mtime - 3

        await_that(has_looked, "the saver looks several times")
        assert saver.is_running()
        slow.unlink()
        process.communicate("\n")
    saves.wait_all(250)
    assert not is_by_saver(job.root, 1)


def test_a_save_whose_function_runs_is_left_to_the_stack(
    saves: CheckpointCoordinator, job: Job
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        assert goes_on.wait(250)

    saves.save_async("other", write, 3)
    assert begun.wait(250)
    asyncio.run(saves.register_and_monitor(3, checkpoint_thread_count=1))
    (request,) = find_pending_saves(job.spool, grace_s=0)
    assert is_left_to_stack(job.spool, request, 0)
    goes_on.set()
    await_that(lambda: not is_left_to_stack(job.spool, request, 0), "the function has ended")
    assert is_left_to_stack(job.spool, request, 3600)
    saves.wait_all(250)
    assert is_by_saver(job.root, 3)
