"""A time limit ends a training as a signal does."""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from tests.integration.fsdp.commits import CommitsHere
from tests.support.forked import Program
from tests.support.job import Job
from tests.unit.conftest import Open
from trinity_sync import ConfigError, Settings
from trinity_sync.client.preemption import Preemption
from trinity_sync.storage.discovery import read_latest_pointer

HOUR_S = 3600.0
SLURM = "SLURM_JOB_END_TIME"


def age() -> timedelta:
    return timedelta(seconds=time.time() - psutil.Process().create_time())


@pytest.mark.parametrize("limit", ["of the settings", "of the job"])
def test_a_training_ends_before_a_step_that_would_leave_no_time_for_a_save(
    monkeypatch: pytest.MonkeyPatch, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    now, save_by = [100.0], timedelta(0)
    if limit == "of the job":
        monkeypatch.setenv(SLURM, f"{int(time.time() + HOUR_S)}")
    else:
        save_by = age() + timedelta(seconds=HOUR_S)
    ends = Preemption(save_by, clock=lambda: now[0])  # and 30 s for the save
    assert not ends.check()
    for step_s in (1700, 100, 90):  # the longest does not fit again
        now[0] += step_s
        assert ends.check() == (step_s == 90)
    assert ends.left_s == 30
    assert "too soon for another step (at most 1700 s so far) and 30 s for" in caplog.text
    now[0] = 100 + HOUR_S - 5
    assert ends.left_s == pytest.approx(5, abs=2)


def test_a_limit_that_was_extended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLURM, f"{int(time.time() - 5)}")
    ends = Preemption()
    assert not ends.check()
    assert ends.left_s == 30


@pytest.mark.parametrize("value", ["03:55", "4", "25:61:00"])
def test_a_limit_in_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SAVE_BY", value)
    with pytest.raises(ConfigError, match=r"SAVE_BY=.* a unit \(s, m, h or d\), or as 03:55:00"):
        Settings()


@pytest.mark.parametrize(
    ("value", "hours"), [("03:30:00", 3.5), ("1-00:00:00", 24), ("90m", 1.5), ("0s", 0)]
)
def test_a_limit_is_written_as_for_slurm_or_with_a_unit(
    monkeypatch: pytest.MonkeyPatch, value: str, hours: float
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SAVE_BY", value)
    settings = Settings()
    assert settings.save_by == timedelta(hours=hours)
    monkeypatch.setenv("TRINITY_SYNC_SAVE_BY", settings.to_variables()["TRINITY_SYNC_SAVE_BY"])
    assert Settings() == settings


def test_saves_are_awaited_at_the_end_of_a_training_that_made_no_emergency_save(
    coordinator_of: Open, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    monkeypatch.setenv(SLURM, f"{int(time.time() + 20)}")
    with coordinator_of(trigger=CommitsHere()) as saves:
        saves.save(1, {"model": {"w": torch.ones(3)}})
        assert saves.any_preempted()
    assert read_latest_pointer(job.root, "checkpoint") == 1


RANK = """
import json, sys
import torch.distributed as dist
from trinity_sync import CheckpointCoordinator, Settings
rank, rendezvous, spool, root = sys.argv[1:]
dist.init_process_group("gloo", f"file://{rendezvous}", rank=int(rank), world_size=2)
saves = CheckpointCoordinator.of_process_group(root, settings=Settings(spool=spool, home=spool))
print(json.dumps([saves.preempted, saves.any_preempted()]))
saves.close(timeout=0)
dist.destroy_process_group()
"""


def test_all_ranks_end_at_the_limit_of_one(job: Job, tmp_path: Path, spool_folder: Path) -> None:
    given = [tmp_path / "rendezvous", spool_folder, job.root]
    ranks = [
        Program(RANK, rank, *given, env={**os.environ, **limit})
        for rank, limit in enumerate([{}, {"TRINITY_SYNC_SAVE_BY": "10s"}])
    ]
    said = [json.loads(rank.end()) for rank in ranks]
    assert said == [[False, True], [True, True]]
