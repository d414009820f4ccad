"""A run that begins next to a living one is noticed at once, and a call that reads begins none."""

import os
import shutil
import signal
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.forked import Program
from tests.support.job import Job
from tests.support.waiting import until
from tests.unit.conftest import Open
from trinity_sync import CheckpointCoordinator, Checkpoints
from trinity_sync.client import commit_watcher
from trinity_sync.errors import MissingShardsError, RootInUseError, SupersededError
from trinity_sync.layout import steps_on_disk
from trinity_sync.retention.policies import ALL, parse_policy
from trinity_sync.retention.prune import RootSteps, plan_prune, prune
from trinity_sync.retention.removal import Rules, describe_steps
from trinity_sync.storage import runs
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import await_node_shards
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import list_runs

MODEL = {"model": {"w": torch.ones(3)}}

TRAINING = textwrap.dedent(
    """
    import sys, torch
    from trinity_sync import CheckpointCoordinator, Settings
    from trinity_sync.errors import TrinitySyncError
    from trinity_sync.storage import runs as living_run

    root, spool, key, wait_s, take_over = sys.argv[1:]
    living_run.WAIT_S = float(wait_s)
    settings = Settings(spool=spool, home=spool)
    saves = CheckpointCoordinator(
        root, run_key=key, settings=settings, take_over=bool(int(take_over))
    )
    children = []
    for line in sys.stdin:
        try:
            exec(line)
        except TrinitySyncError as error:
            print(type(error).__name__, error, flush=True)
        else:
            print("done", flush=True)
    """
)


class Training:
    """A training in a process of its own, which executes lines of Python."""

    def __init__(self, process: Program) -> None:
        self.process = process

    def begin(self, line: str) -> None:
        print(line, file=self.process.stdin, flush=True)

    def end(self) -> str:
        return self.process.stdout.readline().strip()

    def do(self, line: str) -> str:
        self.begin(line)
        return self.end()

    def save(self, step: int) -> str:
        return self.do(f"saves.save({step}, {{'model': {{'w': torch.ones(3)}}}})")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Training]


@pytest.fixture
def start(job: Job, spool_folder: Path) -> Iterator[Start]:
    """Starts trainings of the job; an impatient one does not wait for a living one to end."""
    started: list[Training] = []

    def begin(key: str, *, wait_s: float = 0.0, take_over: bool = False) -> Training:
        given = (job.root, spool_folder, key, wait_s, int(take_over))
        process = Program(TRAINING, *given, talks=True)
        started.append(Training(process))
        return started[-1]

    yield begin
    for each in started:
        each.process.clear()


def numbers(job: Job) -> list[tuple[int, int]]:
    return sorted((run.number, run.resumed_from) for run in list_runs(job.root))


BEGINNINGS = (
    "saves.load(30)",
    "saves.resumed_from(30)",
    "saves.save(40, {'model': {'w': torch.ones(3)}})",
    "saves.upload(40, lambda: {'w': torch.ones(3)})",
    "saves.save_sync(lambda: None, 40)",
    "saves.begin()",
)
"""Calls that begin a run."""


def test_a_second_start_is_refused_while_the_first_one_lives(
    job: Job, start: Start, coordinator_of: Open
) -> None:
    first = coordinator_of(run_key="first")
    first.save(30, MODEL)
    job.commit(30)
    second = start("second")
    for call in BEGINNINGS:
        said = second.do(call)
        assert said.startswith("RootInUseError run 1 of"), call
        assert f"process {os.getpid()} (" in said
        assert "take_over=True" in said
    assert numbers(job) == [(1, 0)]
    first.save(60, MODEL)
    job.commit(60)


@pytest.mark.parametrize("end", ["saves.close(0)", "del saves", "sys.exit()", "SIGKILL"])
def test_a_start_after_the_end_of_the_first_one_is_not_refused(
    job: Job, start: Start, end: str
) -> None:
    first, second = start("first"), start("second")
    assert first.save(30) == "done"
    job.commit(30)
    assert second.do("saves.load(30)").startswith("RootInUseError")
    if end == "SIGKILL":
        first.kill()
    elif end == "sys.exit()":
        first.begin(end)
        first.process.wait()
    else:
        assert first.do(end) == "done"
    assert second.do("saves.load(30)") == "done"
    assert numbers(job) == [(1, 0), (2, 30)]


def test_a_start_waits_for_the_first_one_to_end_and_says_for_which_process(
    job: Job, start: Start
) -> None:
    first, second = start("first"), start("second", wait_s=300)
    assert first.save(30) == "done"
    job.commit(30)
    second.begin("saves.load(30)")
    while "Waiting up to" not in (said := second.process.stderr.readline()):
        assert said
    assert f"run 1 of {job.root} is still running: process {first.process.pid} (" in said
    assert numbers(job) == [(1, 0)]
    first.kill()
    assert second.end() == "done"
    assert numbers(job) == [(1, 0), (2, 30)]


