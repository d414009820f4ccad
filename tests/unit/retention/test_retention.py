"""Retention removes what no policy keeps, never what is needed, and never half a step."""

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import environment
from tests.support.job import Job
from tests.support.leases import acquire_lease
from tests.support.meanwhile import not_listed
from tests.support.steps import MODEL, commit_files, info
from trinity_sync.errors import ConfigError
from trinity_sync.formats.hf_export import fail_export_request
from trinity_sync.layout import steps_on_disk
from trinity_sync.orchestration.on_node import prune_after_commit
from trinity_sync.retention.policies import ALL, StepInfo, parse_policy
from trinity_sync.retention.prune import EXPORT_HOLDS_S, RootSteps, plan_prune
from trinity_sync.retention.prune import prune as drive
from trinity_sync.retention.removal import (
    RemovalPlan,
    Rules,
    describe_steps,
    plan_removals,
    read_now,
)
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.snapshot.ticket import ticket_path
from trinity_sync.storage import uncommitted as saves
from trinity_sync.storage.block_reuse import WORTHWHILE, acquire_spare
from trinity_sync.storage.discovery import find_newest, require_committed
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.manifest import FileRecord, read_manifest, write_manifest
from trinity_sync.storage.metrics import read_metrics, remove_metrics, write_metrics
from trinity_sync.storage.replace import quarantine_folder
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.save_functions import FunctionStatus, write_status
from trinity_sync.storage.steps_in_use import pin, resolve_step

HOUR, DAY = 3600, 86400
SPARE_PATTERN = ".trinity_sync/spare/*"


def rules(checkpoints: str = "last=1", syncs: str = "last=2") -> Rules:
    return Rules(parse_policy(checkpoints), parse_policy(syncs))


def planned(root: Path, checkpoints: str = "last=1", syncs: str = "last=2") -> RemovalPlan:
    return plan_prune(root, rules(checkpoints, syncs), now=2e9)


def prune(
    root: Path, checkpoints: str = "last=1", syncs: str = "last=2", **other: Path
) -> RemovalPlan:
    return drive(root, planned(root, checkpoints, syncs), **other)


Event = Callable[[Path], object]
"""What happens to a root."""


def commit(root: Path, *steps: int, **how: Any) -> None:
    for step in steps:
        commit_files(root, step, **how)


def commits(*steps: int, **how: Any) -> Event:
    return lambda root: commit(root, *steps, **how)


def begins(name: str, step: int, **how: Any) -> Event:
    """A run begins from a step."""
    return lambda root: open_run(root, name, step, **how)


def tears(step: int) -> Event:
    return lambda root: os.truncate(root / f"global_step_{step}" / MODEL, 10)


def numbers(steps: list[StepInfo]) -> list[int]:
    return [each.step for each in steps]


def spared(done: RemovalPlan) -> dict[int, str]:
    return {each.step: why for each, why in done.spared}


def test_a_plan_has_removed_steps_and_reasons_for_the_others(root: Path) -> None:
    commit(root, *range(1, 7))
    pin(root, 2, "the paper's")
    made = planned(root, "last=2,every=3")
    reasons = {each.step: why for each, why in made.kept}
    assert list(reasons) == [2, 3, 5, 6]
    assert reasons[2] == "pinned: the paper's"
    assert reasons[3] == "a multiple of 3"
    assert reasons[5] == "one of the last 2"
    assert reasons[6].startswith("newest checkpoint; newest state_dict; the latest pointer of ")
    assert numbers(list(made.removed)) == [1, 4]
    assert made.nbytes == 2 * 1002
    assert steps_on_disk(root) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("folder", ["pins", "leases"])
@pytest.mark.parametrize("how", ["a link to none", "a file"])
def test_nothing_is_removed_if_what_keeps_steps_cannot_be_listed(
    root: Path, folder: str, how: str
) -> None:
    commit(root, *range(1, 5))
    path = root / ".trinity_sync" / folder
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    path.touch() if how == "a file" else path.symlink_to("nowhere")
    with pytest.raises(OSError, match=folder):
        prune(root)
    assert steps_on_disk(root) == [1, 2, 3, 4]


