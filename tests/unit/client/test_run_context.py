"""Which run a process takes part in: what it is told of a root that is not new."""

import shutil

import pytest
import torch

from tests.support.job import Job
from tests.support.steps import save_foreign_step
from trinity_sync.client.run_context import RunContext
from trinity_sync.errors import CommitError
from trinity_sync.layout import PRIVATE_FOLDER
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import RootSteps, plan_prune, prune
from trinity_sync.retention.removal import Rules, describe_steps
from trinity_sync.storage.discovery import find_newest


def test_a_run_that_loads_nothing_where_steps_are_is_told_once(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    assert RunContext(job.root, "first").get().number == 1
    job.commit_states(10, {"model": {"w": torch.ones(3)}})
    assert caplog.text == ""
    assert RunContext(job.root, "first").get().number == 1  # another rank
    loaded = RunContext(job.root, "second")
    loaded.begin_at(10)
    assert loaded.get().number == 2
    assert caplog.text == ""
    forgot = RunContext(job.root, "third")
    assert forgot.get().number == forgot.get().number == 3
    assert caplog.text.count("Run 3 begins at step 0") == 1
    assert "load step 10 first" in caplog.text


def test_a_link_to_no_file_at_the_name_of_the_next_run_is_told(job: Job) -> None:
    assert RunContext(job.root, "first").get().number == 1
    (job.root / PRIVATE_FOLDER / "runs/2.json").symlink_to("nowhere")
    with pytest.raises(CommitError, match=r"2\.json is torn or edited"):
        RunContext(job.root, "second").get()


def commit_in_run(job: Job, run: int, key: str, step: int, resumed_from: int | None = None) -> None:
    context = RunContext(job.root, key)
    if resumed_from is not None:
        context.begin_at(resumed_from)
    assert context.get().number == run
    job.commit_states(step, {"model": {"w": torch.full((3,), float(step))}}, run=run)


@pytest.mark.parametrize("loads", [30, 10, None])
def test_a_run_comes_after_those_of_the_steps_that_were_copied_into_its_root(
    job: Job, loads: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """By a copy of the steps' folders alone: without the private folder, which names the runs."""
    commit_in_run(job, 1, "first", 10)
    commit_in_run(job, 2, "second", 20, 10)
    commit_in_run(job, 3, "third", 30, 20)
    shutil.rmtree(job.root / PRIVATE_FOLDER / "runs")
    commit_in_run(job, 4, "in the copy", 40, loads)
    newest = find_newest(job.root)
    assert newest is not None
    assert newest.step == 40
    assert ("begins at step 0" in caplog.text) == (loads is None)


def test_a_run_that_begins_where_another_system_has_saved_is_told(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (20, 40):
        save_foreign_step(job.root, step)
    loaded = RunContext(job.root, "first")
    loaded.begin_at(40)
    assert loaded.get().number == 1
    assert caplog.text == ""
    assert RunContext(job.root, "second").get().number == 2
    assert "steps of another system; the newest is 40" in caplog.text


def test_a_run_that_a_process_with_nothing_to_load_began_first_supersedes_no_steps(
    job: Job,
) -> None:
    for number, loaded in ((1, 0), (2, 3), (3, 6)):
        early, late = (RunContext(job.root, f"run {number}") for _ in range(2))
        assert early.get().resumed_from == 0
        if loaded:
            late.begin_at(loaded)
            RunContext(job.root, f"run {number}").begin_at(loaded)
        for step in range(loaded + 1, loaded + 4):
            job.commit_states(step, {"model": {"w": torch.ones(3)}}, run=number)
        prune(
            job.root, plan_prune(job.root, Rules(parse_policy("last=2"), parse_policy("last=1")), 0)
        )
    assert [(each.step, each.run) for each in describe_steps(RootSteps(job.root))] == [
        (8, 3),
        (9, 3),
    ]
