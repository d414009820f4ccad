"""A step that is a symbolic link to a folder elsewhere is a user's own: it counts, and stays."""

import os
from pathlib import Path

import pytest
import torch

from tests.support.job import Job
from tests.support.leases import acquire_lease
from tests.support.steps import MODEL, commit_files
from trinity_sync.layout import step_folder, steps_on_disk
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import LINKED, plan_prune
from trinity_sync.retention.prune import prune as prune_root
from trinity_sync.retention.removal import RemovalPlan, Rules
from trinity_sync.storage.block_reuse import WORTHWHILE
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.gc import FILE_REPAIRS, remove_temporaries
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.steps_in_use import pin
from trinity_sync.storage.verify import check_files, choose_files, judge_steps


@pytest.fixture
def elsewhere(spool_folder: Path) -> Path:
    """On another file system than roots are."""
    folder = spool_folder / "elsewhere"
    folder.mkdir()
    return folder


def move_away(folder: Path, elsewhere: Path) -> Path:
    """What a user does whose disk is full: move a folder, and link it."""
    there = elsewhere / folder.name
    os.system(f"cp -r {folder} {there} && rm -r {folder}")
    folder.symlink_to(there)
    return there


def prune(root: Path) -> RemovalPlan:
    last = parse_policy("last=1")
    return prune_root(root, plan_prune(root, Rules(last, last), now=2e9))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_retention_leaves_the_link_and_removes_the_others(tmp_path: Path, elsewhere: Path) -> None:
    for step in (1, 2, 3, 4):
        commit_files(tmp_path, step, nbytes=WORTHWHILE)
    there = move_away(step_folder(tmp_path, 2), elsewhere)
    before = content(there)
    made = plan_prune(tmp_path, Rules(*[parse_policy("last=1")] * 2), now=2e9)
    assert {each.step: why for each, why in made.kept}[2] == LINKED
    assert [each.step for each in prune(tmp_path).removed] == [1, 3]
    assert steps_on_disk(tmp_path) == [2, 4]
    assert content(there) == before
    assert prune(tmp_path).removed == ()


def test_a_step_that_is_linked_after_the_plan_is_spared(tmp_path: Path, elsewhere: Path) -> None:
    for step in (1, 2):
        commit_files(tmp_path, step)
    made = plan_prune(tmp_path, Rules(*[parse_policy("last=1")] * 2), now=2e9)
    move_away(step_folder(tmp_path, 1), elsewhere)
    assert [why for _, why in prune_root(tmp_path, made).spared] == [LINKED]


@pytest.mark.parametrize("part", ["actor", MODEL])
def test_links_within_a_step_go_with_it_and_what_they_lead_to_stays(
    tmp_path: Path, elsewhere: Path, part: str
) -> None:
    for step in (1, 2):
        commit_files(tmp_path, step, nbytes=WORTHWHILE)
    there = move_away(step_folder(tmp_path, 1) / part, elsewhere)
    before = content(elsewhere)
    assert [each.step for each in prune(tmp_path).removed] == [1]
    assert there.exists()
    assert content(elsewhere) == before
    assert list((tmp_path / ".trinity_sync/trash").iterdir()) == []


def weights(job: Job, step: int) -> float:
    return float(load_states(job.root, step, "actor")["model"]["w"][0])


def save(job: Job, step: int, value: float, run: int = 1) -> None:
    job.commit_states(step, {"model": {"w": torch.full((WORTHWHILE // 4,), value)}}, run=run)


@pytest.mark.parametrize("relative", [False, True])
def test_a_later_run_replaces_the_link_and_leaves_what_it_leads_to(
    job: Job, elsewhere: Path, relative: bool
) -> None:
    open_run(job.root, "1", 0)
    for step in (1, 2, 3):
        save(job, step, float(step))
    there = move_away(step_folder(job.root, 2), elsewhere)
    if relative:
        step_folder(job.root, 2).unlink()
        step_folder(job.root, 2).symlink_to(os.path.relpath(there, job.root))
    prune(job.root)  # leaves a spare file, which is on another file system than the link
    before = content(there)
    open_run(job.root, "2", 1)
    save(job, 2, 20.0, run=2)
    assert not step_folder(job.root, 2).is_symlink()
    assert weights(job, 2) == 20.0
    assert content(there) == before
    assert list((job.root / ".trinity_sync/replacing").iterdir()) == []


def test_it_loads_verifies_and_is_claimed_like_any_other(job: Job, elsewhere: Path) -> None:
    for step in (1, 2):
        save(job, step, float(step))
    move_away(step_folder(job.root, 2), elsewhere)
    assert find_newest(job.root).step == 2
    assert weights(job, 2) == 2.0
    pin(job.root, 2)
    acquire_lease(job.root, 2, "reader").release()
    assert [
        verdict.state for verdict in judge_steps(check_files(choose_files(job.root, step=2)))
    ] == ["valid"]
    for repair in FILE_REPAIRS:
        assert list(repair(job.root)) == []
    left = step_folder(job.root, 2) / f"actor/.a.pt.{'ab' * 16}.tmp"
    left.touch()
    assert list(remove_temporaries(job.root, images=(), busy=(), is_fresh=(2e10).__le__))
    assert not left.exists()
    assert weights(job, 2) == 2.0
