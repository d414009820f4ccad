"""Every step has one state, which all commands, checks and policies go by."""

from dataclasses import replace

import pytest
import torch

from tests.support.job import Job
from trinity_sync.errors import CommitError, SupersededError
from trinity_sync.layout import MANIFEST, step_folder
from trinity_sync.storage.discovery import (
    Corruption,
    mark_corrupted,
    read_step_state,
    require_committed,
    require_unreplaced,
)
from trinity_sync.storage.runs import open_run

SHARD = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture
def committed(job: Job) -> Job:
    open_run(job.root, "the first one", 0)
    for step in (1, 2, 3):
        job.commit_states(step, {"model": {"w": torch.zeros(3)}})
    return job


@pytest.mark.parametrize("how", ["missing", "truncated", "marked", "manifest"])
def test_a_step_is_corrupted_by_its_files_its_mark_or_its_manifest(
    committed: Job, how: str
) -> None:
    folder = step_folder(committed.root, 2)
    if how == "missing":
        (folder / SHARD).unlink()
    elif how == "truncated":
        (folder / SHARD).write_bytes(b"short")
    elif how == "marked":
        mark_corrupted(committed.root, 2, Corruption({SHARD: "has other bytes"}, 0.0))
    else:
        (folder / MANIFEST).write_text("{")
    found = read_step_state(committed.root, 2)
    assert found.state == "corrupted"
    assert found.reason
    with pytest.raises(CommitError):
        found.require_loadable()


def test_a_step_that_a_later_run_went_back_from_is_superseded_and_can_be_loaded(
    committed: Job,
) -> None:
    open_run(committed.root, "the resumed one", 2)
    states = {step: read_step_state(committed.root, step) for step in (1, 2, 3)}
    assert [found.state for found in states.values()] == ["valid", "valid", "superseded"]
    assert isinstance(states[3].error, SupersededError)
    assert require_committed(committed.root, 3).step == 3


def test_a_superseded_step_that_is_corrupted_counts_as_corrupted(committed: Job) -> None:
    open_run(committed.root, "the resumed one", 2)
    (step_folder(committed.root, 3) / SHARD).unlink()
    assert read_step_state(committed.root, 3).state == "corrupted"


def test_a_step_whose_run_has_the_number_of_a_lost_one_has_replaced_its_step(
    committed: Job,
) -> None:
    manifest = require_committed(committed.root, 2)
    require_unreplaced(committed.root, manifest)
    with pytest.raises(CommitError, match="run 1 has replaced it"):
        require_unreplaced(committed.root, replace(manifest, run_key="of the lost one"))