def test_a_removed_step_leaves_no_files(root: Path) -> None:
    for step in range(1, 5):
        commit_files(root, step)
        write_metrics(root, 1, step, {"reward": step})
        (root / f".trinity_sync/exports/global_step_{step}.actor").mkdir(parents=True)
    done = prune(root, "last=2")
    assert numbers(done.removed) == [1, 2]
    assert (done.nbytes, done.spared) == (2004, ())
    assert steps_on_disk(root) == [3, 4]
    assert list((root / ".trinity_sync/trash").iterdir()) == []
    assert [read_metrics(root, 1, step) for step in (2, 3)] == [{}, {"reward": 3.0}]
    left = sorted(path.name for path in (root / ".trinity_sync/exports").iterdir())
    assert left == ["global_step_3.actor", "global_step_4.actor"]
    for step in (3, 4):
        require_committed(root, step)
    assert prune(root, "last=2").removed == ()


@pytest.mark.parametrize(
    "name",
    ["global_step_1", ".trinity_sync/quarantine/20200101T000000Z", ".trinity_sync/trash/first"],
)
def test_what_cannot_be_removed_is_named_and_keeps_nothing_else(root: Path, name: str) -> None:
    for each in ("trash/first", "trash/other", *(f"quarantine/2020010{n}T000000Z" for n in "123")):
        (root / ".trinity_sync" / each).mkdir(parents=True)
    commit(root, 1, 2, 3)
    write_metrics(root, 1, 2, {"reward": 2})
    newest = Rules(parse_policy("last=1"), ALL, quarantine=parse_policy("last=1"))
    plan, busy = plan_prune(root, newest, 2e9), str(root / name)
    if subprocess.run(["mount", "--bind", busy, busy], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with pytest.raises(OSError, match=f"busy.*{name}"):
            drive(root, plan)
    finally:
        subprocess.run(["umount", "-l", busy], check=True)
    folders = root, root / ".trinity_sync/quarantine", root / ".trinity_sync/trash"
    left = {path for each in folders for path in each.glob("[g2fo]*")}
    assert left == {root / "global_step_3", folders[1] / "20200103T000000Z", root / name}
    assert read_metrics(root, 1, 2) == {}


def test_no_more_than_the_confirmed_steps_and_folders_are_removed(root: Path) -> None:
    for name in ("20200101T000000Z", "20200102T000000Z"):
        (quarantine_folder(root) / name).mkdir(parents=True)
    commit(root, 1, 2)
    newest = Rules(parse_policy("last=1"), ALL, quarantine=parse_policy("last=1"))
    confirmed = plan_prune(root, newest, 2e9)
    commit_files(root, 3)
    (quarantine_folder(root) / "20200103T000000Z").mkdir()
    done = drive(root, confirmed)
    assert (numbers(done.removed), done.quarantine) == ([1], ("20200101T000000Z",))
    assert steps_on_disk(root) == [2, 3]
    assert len(list(quarantine_folder(root).iterdir())) == 2


FIRST, SECOND = begins("first", 0), begins("second", 10)


def rolled_back(root: Path, *, best: int = 0) -> None:
    """A training that went back from step 50 to 20, and has committed step 25 since."""
    open_run(root, "first", 0)
    for step in (10, 20, 30, 40, 50):
        commit_files(root, step)
        write_metrics(root, 1, step, {"reward": float(step == best)})
    commit_files(root, 51, kind="state_dict")
    open_run(root, "second", 20, resumed_run=1)
    commit_files(root, 25, run=2)
    write_metrics(root, 2, 25, {"reward": -1.0})


HISTORIES: dict[str, tuple[Any, ...]] = {
    # what has happened, the steps that are left, the newest of them, and policies
    "checkpoints and syncs are judged apart": (
        [commits(1, 2, 3, 5, 6, 7, kind="state_dict"), commits(4, 8)],
        [4, 6, 7, 8],
        8,
        "all",
    ),
    "the newest step of each kind stays": (
        [commits(10, 20), commits(30, 40, kind="state_dict")],
        [20, 40],
        20,
        "last=1",
        "last=1",
    ),
    "what a training resumes from stays though older runs went further": (
        [commits(10, 20, 30), FIRST, SECOND, commits(20, run=2)],
        [20],
        20,
    ),
    "the step that a run resumed from stays until it has a checkpoint": (
        [FIRST, commits(10, 20, 30), SECOND, commits(12, run=2, kind="state_dict")],
        [10, 12, 30],  # 30 is superseded, and the newest until then
        30,
    ),
    "a corrupted step is no successor and is left to people": (
        [commits(1, 2, 3), tears(3)],
        [2, 3],
        2,
    ),
    "what is no commit is left alone": (
        [
            lambda root: (root / "global_step_1/actor").mkdir(parents=True),  # veRL's own
            commits(2),
            lambda root: (root / "global_step_2/manifest.json").write_text("{torn"),
            commits(3, 4),
        ],
        [1, 2, 4],
        4,
    ),
    "a lone step needs no policy to stay": ([commits(1)], [1], 1, "every=100"),
    "superseded steps go though the newest is corrupted and its base stays": (
        [rolled_back, tears(25)],
        [20, 25],
        20,
    ),
    "what an abandoned run superseded counts again for a run that continues it": (
        [rolled_back, begins("third", 50, resumed_run=1), commits(60, run=3)],
        [50, 60],
        60,
        "last=2",
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_what_a_resume_or_a_reader_needs_stays_and_the_rest_goes(root: Path, name: str) -> None:
    history, left, newest, *policies = HISTORIES[name]
    for event in history:
        event(root)
    prune(root, *policies)
    assert steps_on_disk(root) == left
    assert find_newest(root).step == newest


def begun_again(root: Path) -> None:
    """A training of three steps; then one that begins at step 0, by mistake maybe."""
    open_run(root, "first", 0)
    commit(root, 8000, 9000, 10000)
    commit_files(root, 10001, kind="state_dict")
    open_run(root, "second", 0)
    commit(root, 10, 20, 30, 40, run=2)


def test_a_training_that_loaded_nothing_leaves_the_one_before_to_the_policy_of_quarantine(
    root: Path,
) -> None:
    begun_again(root)
    assert numbers(prune(root, "last=3", "last=1").removed) == [10]
    assert steps_on_disk(root) == [20, 30, 40, 8000, 9000, 10000, 10001]
    reasons = {each.step: why for each, why in planned(root).kept}
    assert reasons[8000] == "all are kept (steps superseded by a run that began at step 0)"
    policies = Rules(parse_policy("last=3"), parse_policy("last=1"), parse_policy("last=1"))
    drive(root, plan_prune(root, policies, now=2e9))
    assert steps_on_disk(root) == [20, 30, 40, 10001]


@pytest.mark.parametrize("how", ["loaded", "rewound"])
def test_a_training_that_goes_on_from_the_one_before_counts_its_steps_again(
    root: Path, how: str
) -> None:
    begun_again(root)
    if how == "loaded":
        open_run(root, "third", 10000, resumed_run=1)
    else:
        rewind(root, 10000)
    commit_files(root, 10500, run=3)
    prune(root, "last=2")
    there = steps_on_disk(root)
    assert [step for step in there if step > 1000 and step != 10001] == [10000, 10500]
    assert (40 in there) == (how == "loaded")  # of the training that it did not go on from


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("last=1", [25]),
        ("last=2", [20, 25]),
        ("daily=9", [10, 25]),
        ("best=1:reward:max", [10, 25]),
        ("every=20", [20, 25, 40]),
        ("all", [10, 20, 25, 30, 40, 50]),
    ],
)
def test_superseded_steps_count_neither_as_last_nor_as_best(
    root: Path, policy: str, left: list[int]
) -> None:
    rolled_back(root, best=40 if left != [10, 25] else 10)
    prune(root, policy)
    assert steps_on_disk(root) == left


def test_a_policy_of_quarantine_counts_from_when_another_training_began(root: Path) -> None:
    begun_again(root)
    began = (root / ".trinity_sync/runs/2.json").stat().st_mtime
    for now, left in ((began + 50, 8), (began + 70, 4)):
        policies = Rules(ALL, ALL, parse_policy("newer=1m"))
        drive(root, plan_prune(root, policies, now=now))
        assert len(steps_on_disk(root)) == left


@pytest.mark.parametrize("policy", ["newer=1d,last=1", "hourly=1"])
def test_a_step_that_was_committed_in_the_future_is_kept_and_not_counted(
    root: Path, policy: str
) -> None:
    for step in (1, 2, 3):
        commit_files(root, step, at=time.time() - DAY * (4 - step) + DAY * 3650 * (step == 2))
    (quarantine_folder(root) / "20200101T000000Z").mkdir(parents=True)
    (quarantine_folder(root) / "20990101T000000Z").mkdir()
    made = plan_prune(root, Rules(parse_policy(policy), ALL, parse_policy("newer=30d")))
    assert numbers(made.removed) == [1]
    assert [Path(each).name for each in made.quarantine] == ["20200101T000000Z"]
    assert {each.step: why for each, why in made.kept}[2] == "committed in the future"
    assert numbers(plan_prune(root, rules("last=2")).removed) == [1]


def test_a_metric_that_only_a_step_of_the_future_has_is_a_metric() -> None:
    now, policy = time.time(), parse_policy("best=1:reward:max,newer=1h")
    old, late, new = (
        StepInfo(step, 1, ("checkpoint",), now + DAY * days, 1, metrics=metrics)
        for step, days, metrics in ((1, -9, {}), (2, 3650, {"reward": 1.0}), (3, -8, {}))
    )
    kept = policy.keeps([old, late, new], now)
    assert kept == {
        2: "committed in the future; one of the best 1, reward 1",
        3: "waits for its reward",
    }
    with pytest.raises(ConfigError, match="no step has the metric 'reward'"):
        policy.keeps([old, new], now)


def test_no_age_removes_anything_while_this_nodes_clock_is_not_the_file_systems(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        commit_files(root, step, at=time.time() - 10 + step)
    steps, policies = describe_steps(RootSteps(root)), rules("newer=1d,last=1")
    for hours in (0, 48, -48):
        now = read_now(root, policies, lambda ahead=hours * 3600: time.time() + ahead)
        made = plan_removals(steps, policies, now)
        assert (len(made.kept), isinstance(now, str)) == (3, hours != 0)
    assert "this node and of the file system are 2880 min apart" in caplog.text
    assert numbers(plan_prune(root, policies, time.time() + 2 * DAY).removed) == [1, 2]


def test_a_training_that_was_rewound_keeps_its_steps_without_the_one_that_it_went_back_to(
    root: Path,
) -> None:
    begun_again(root)
    rewind(root, 10000)
    open_run(root, "fourth", 10000, resumed_run=1)
    commit_files(root, 10500, run=4)
    shutil.rmtree(root / "global_step_10000")
    there = describe_steps(RootSteps(root))
    assert {each.step: each.superseded_by for each in there} == {8000: 0, 9000: 0, 10500: 0}


def test_a_step_with_a_pending_export_is_kept_for_a_day_unless_that_has_failed(root: Path) -> None:
    for step in (5, 10, 20, 30):
        at = time.time() - EXPORT_HOLDS_S * (step == 5)
        commit_files(root, step, at=at, exports={"actor": "hf_model"})
    requested = require_committed(root, 10)
    for step in (10, 20):
        fail_export_request(root, 1, step, "actor")
    plan_before = planned(root)
    assert numbers(plan_before.removed) == [5, 10, 20]
    write_manifest(root, requested)
    done = drive(root, plan_before)
    assert spared(done) == {10: "the export of the model of actor is pending"}
    assert steps_on_disk(root) == [10, 30]
    exported = FileRecord("actor/huggingface/model.safetensors", 1, "", "actor", "hf_model")
    (root / "global_step_10" / exported.path).write_bytes(b"x")
    write_manifest(root, replace(requested, files=(*requested.files, exported)))
    prune(root)
    assert steps_on_disk(root) == [30]


def test_the_newest_healthy_step_is_kept_for_its_kind_with_the_reason(root: Path) -> None:
    bad = {"nonfinite": "9 non-finite values in actor/model"}
    steps = [info(1), info(2), info(3, kinds=("state_dict",)), info(4, **bad), info(5, **bad)]
    plan = plan_removals(steps, rules(), now=9)
    assert numbers(list(plan.removed)) == [1, 4]
    reasons = {each.step: why for each, why in plan.kept}
    assert reasons[2].startswith("newest healthy checkpoint: later ones have values that are not")
    assert reasons[3].startswith("newest healthy state_dict")
    assert "healthy" not in reasons[5]


def test_a_healthy_step_stays_if_its_healthy_successor_was_replaced_meanwhile(job: Job) -> None:
    for step in (1, 2, 3):
        value = step if step < 3 else torch.nan
        job.commit_states(step, {"model": {"w": torch.full((9,), float(value))}})
    plan = planned(job.root)
    assert (numbers(list(plan.removed)), plan.healthy["checkpoint"].step) == ([1], 2)
    manifest = read_manifest(job.root, 2)
    unhealthy = read_manifest(job.root, 3)
    files = tuple(
        replace(a, health=b.health) for a, b in zip(manifest.files, unhealthy.files, strict=True)
    )
    write_manifest(job.root, replace(manifest, files=files))
    assert "the newer step 2 has 9 non-finite values" in spared(drive(job.root, plan))[1]


def test_a_policy_that_keeps_nothing_is_refused(root: Path) -> None:
    commit(root, 1, 2, 3)
    with pytest.raises(ConfigError, match=r"'every=100' keeps none of its 3 steps.* Add last=1"):
        planned(root, "every=100")
    assert steps_on_disk(root) == [1, 2, 3]


# what happens between the plan and its end


def test_a_step_that_is_claimed_after_the_plan_is_spared(root: Path) -> None:
    commit(root, 1, 2, 3, 4)
    made = planned(root)
    pin(root, 1)
    lease = acquire_lease(root, 2, "explorer 7")
    done = drive(root, made)
    assert numbers(done.removed) == [3]
    assert spared(done) == {1: "pinned", 2: "leased by explorer 7"}
    lease.release()
    assert numbers(prune(root).removed) == [2]


SINCE: dict[str, tuple[list[Event], Event, int, str]] = {
    "the newest is torn": ([commits(1, 2)], tears(2), 1, "the newer step 2 is not valid"),
    "the newest has become older": (
        [commits(9), commits(5, run=2)],
        commits(5),
        9,
        "step 5 is no longer newer",
    ),
    "it was committed again": (
        [commits(1, 2, 3)],
        commits(1, run=2),
        1,
        "it was committed again meanwhile",
    ),
    "a pointer has moved": (
        [commits(1, 2)],
        lambda root: (root / "latest_checkpointed_iteration.txt").write_text("1"),
        1,
        "the latest pointer of checkpoints names it",
    ),
}


@pytest.mark.parametrize("name", SINCE)
def test_a_step_is_spared_for_what_has_come_after_the_plan(root: Path, name: str) -> None:
    history, event, step, why = SINCE[name]
    for each in history:
        each(root)
    made = planned(root)
    assert step in numbers(made.removed)
    event(root)
    (found,) = spared(drive(root, made)).items()
    assert (found[0], why in found[1]) == (step, True)
    require_committed(root, step)


def test_a_step_with_a_pending_checkpoint_is_kept(job: Job) -> None:
    weight = {"w": torch.zeros(100)}
    job.commit_states(3, {"model": weight}, kind="state_dict")
    job.stage(3, {"optim": weight}, also=("model",))  # its model is the sync's file
    for step in (4, 5):
        job.commit_states(step, {"model": weight}, kind="state_dict")
    spool = job.spool.folder.parent
    assert spared(prune(job.root, syncs="last=1", spool=spool)) == {3: "a save of it is in flight"}
    job.commit(3, "model", "optim")
    assert find_newest(job.root).step == 3


def test_a_superseded_image_keeps_no_step(job: Job) -> None:
    open_run(job.root, "first", 0)
    job.stage(20, {"model": {"w": torch.ones(3)}})  # its save fails, and its slot is not needed
    open_run(job.root, "second", 10)
    commit(job.root, 20, 30, run=2)
    assert numbers(prune(job.root, spool=job.spool.folder.parent).removed) == [20]


@pytest.mark.parametrize("hours", [1, -2], ids=["later", "by a clock that was set back"])
def test_a_step_with_a_write_in_flight_is_kept(
    job: Job, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    commit(job.root, 1, 2, 3)
    (job.root / "global_step_1/actor/.optim.pt.1a2b.tmp").touch()
    spool = job.spool.folder.parent
    receipt = FunctionStatus("lora", 1, 2, "checkpoint", 0, f"{os.getpid()}/0", state="finished")
    write_status(job.spool, replace(receipt, run_key="of this run"))
    assert list(spared(prune(job.root, spool=spool))) == [1, 2]
    monkeypatch.setattr(saves, "read_file_system_time", lambda _: time.time() + hours * 3600)
    assert numbers(prune(job.root, spool=spool).removed) == [1]


def test_a_step_whose_writes_in_flight_cannot_be_listed_is_kept(job: Job) -> None:
    commit(job.root, 1, 2)
    with not_listed(job.root / "global_step_1/actor"), pytest.raises(PermissionError):
        prune(job.root)
    assert steps_on_disk(job.root) == [1, 2]


def ticket_of(job: Job, step: int) -> Path:
    """The ticket of an image of a step that no commit was asked for."""
    slot = job.stage(step, {"optim": {"w": torch.zeros(3)}}) and next(
        sealed.slot for sealed in job.spool.tickets()[0] if sealed.ticket.step == step
    )
    return ticket_path(slot)


@pytest.mark.parametrize("content", [b"", b"\xff", b"{", b"[]", b'{"format": 99}'])
def test_a_ticket_without_a_step_keeps_no_step_and_is_named(
    job: Job, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    commit(job.root, 1, 2, 3)
    path = ticket_of(job, 9)
    path.write_bytes(content)
    assert numbers(prune(job.root, spool=job.spool.folder.parent).removed) == [1, 2]
    (said,) = [record.message for record in caplog.records if str(path) in record.message]
    assert "Remove the ticket" in said


@pytest.mark.parametrize("change", [{"format": 99}, {"rank": 3}, {"components": "no list"}])
def test_an_altered_ticket_keeps_the_step_that_it_names(job: Job, change: dict[str, Any]) -> None:
    commit(job.root, 1, 2, 3)
    path = ticket_of(job, 2)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    spool = job.spool.folder.parent
    done = prune(job.root, spool=spool)
    assert numbers(done.removed) == [1]
    assert f"the spool may have an image of it: ticket {path}" in spared(done)[2]
    open_run(job.root, "first", 0)
    open_run(job.root, "second", 1)  # leaves what it names behind
    commit_files(job.root, 4, run=2)
    assert numbers(prune(job.root, spool=spool).removed) == [2, 3]


def test_a_torn_status_of_a_function_keeps_its_own_step_only(job: Job) -> None:
    commit(job.root, 1, 2, 3)
    write_status(job.spool, FunctionStatus("lora", 1, 2, "checkpoint", 0, "1/1", state="finished"))
    (path,) = job.spool.receipts.iterdir()
    path.write_text('{"st')
    done = prune(job.root, spool=job.spool.folder.parent)
    assert numbers(done.removed) == [1]
    assert f"receipt {path} of step 2 is torn" in spared(done)[2]
    path.unlink()
    assert numbers(prune(job.root, spool=job.spool.folder.parent).removed) == [2]


@pytest.mark.parametrize("recycle", [True, False])
def test_large_files_of_one_step_are_kept_for_block_reuse_alone(root: Path, recycle: bool) -> None:
    commit(root, 1, 2, 3, 4, nbytes=2 * WORTHWHILE)
    drive(root, planned(root), recycle=recycle)
    assert len(list(root.glob(SPARE_PATTERN))) == recycle
    assert acquire_spare(root, root / "next", WORTHWHILE) == recycle


def test_the_removal_of_a_step_leaves_the_metrics_that_a_later_run_recorded_for_it(
    root: Path,
) -> None:
    commit_files(root, 4)
    commit_files(root, 5)
    write_metrics(root, 1, 4, {"reward": 1.0})
    write_metrics(root, 2, 4, {"reward": float("nan"), "loss": 2.0})
    prune(root, "last=1")
    assert steps_on_disk(root) == [5]
    assert read_metrics(root, 1, 4) == {}
    assert read_metrics(root, 2, 4)["loss"] == 2.0
    remove_metrics(root, 4, 2)
    assert not list((root / ".trinity_sync/metrics").glob("*.json"))


def prune_after(root: Path, step: int, keep: int, home: Path) -> None:
    """Prune as the flow of a save does, with a home of its own."""
    write_manifest(root, replace(read_manifest(root, step), keep=keep))
    request = SaveRequest(root=str(root), run=1, run_key="", step=step)
    with environment({"TRINITY_SYNC_HOME": str(home), "TRINITY_SYNC_SPOOL": str(home / "spool")}):
        prune_after_commit(request)


def test_a_save_that_is_committed_after_newer_steps_does_not_remove_itself(
    root: Path, tmp_path: Path
) -> None:
    for step in (200, 300, 100):  # it was retried
        commit_files(root, step)
    prune_after(root, 100, 2, tmp_path)
    assert steps_on_disk(root) == [100, 200, 300]
    prune_after(root, 300, 2, tmp_path)
    assert steps_on_disk(root) == [200, 300]


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("best=1:reward:max,last=1", [1, 3, 4]),
        ("every=2", [2, 3, 4]),
        ("all", [1, 2, 3, 4]),
        ("last=1", [3, 4]),
        (None, [3, 4]),  # the default keeps all, and is no policy that was set
    ],
)
def test_the_keep_of_a_save_removes_no_step_that_the_policy_of_the_job_keeps(
    root: Path, tmp_path: Path, policy: str | None, left: list[int]
) -> None:
    for step in (1, 2, 3, 4):
        commit_files(root, step)
        write_metrics(root, 1, step, {"reward": -step})
    write_job_settings(root, {"keep": policy})
    prune_after(root, 4, 2, tmp_path)
    assert steps_on_disk(root) == left


REWARDS = {6: -math.inf, 10: 0.1, 20: 0.9, 30: 0.5, 40: math.nan, 45: math.inf}


def kept_by(policy: str, steps: list, now: float = 10 * DAY) -> list[int]:
    return sorted(parse_policy(policy).keeps(steps, now))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("all", [10, 20, 30, 40, 50]),
        ("all,last=1", [10, 20, 30, 40, 50]),
        ("2", [40, 50]),
        ("last=2", [40, 50]),
        ("last=9", [10, 20, 30, 40, 50]),
        ("every=20", [20, 40]),
        ("last=1, every=20", [20, 40, 50]),
        ("newer=25s", [30, 40, 50]),
    ],
)
def test_a_policy_keeps(policy: str, expected: list[int]) -> None:
    assert kept_by(policy, [info(step) for step in (10, 20, 30, 40, 50)], now=50) == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("best=1:reward:max", [20, 50]),
        ("best=2:reward:max", [20, 30, 50]),
        ("best=1:reward:min", [10, 50]),
        ("best=9:reward:min", [10, 20, 30, 50]),
    ],
)
def test_the_best_are_kept_and_those_that_wait_for_their_metric(
    policy: str, expected: list[int]
) -> None:
    steps = [info(step, metrics={"reward": value}) for step, value in REWARDS.items()]
    assert kept_by(policy, [info(5), *steps, info(50)]) == expected


