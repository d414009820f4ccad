"""Which run a process takes part in: what it is told of a root that is not new."""

import pytest
import torch

from tests.support.job import Job
from tests.support.steps import save_foreign_step
from trinity_sync.client.run_context import RunContext
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import RootSteps, plan_prune, prune
from trinity_sync.retention.removal import Rules, describe_steps


def test_a_run_that_loads_nothing_where_steps_are_is_told_once(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    assert RunContext(job.root, "first").get().number == 1
    job.stage(10, {"model": {"w": torch.ones(3)}})
    job.commit(10)
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
            job.stage(step, {"model": {"w": torch.ones(3)}}, run=number)
            job.commit(step, run=number)
        prune(
            job.root,
            plan_prune(job.root, Rules(parse_policy("last=2"), parse_policy("last=1")), 0),
        )
    assert [(each.step, each.run) for each in describe_steps(RootSteps(job.root))] == [
        (8, 3),
        (9, 3),
    ]
