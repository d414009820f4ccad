"""A file that has not changed since the last commit is not written again: it gets another name."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.job import Job
from trinity_sync.errors import CommitError
from trinity_sync.layout import step_folder
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.storage.block_reuse import WORTHWHILE
from trinity_sync.storage.gc import remove_temporaries
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.uncommitted import is_being_written

NUMBERS = WORTHWHILE // 2
REFERENCE = "actor/model_world_size_1_rank_0.pt"


def save(job: Job, step: int, value: float = 1.0) -> Path:
    """Save a frozen model with an optimizer that steps; return the model's file."""
    states = {
        "model": {"w": torch.full((NUMBERS,), value)},
        "optim": {"w": torch.full((NUMBERS,), 0.1 * step)},
    }
    job.commit_states(step, states)
    return step_folder(job.root, step) / REFERENCE


def test_each_step_that_has_the_file_loads_until_the_last_of_them_is_removed(job: Job) -> None:
    files = [save(job, step) for step in (1, 2, 3)]
    assert len({file.stat().st_ino for file in files}) == 1
    last = parse_policy("last=1")
    for step in (4, 5):  # the second writes over what the first has left
        prune(job.root, plan_prune(job.root, Rules(last, last), now=2e9))
        newest = save(job, step)
    assert (
        newest.stat().st_ino
        == files[0].parents[2].joinpath("global_step_4", REFERENCE).stat().st_ino
    )
    for step in (4, 5):
        loaded = load_states(job.root, step, "actor", world_size=1)
        assert torch.equal(loaded["model"]["w"], torch.ones(NUMBERS))
        assert torch.equal(loaded["optim"]["w"], torch.full((NUMBERS,), 0.1 * step))


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("place", [0.0, 0.4999, 0.77])
def test_a_file_that_was_altered_is_written_again(job: Job, place: float) -> None:
    first = save(job, 1)
    flip(first, int(place * first.stat().st_size))
    second = save(job, 2)
    assert second.stat().st_ino != first.stat().st_ino
    loaded = load_states(job.root, 2, "actor", world_size=1)
    assert torch.equal(loaded["model"]["w"], torch.ones(NUMBERS))


def test_a_byte_that_flips_is_reported_for_each_step_that_has_it(job: Job) -> None:
    files = [save(job, step) for step in (1, 2)]
    flip(files[0], NUMBERS)
    for step in (1, 2):
        with pytest.raises(CommitError, match="digest"):
            load_states(job.root, step, "actor", world_size=1)


def test_one_that_other_users_can_write_is_not_shared(job: Job) -> None:
    first = save(job, 1)
    first.chmod(0o666)
    assert save(job, 2).stat().st_ino != first.stat().st_ino


@pytest.mark.parametrize("first", ["checkpoint", "state_dict"])
def test_no_file_that_a_function_of_a_sync_may_open_is_shared(job: Job, first: Any) -> None:
    second = "state_dict" if first == "checkpoint" else "checkpoint"
    files = []
    for step, kind in ((1, first), (2, second)):
        job.commit_states(step, {"model": {"w": torch.ones(NUMBERS)}}, kind=kind)
        files.append(step_folder(job.root, step) / REFERENCE)
    assert not files[0].samefile(files[1])


def test_without_hard_links_it_is_written(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no links here")

    first = save(job, 1)
    monkeypatch.setattr(os, "link", refuse)
    assert save(job, 2).stat().st_ino != first.stat().st_ino


def test_its_new_name_is_not_old_for_who_removes_what_saves_have_left(job: Job) -> None:
    old = save(job, 1)
    os.utime(old, (1e9, 1e9))
    job.stage(2, {"model": {"w": torch.ones(NUMBERS)}})
    (written,) = job.persist(2)
    assert old.samefile(written.temporary)
    assert is_being_written(job.root, 2, within_s=60)
    assert not [*remove_temporaries(job.root, images=(), busy=(), before=1.1e9)]
    assert Path(written.temporary).exists()