def test_a_step_whose_metrics_are_torn_may_be_the_best_and_is_kept(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit(root, 10, 20, 30, 40)
    for step, reward in ((10, 0.1), (20, 0.9), (30, 0.5), (40, 0.2)):
        write_metrics(root, 1, step, {"reward": reward})
    file = root / ".trinity_sync/metrics/20.json"
    file.write_text(file.read_text().replace("0.9", "0.8"))  # by hand
    done = prune(root, "best=1:reward:max")
    assert numbers(done.removed) == [10]
    why = {each.step: reason for each, reason in done.kept}
    assert f"trinity-sync metrics {root} 20 NAME=VALUE" in why[20]
    assert str(file) not in caplog.text  # told once
    assert resolve_step(root, "best=reward:max") == 30
    assert f"{file} is torn or edited" in caplog.text
    write_metrics(root, 1, 20, {"reward": 0.8})  # as it says
    assert numbers(prune(root, "best=1:reward:max").removed) == [30]


def test_a_metric_that_no_step_has_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"no step has the metric 'rewrd' \(known: loss, re"):
        kept_by("best=1:rewrd:max", [info(1, metrics={"reward": 1, "loss": 2})])
    assert kept_by("best=1:reward:max", []) == []


def test_a_step_an_hour_and_a_step_a_day_are_kept() -> None:
    steps = [info(n, committed_at=n * HOUR / 2) for n in range(96)]  # two days, two an hour
    assert kept_by("hourly=3", steps) == [90, 92, 94]
    assert kept_by("daily=7", steps) == [0, 48]
    assert kept_by("hourly=3,daily=1", steps) == [48, 90, 92, 94]