def test_a_forked_child_does_not_keep_the_run_of_a_killed_training_alive(start: Start) -> None:
    first, second = start("first"), start("second")
    assert first.save(30) == "done"
    assert first.do("import os, signal; has_forked, forked = os.pipe()") == "done"
    child = "os.fork() or (os.write(forked, b'.'), signal.pause())"
    assert first.do(f"children.append({child}); os.read(has_forked, 1)") == "done"
    child = int(first.do("print(children[0], end=' ')").split()[0])
    first.kill()
    try:
        assert second.do("saves.begin()") == "done"
    finally:
        os.kill(child, signal.SIGKILL)


def test_of_starts_at_the_same_time_one_begins(job: Job, start: Start) -> None:
    trainings = [start(f"training {number}") for number in range(4)]
    assert all(each.do("pass") == "done" for each in trainings)
    for each in trainings:
        each.begin("saves.begin()")
    said = [each.end() for each in trainings]
    assert said.count("done") == 1
    assert sum(each.startswith("RootInUseError") for each in said) == 3
    assert numbers(job) == [(1, 0)]


def test_a_rewind_next_to_a_living_training_does_not_hide_it(job: Job, start: Start) -> None:
    first = start("first")
    for step in (30, 60):
        assert first.save(step) == "done"
        job.commit(step)
    rewind(job.root, 30)
    assert start("second").do("saves.load(30)").startswith("RootInUseError run 1 ")
    first.kill()


