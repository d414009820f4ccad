"""An earlier step becomes the newest; there is one to resume from at every instant."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.dying import in_a_process
from tests.support.job import Job
from tests.support.leases import acquire_lease
from trinity_sync.errors import CommitError, StepInUseError, SupersededError
from trinity_sync.layout import Kind
from trinity_sync.retention.policies import ALL, parse_policy
from trinity_sync.retention.prune import (
    list_prunable_quarantine,
    plan_prune,
    prune,
    remove_quarantined,
)
from trinity_sync.retention.removal import Rules
from trinity_sync.storage.discovery import (
    find_newest,
    read_latest_pointer,
    repair_latest_pointer,
    require_committed,
)
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import find_newest_run, open_run
from trinity_sync.storage.steps_in_use import list_pins, pin, tag
from trinity_sync.weights.committed import find_committed_version


def commit(job: Job, *steps: int, run: int = 1, kind: Kind = "checkpoint") -> None:
    for step in steps:
        job.commit_states(step, {"model": {"w": torch.full((9,), step)}}, run=run, kind=kind)


@pytest.fixture
def trained(job: Job) -> Job:
    """Steps 10, 20 and 30 of run 1, and step 40 submitted and not committed yet."""
    open_run(job.root, "first", 0)
    commit(job, 10, 20, 30)
    job.stage(40, {"model": {"w": torch.zeros(9)}})
    return job


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("global_step_*"))


def test_the_step_is_the_newest_and_later_steps_are_quarantined_until_they_are_renamed_back(
    trained: Job,
) -> None:
    before = {step: files(trained.root / f"global_step_{step}") for step in (20, 30)}
    done = rewind(trained.root, 10)
    assert find_newest(trained.root).step == 10
    assert names(trained.root) == ["global_step_10"]
    assert read_latest_pointer(trained.root, "checkpoint") == 10
    assert read_latest_pointer(trained.root, "state_dict") == 10
    assert done.quarantined == (30, 20)
    assert {step: files(done.folder / f"global_step_{step}") for step in (20, 30)} == before
    (done.folder / "global_step_30").rename(trained.root / "global_step_30")
    assert find_newest(trained.root).step == 30
    assert rewind(trained.root, 30).quarantined == ()
    assert read_latest_pointer(trained.root, "checkpoint") == 30
    with pytest.raises(SupersededError, match="step 40 of run 1"):
        trained.commit(40)  # which was in flight
    assert find_newest(trained.root).step == 30


def test_steps_of_later_runs_count_as_newer_whatever_their_number(trained: Job) -> None:
    open_run(trained.root, "second", 10)
    commit(trained, 12, run=2)
    trained.stage(15, {"model": {"w": torch.zeros(9)}}, run=2)
    assert rewind(trained.root, 20).quarantined == (12, 30)
    assert find_newest(trained.root).step == 20
    assert read_latest_pointer(trained.root, "checkpoint") == 20
    with pytest.raises(SupersededError, match="step 15 of run 2"):
        trained.commit(15, run=2)


def test_a_rewind_behind_a_run_annuls_what_it_superseded(trained: Job) -> None:
    commit(trained, 35, kind="state_dict")
    open_run(trained.root, "second", 20)
    commit(trained, 25, run=2, kind="state_dict")
    assert find_committed_version(trained.root, "actor").step == 25
    rewind(trained.root, 35)
    assert find_committed_version(trained.root, "actor").step == 35
    repair_latest_pointer(trained.root, "checkpoint")
    repair_latest_pointer(trained.root, "state_dict")
    assert read_latest_pointer(trained.root, "checkpoint") == 30
    assert read_latest_pointer(trained.root, "state_dict") == 35


def test_going_back_to_a_sync_leaves_the_checkpoint_before_it_or_none(trained: Job) -> None:
    commit(trained, 5, 25, kind="state_dict")
    rewind(trained.root, 25)
    assert read_latest_pointer(trained.root, "state_dict") == 25
    assert read_latest_pointer(trained.root, "checkpoint") == 20
    assert find_newest(trained.root).step == 20
    rewind(trained.root, 5)
    assert read_latest_pointer(trained.root, "checkpoint") is None
    assert find_newest(trained.root) is None
    assert find_newest(trained.root, "state_dict").step == 5


def test_a_step_that_is_not_committed_or_corrupted_changes_nothing(trained: Job) -> None:
    (trained.root / "global_step_10/actor/model_world_size_1_rank_0.pt").unlink()
    with pytest.raises(CommitError, match=r"step 40 .* is not committed"):
        rewind(trained.root, 40)
    with pytest.raises(CommitError, match=r"step 10 .* is corrupted"):
        rewind(trained.root, 10)
    assert find_newest(trained.root).step == 30
    assert find_newest_run(trained.root).number == 1


def test_a_leased_newer_step_is_not_quarantined(trained: Job) -> None:
    with (
        acquire_lease(trained.root, 30, "explorer 7"),
        pytest.raises(StepInUseError, match="step 30: explorer 7"),
    ):
        rewind(trained.root, 10, force=True)
    assert find_newest(trained.root).step == 30
    assert find_newest_run(trained.root).number == 1
    with acquire_lease(trained.root, 10, "explorer 7"):  # of the step itself, or of an older one
        rewind(trained.root, 10)


@pytest.mark.parametrize("claim", [pin, partial(tag, name="best")], ids=["pinned", "tagged"])
def test_a_claimed_step_is_quarantined_by_force_only_and_loses_its_claim(
    trained: Job, claim: Callable[..., object]
) -> None:
    tag(trained.root, 10, "start")
    claim(trained.root, 30, reason="the paper's")
    with pytest.raises(StepInUseError, match=r"step 30: .*the paper's"):
        rewind(trained.root, 10)
    assert find_newest(trained.root).step == 30
    assert 30 in rewind(trained.root, 10, force=True).quarantined
    assert [each.step for each in list_pins(trained.root)] == [10]


def test_steps_stay_in_quarantine_until_a_policy_removes_them(trained: Job) -> None:
    day = 86_400.0
    rewind(trained.root, 20, clock=lambda: 0.0)
    rewind(trained.root, 10, clock=lambda: 3 * day)
    (trained.root / ".trinity_sync/quarantine/my notes").mkdir()
    first, second = "19700101T000000Z", "19700104T000000Z"

    def plan(policy: str, at: float) -> list[str]:
        return list_prunable_quarantine(trained.root, parse_policy(policy), at)

    def left() -> list[str]:
        return sorted(each.name for each in (trained.root / ".trinity_sync/quarantine").iterdir())

    assert plan("all", 99 * day) == []
    assert plan("newer=2d", 4 * day) == [first]
    assert left() == [first, second, "my notes"]
    assert remove_quarantined(trained.root, [first]) == [first]
    prune(trained.root, plan_prune(trained.root, Rules(ALL, ALL), now=0))
    assert left() == [second, "my notes"]
    assert list((trained.root / ".trinity_sync/trash").iterdir()) == []
    assert plan("last=1", 99 * day) == []
    assert find_newest(trained.root).step == 10


def test_killed_at_any_instant_it_can_be_resumed_from_and_finished(
    trained: Job, tmp_path: Path
) -> None:
    seen, done = list[tuple[int, int | None, int]](), False
    while not done:
        root = shutil.copytree(trained.root, tmp_path / f"dies before {len(seen) + 1}")
        in_a_process(lambda root=root: rewind(root, 10), tmp_path, die_before=len(seen) + 1)
        done = not (root / "global_step_30").exists()
        run, pointed_at = find_newest_run(root), read_latest_pointer(root, "checkpoint")
        seen.append((run.number, pointed_at, find_newest(root).step))
        require_committed(root, pointed_at)
        rewind(root, 10)
        assert find_newest(root).step == read_latest_pointer(root, "checkpoint") == 10
        assert find_newest_run(root).number == 2
        aside = {path.name for path in root.glob(".trinity_sync/quarantine/*/*")}
        assert aside == {"global_step_20", "global_step_30"}
    # the record of the run, then the pointers, then the steps, the newest at last
    assert [*dict.fromkeys(seen)] == [(2, 30, 30), (2, 10, 30), (2, 10, 10)]