def test_the_last_step_of_the_last_run_is_newer_than_a_later_step_of_an_earlier_run() -> None:
    steps = sorted([info(30), info(20, run=2), info(10)], key=lambda each: each.age)
    assert kept_by("last=1", steps) == [20]


@given(
    times=st.lists(st.integers(0, 10 * DAY), min_size=1, max_size=40),
    policy=st.sampled_from(["hourly=3", "daily=2", "hourly=2,every=7", "last=2,daily=3"]),
)
def test_what_is_kept_once_is_kept_when_the_rest_is_gone(times: list[int], policy: str) -> None:
    steps = [info(step, committed_at=at) for step, at in enumerate(sorted(times))]
    chosen = kept_by(policy, steps)
    assert kept_by(policy, [each for each in steps if each.step in chosen]) == chosen


@pytest.mark.parametrize(
    "text",
    ["last=3,every=100,hourly=24,best=2:reward:max", "newer=36h,weekly=4", "newer=90s", "all"],
)
def test_the_short_form_comes_back_as_it_was(text: str) -> None:
    assert str(parse_policy(text)) == text


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "''"),
        ("lst=3", "'lst=3'"),
        ("last=3;every=5", "'last=3;every=5'"),
        ("last=-1", "'last=-1'"),
        ("every=0", "'every=0'"),
        ("last=2,", "''"),
        ("newer=2", "'newer=2'"),
        ("best=2:reward", "'best=2:reward'"),
        ("best=2:reward:most", "'best=2:reward:most'"),
        ("-1", "'-1'"),
    ],
)
def test_a_word_that_is_not_understood_is_a_sentence(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match="is unknown") as error:
        parse_policy(text)
    assert word in str(error.value)
    assert "best=2:reward:max" in str(error.value)