def test_a_training_that_is_taken_over_is_told_at_once_and_its_next_save_is_refused(
    job: Job,
    start: Start,
    coordinator_of: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(commit_watcher, "WATCH_S", 0.05)
    first = coordinator_of(run_key="first")
    first.save(30, MODEL)
    job.commit(30)
    second = start("second", take_over=True)
    assert second.do("saves.load(30)") == "done"
    until(lambda: "is superseded: run 2 has begun at step 30" in caplog.text, "the error")
    assert f"(process {second.process.pid} (" in caplog.text
    with pytest.raises(SupersededError, match=r"step 60 of run 1 .* run 2 resumed from step 30"):
        first.save(60, MODEL)
    with pytest.raises(SupersededError):
        first.upload(60, lambda: MODEL["model"])
    with pytest.raises(SupersededError):
        first.save_sync(lambda: None, 60)
    assert caplog.text.count("is superseded: run 2") == 1
    assert second.save(60) == "done"
    job.commit(60, run=2)


def test_the_setting_takes_over_where_a_switch_makes_the_coordinator(
    job: Job, start: Start, spool_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start("first").do("saves.begin()") == "done"
    monkeypatch.setattr(runs, "WAIT_S", 0.0)
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(spool_folder))
    with CheckpointCoordinator(job.root) as saves, pytest.raises(RootInUseError, match="run 1 of"):
        saves.begin()
    monkeypatch.setenv("TRINITY_SYNC_TAKE_OVER", "1")
    with CheckpointCoordinator(job.root) as saves:
        assert saves.begin() == 2


ASKING: dict[str, Callable[[CheckpointCoordinator], object]] = {
    "run": lambda saves: saves.run,
    "latest_step": lambda saves: saves.latest_step(settle_s=0.1),
    "check_resume": lambda saves: saves.check_resume(30),
    "attachment": lambda saves: saves.attachment(30, "position"),
    "attach": lambda saves: saves.attach("position", b"7", step=40),
    "prewarm": lambda saves: saves.prewarm({"model": 9}),
    "record_metrics": lambda saves: saves.record_metrics(30, {"reward": 0.9}),
    "wait_staged": lambda saves: saves.wait_staged(),
    "wait_all": lambda saves: saves.wait_all(),
    "commit_seconds": lambda saves: saves.commit_seconds,
}


@pytest.mark.parametrize("call", ASKING)
def test_a_call_that_asks_or_annotates_begins_no_run(
    job: Job, coordinator_of: Open, call: str
) -> None:
    training = coordinator_of(run_key="first")
    training.attach("position", b"7", step=30)
    training.save(30, MODEL)
    job.commit(30, "model", "attachments")
    evaluation = coordinator_of(run_key="second")
    ASKING[call](evaluation)
    evaluation.close()
    assert numbers(job) == [(1, 0)]
    training.save(60, MODEL)
    job.commit(60)


def test_metrics_that_another_process_records_count_for_the_run_of_their_step(
    job: Job, coordinator_of: Open
) -> None:
    coordinator_of(run_key="first").save(30, MODEL)
    driver = coordinator_of(run_key="first")  # of the same start; it saves nothing itself
    driver.record_metrics(30, {"reward": 0.9})
    driver.close()
    job.commit(30)
    Checkpoints(job.root).record_metrics(30, {"length": 7})
    assert read_metrics(job.root, 1, 30) == {"reward": 0.9, "length": 7}


def test_metrics_of_a_resumed_training_count_for_the_run_that_makes_the_step(
    job: Job, coordinator_of: Open
) -> None:
    first = coordinator_of(run_key="first")
    for step in (30, 60):
        first.save(step, MODEL)
        job.commit(step)
    second = coordinator_of(run_key="second")
    second.load(30)
    second.record_metrics(30, {"reward": 0.3})
    second.record_metrics(60, {"reward": 0.6})
    second.close(timeout=0)
    assert read_metrics(job.root, 1, 30) == {"reward": 0.3}
    assert read_metrics(job.root, 2, 60) == {"reward": 0.6}


@pytest.mark.parametrize(
    "begin",
    [
        lambda saves: saves.save(10, MODEL),
        lambda saves: saves.upload(10, lambda: MODEL["model"]),
        lambda saves: saves.save_sync(lambda: None, 20),
    ],
    ids=["save", "upload", "save_sync"],
)
def test_metrics_that_a_training_records_before_its_first_save_count_for_its_run(
    job: Job, coordinator_of: Open, begin: Callable[[CheckpointCoordinator], object]
) -> None:
    first = coordinator_of(run_key="first")
    first.record_metrics(10, {"reward": 0.1})
    first.save(10, MODEL)
    job.commit(10)
    second = coordinator_of(run_key="second")
    second.record_metrics(10, {"reward": 0.2})  # it loads nothing
    begin(second)
    until(lambda: read_metrics(job.root, 2, 10) == {"reward": 0.2}, "what was recorded early")
    assert read_metrics(job.root, 1, 10) == {"reward": 0.1}


@pytest.mark.parametrize("begins", [True, False])
def test_a_start_that_commits_nothing_leaves_the_metrics_of_the_committed_steps(
    job: Job, coordinator_of: Open, begins: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = coordinator_of(run_key="first")
    for step, reward in ((10, 0.2), (20, 0.9), (30, 0.3)):
        first.record_metrics(step, {"reward": reward})
        first.save(step, MODEL)
        job.commit(step)
    first.close(timeout=0)
    forgetful = coordinator_of(run_key="second")
    if begins:
        forgetful.begin()
    forgetful.record_metrics(20, {"reward": 0.1})
    forgetful.close(timeout=0)
    assert ("metrics of steps [20] are not recorded" in caplog.text) is not begins
    resumed = coordinator_of(run_key="third")
    resumed.load(30)
    resumed.record_metrics(40, {"reward": 0.4})
    resumed.save(40, MODEL)
    job.commit(40, run=numbers(job)[-1][0])
    resumed.close(timeout=0)
    rules = Rules(parse_policy("last=1,best=1:reward:max"), ALL)
    prune(job.root, plan_prune(job.root, rules, now=0))
    assert steps_on_disk(job.root) == [20, 40]
    # also once the step that it resumed from is gone, the training continues the first run
    assert [each.superseded_by for each in describe_steps(RootSteps(job.root))] == [0, 0]


def test_nothing_is_awaited_of_a_run_whose_processes_have_ended(
    job: Job, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "ENDED_S", 0.01)  # no first look tells of an end
    training = start("first")
    training.do("saves.begin()")
    save = job.save(4)
    with pytest.raises(MissingShardsError, match="within 0 s"):
        await_node_shards(save, rank_timeout_s=0.0)
    training.do("saves.save(4, {'model': {'w': torch.ones(3)}})")
    (shards,) = await_node_shards(save, rank_timeout_s=0.0)
    of_two = replace(shards, ranks={"actor": (0, 1)})
    with pytest.raises(MissingShardsError, match=r"rank 1 was not submitted .* within 0 s"):
        persist(of_two, save, "model", WriteOptions(rank_timeout_s=0.0))
    training.kill()
    with pytest.raises(MissingShardsError, match=r"rank 1 was not .* before its run ended"):
        persist(of_two, save, "model", WriteOptions(rank_timeout_s=600.0))
    with pytest.raises(MissingShardsError, match=r"role critic .* until its end"):
        await_node_shards(replace(save, roles=("actor", "critic")), rank_timeout_s=600.0)


def test_processes_with_one_key_that_live_at_one_time_are_one_start_and_later_ones_another(
    job: Job, start: Start
) -> None:
    first, other = start("constant"), start("constant")
    assert {each.do("saves.begin()") for each in (first, other)} == {"done"}
    first.save(4)  # and is not committed
    first.kill()
    assert start("another").do("saves.begin()").startswith("RootInUseError")
    beside = start("constant")
    assert beside.do("saves.begin()") == "done"
    assert [run.number for run in list_runs(job.root)] == [1]
    for each in (other, beside):
        each.kill()
    assert start("constant").do("saves.begin()") == "done"
    assert len({run.key for run in list_runs(job.root)}) == 2


def test_a_key_of_an_earlier_start_brings_no_state_of_it(job: Job, start: Start) -> None:
    first = start("constant")
    first.save(4)
    first.kill()
    shutil.rmtree(job.root / "global_step_4", ignore_errors=True)  # rm -rf ckpts/*
    assert start("constant").do("saves.save(4, {'model': {'w': torch.zeros(3)}})") == "done"
    earlier, later = sorted(list_runs(job.root), key=lambda run: run.number)
    assert earlier.key != later.key
    with pytest.raises(SupersededError, match="run 2 resumed from step 0"):
        job.commit(4, run=1)
    job.commit(4, run=2)
    assert load_states(job.root, 4, "actor")["model"]["w"].tolist() == [0, 0, 0]
