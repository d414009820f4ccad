"""Which run a process takes part in: what it is told of a root that is not new."""

import pytest
import torch

from tests.unit.job import Job
from trinity_sync.beginning import OwnRun


def test_a_run_that_begins_anew_where_steps_are_is_told_once(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    assert OwnRun(job.root, "first").begun().number == 1
    job.stage(10, {"model": {"w": torch.ones(3)}})
    job.commit(10)
    assert caplog.text == ""
    assert OwnRun(job.root, "first").begun().number == 1  # another rank
    loaded = OwnRun(job.root, "second")
    loaded.begin_at(10)
    assert loaded.begun().number == 2
    assert caplog.text == ""
    forgot = OwnRun(job.root, "third")
    assert forgot.begun().number == forgot.begun().number == 3
    assert caplog.text.count("RUN 3 BEGINS AT STEP 0") == 1
    assert "load step 10 first" in caplog.text
