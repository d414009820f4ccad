"""Whoever waits for a save hears of its end, whatever the file system does meanwhile."""

import logging
import time

import pytest
import torch

from tests.unit.job import Job
from trinity_sync.errors import SaveTimeout
from trinity_sync.orchestration.trigger import SaveTrigger
from trinity_sync.orchestration.watch import SaveWatch
from trinity_sync.request import SaveRequest
from trinity_sync.settings import Settings


def test_an_error_of_the_file_system_ends_no_watch(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.stage(4, {"model": {"w": torch.zeros(3)}})
    job.commit(4)
    pointer = job.root / "latest_checkpointed_iteration.txt"
    pointer.rename(job.root / "aside")
    pointer.mkdir()  # to read it is an OSError that is no FileNotFoundError
    watch = SaveWatch(SaveTrigger(Settings(), "http://127.0.0.1:9/api"))
    request = SaveRequest(root=str(job.root), step=4, run=1)
    with caplog.at_level(logging.WARNING):
        watch.add(request)
        with pytest.raises(SaveTimeout, match="step4"):
            watch.wait(time.monotonic() + 0.5)
        pointer.rmdir()
        (job.root / "aside").rename(pointer)
        assert watch.wait(time.monotonic() + 30) == []
    watch.close()
    assert len([each for each in caplog.records if "cannot be followed" in each.message]) == 1


def test_who_waits_for_long_is_told_once_what_for(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.orchestration.watch.SAY_S", 0.1)
    job.stage(4, {"model": {"w": torch.zeros(3)}})
    watch = SaveWatch(SaveTrigger(Settings(), "http://127.0.0.1:9/api"))
    watch.add(SaveRequest(root=str(job.root), step=4, run=1))
    with caplog.at_level(logging.WARNING), pytest.raises(SaveTimeout):
        watch.wait(time.monotonic() + 0.5)
    watch.close()
    (said,) = [each.message for each in caplog.records if "still waiting" in each.message]
    assert "save actor step 4" in said
