"""What a manifest says of values and times stays true, and one of many files is in parts.

A reader of all reads all parts, a rank its own. Power cuts are in `test_power_cuts`.
"""

import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.dying import in_a_process
from tests.support.job import Job, held
from tests.support.meanwhile import when_opened
from tests.support.waiting import until
from trinity_sync.client.function_runner import FunctionRunner
from trinity_sync.client.state_saver import StateSaver
from trinity_sync.errors import ManifestError, RemovedStepError, SaveError
from trinity_sync.fs.process import read_process_identity
from trinity_sync.layout import step_folder
from trinity_sync.remote.download import fetch
from trinity_sync.remote.remote_root import Remote
from trinity_sync.remote.upload import replicate
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import PendingSave
from trinity_sync.snapshot.image import LaidOut, lay_out
from trinity_sync.snapshot.ticket import Ticket
from trinity_sync.storage import manifest as manifest_files
from trinity_sync.storage import save_timing
from trinity_sync.storage.commit import commit
from trinity_sync.storage.discovery import find_newest, require_committed
from trinity_sync.storage.job_settings import JobSettings
from trinity_sync.storage.manifest import (
    Manifest,
    encode_manifest,
    parse_manifest,
    read_manifest,
    write_manifest,
)
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.save_functions import FunctionStatus, read_statuses
from trinity_sync.storage.save_timing import Stall, read_removals, read_saves, refuse_removed

RANKS = 4


@pytest.fixture
def many(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of four ranks, with two files in each part of a manifest."""
    monkeypatch.setattr(manifest_files, "PART_FILES", 2)
    job.world_size = RANKS
    open_run(job.root, "first", 0)
    return job


def stage(job: Job, step: int, component: str = "model", value: float = 0.0, **other: Any) -> None:
    for rank in range(RANKS):
        job.stage(step, {component: {"w": torch.full((3,), rank + value)}}, rank=rank, **other)


def list_parts(root: Path, step: int) -> list[Path]:
    return sorted(step_folder(root, step).glob("manifest-*.json"))


def paths_of(manifest: Manifest | None) -> list[str]:
    return [record.path for record in manifest.files]


def test_a_rank_reads_its_own_part_and_knows_the_whole_step(many: Job) -> None:
    stage(many, 1)
    committed = many.commit(1)
    whole, mine = read_manifest(many.root, 1), read_manifest(many.root, 1, ranks={3})
    head = read_manifest(many.root, 1, ranks=())
    assert paths_of(whole) == sorted(paths_of(committed))
    assert whole.parts == ()
    assert paths_of(mine) == [f"actor/model_world_size_4_rank_{rank}.pt" for rank in (2, 3)]
    assert paths_of(head) == []
    for each in (mine, head):
        assert (each.roles, each.nbytes, each.kinds) == (("actor",), whole.nbytes, whole.kinds)
    assert len(list_parts(many.root, 1)) == 2


def test_few_files_need_no_part(job: Job) -> None:
    job.commit_states(1, {"model": {"w": torch.zeros(3)}})
    assert list_parts(job.root, 1) == []
    assert paths_of(read_manifest(job.root, 1, ranks=())) == ["actor/model_world_size_1_rank_0.pt"]


def test_a_rank_waits_until_its_own_images_are_committed(many: Job) -> None:
    request = SaveRequest(root=str(many.root), run=1, step=1)
    staged = [
        many.stage(1, {"model": {"w": torch.full((3,), float(rank))}}, rank=rank)
        for rank in range(RANKS)
    ]
    waiting = [
        PendingSave(request, 0.0, 0.0, 0.0, rank, images={*map(str, each.images)})
        for rank, each in enumerate(staged)
    ]
    assert [each.find_result(None, many.spool) for each in waiting] == [None] * RANKS
    many.commit(1)
    assert [each.find_result(None, many.spool) for each in waiting] == [""] * RANKS


def test_a_part_that_is_altered_or_missing_uncommits_its_step(many: Job) -> None:
    for step in (1, 2):
        stage(many, step)
        many.commit(step)
    for part in list_parts(many.root, 2):
        content = part.read_bytes()
        for at in range(0, len(content), 37):
            part.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(ManifestError, match="differs from its digest"):
                read_manifest(many.root, 2)
        part.unlink()
        with pytest.raises(ManifestError, match="lacks its part"):
            read_manifest(many.root, 2)
        assert find_newest(many.root).step == 1
        part.write_bytes(content)
    assert find_newest(many.root).step == 2


def test_a_reader_of_a_manifest_that_is_replaced_finds_the_new_one(many: Job) -> None:
    stage(many, 1, kind="state_dict")
    many.commit(1, kind="state_dict")
    stage(many, 1, "optim", also=("model",))
    before = list_parts(many.root, 1)
    with when_opened(before[-1], lambda: many.commit(1, "model", "optim")):
        found = read_manifest(many.root, 1)
    assert len(paths_of(found)) == 2 * RANKS
    assert not {*before} & {*list_parts(many.root, 1)}


def test_what_a_rank_has_read_is_never_written_as_the_whole(many: Job) -> None:
    stage(many, 1)
    many.commit(1)
    mine = read_manifest(many.root, 1, ranks={0})
    with pytest.raises(AssertionError, match="of other ranks would be lost"):
        write_manifest(many.root, mine)
    assert len(paths_of(read_manifest(many.root, 1))) == RANKS


def test_a_function_that_runs_while_its_step_is_committed_in_parts_lists_its_own_files_alone(
    many: Job,
) -> None:
    """A name of trinity_sync counts at the top of the step's folder only."""
    stage(many, 1, kind="state_dict")
    stage(many, 1, "optim", also=("model",))
    own = step_folder(many.root, 1) / "actor/lora"

    def write() -> None:
        many.commit(1, kind="state_dict")
        own.mkdir(parents=True)
        for name in ("adapter.bin", "manifest.json"):
            (own / name).write_bytes(b"lora")

    process, key = read_process_identity(os.getpid()), many.key_of(1)
    begun = FunctionStatus("lora", 1, 1, "checkpoint", 0, process, run_key=key)
    FunctionRunner(many.root, many.spool).call(write, begun)
    (status,) = read_statuses(many.spool, many.save(1))
    commit(many.save(1), many.persist(1, "model", "optim"), [status])
    manifest = require_committed(many.root, 1)
    assert manifest.kinds == ("checkpoint", "state_dict")
    assert [path for path in paths_of(manifest) if not path.endswith(".pt")] == [
        "actor/lora/adapter.bin",
        "actor/lora/manifest.json",
    ]


def test_a_commit_names_no_file_of_trinity_sync_and_none_that_is_gone(many: Job) -> None:
    stage(many, 1, kind="state_dict")
    own, aside = step_folder(many.root, 1) / "own.bin", many.root / "aside"
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(b"lora")
    status = FunctionStatus("f", 1, 1, "state_dict", 0, "1/1", "finished", files=(own.name,))
    before = commit(many.save(1, kind="state_dict"), many.persist(1, kind="state_dict"), [status])
    stage(many, 1, "optim", also=("model",))
    written = many.persist(1, "model", "optim")
    part = list_parts(many.root, 1)[0].name
    with pytest.raises(SaveError, match=f"lists .*{part}, a name that trinity_sync uses"):
        commit(many.save(1), written, [replace(status, files=(part,))])
    own.rename(aside)
    with pytest.raises(SaveError, match=r"own.bin is missing"):
        commit(many.save(1), written)
    assert paths_of(read_manifest(many.root, 1)) == sorted(paths_of(before))
    aside.rename(own)
    commit(many.save(1), written)
    assert len(paths_of(require_committed(many.root, 1))) == 2 * RANKS + 1


def test_a_remote_has_one_manifest_and_a_copy_has_the_same_parts(many: Job, tmp_path: Path) -> None:
    stage(many, 1)
    many.commit(1)
    manifest = require_committed(many.root, 1)
    url = f"file://{tmp_path}/far"
    replicate(many.root, url, 1)
    assert Remote(url).read_file(1, "manifest.json") == encode_manifest(manifest)
    assert replicate(many.root, url, 1).uploaded == 0
    fetch(url, 1, tmp_path / "copy")
    assert read_manifest(tmp_path / "copy", 1) == manifest
    assert [each.name for each in list_parts(tmp_path / "copy", 1)] == [
        each.name for each in list_parts(many.root, 1)
    ]


def sync_and_save(job: Job) -> Callable[[], object]:
    """A checkpoint that merges with the sync of its step."""
    stage(job, 1, kind="state_dict")
    job.commit(1, kind="state_dict")
    stage(job, 1, "optim", also=("model",))
    written = job.persist(1, "model", "optim")
    return lambda: commit(job.save(1), written)


def replace_by_another_run(job: Job) -> Callable[[], object]:
    stage(job, 1)
    job.commit(1)
    open_run(job.root, "second", 0)
    stage(job, 1, value=0.5, run=2)
    written = job.persist(1, run=2)
    return lambda: commit(job.save(1, run=2), written)


@pytest.mark.parametrize("prepare", [sync_and_save, replace_by_another_run])
def test_a_commit_that_dies_before_any_change_of_a_name_is_done_or_not(
    many: Job, spool_folder: Path, tmp_path: Path, prepare: Callable[[Job], Callable[[], object]]
) -> None:
    """And the next attempt commits it, and leaves no other parts."""
    outcomes = []
    for die_before in itertools.count(1):
        job = Job.open(root := tmp_path / f"dies-before-{die_before}", spool_folder, RANKS)
        open_run(root, "first", 0)
        work = prepare(job)
        before = require_committed(root, 1)
        died = in_a_process(work, tmp_path, die_before=die_before) == die_before
        now = require_committed(root, 1)
        outcomes.append(now != before)
        work()
        after = require_committed(root, 1)
        if outcomes[-1]:
            assert paths_of(now) == paths_of(after)
        head = read_manifest(root, 1, ranks=())
        assert [each.name for each in list_parts(root, 1)] == sorted(p.name for p in head.parts)
        for rank in range(RANKS):
            states = load_states(root, 1, "actor", rank=rank, world_size=RANKS)
            assert states["model"]["w"].tolist() == [rank + (after.run - 1) / 2] * 3
        job.close()
        if not died:
            break
    assert outcomes == sorted(outcomes)
    assert len(outcomes) - sum(outcomes) > len(head.parts)
    assert sum(outcomes) > 1


def read(job: Job, step: int) -> Manifest:
    return read_manifest(job.root, step)


def save(job: Job, step: int, *, kind: Any = "checkpoint", **states: float) -> Manifest:
    values = {name: {"w": torch.full((50,), float(value))} for name, value in states.items()}
    job.stage(step, values, kind=kind)
    job.commit(step, *states, kind=kind)
    return read(job, step)


def test_a_commit_that_is_retried_says_the_same_of_its_values(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    save(job, 1, model=1)
    job.stage(2, {"model": {"w": torch.ones(50)}})
    written = job.persist(2)
    with caplog.at_level(logging.WARNING):
        commit(job.save(2), written)
        before = (step_folder(job.root, 2) / "manifest.json").read_bytes()
        commit(job.save(2), written)
    assert (step_folder(job.root, 2) / "manifest.json").read_bytes() == before
    assert read(job, 2).alarms == ["actor/model has not changed since step 1"]
    assert caplog.text.count("has not changed") == 1


def test_an_optimizer_is_compared_with_the_last_checkpoint_although_weights_were_synced_since(
    job: Job,
) -> None:
    save(job, 10, model=1, optim=1)
    save(job, 11, kind="state_dict", model=2)
    found = save(job, 20, model=3, optim=1)
    assert found.alarms == ["actor/optim has not changed since step 10"]
    assert save(job, 21, kind="state_dict", model=3).alarms == [
        "actor/model has not changed since step 20"
    ]


def test_the_checkpoint_of_a_synced_step_says_what_the_sync_said_of_its_weights(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    save(job, 1, model=1)
    save(job, 2, kind="state_dict", model=1)
    found = save(job, 2, model=1, optim=2)
    assert found.alarms == ["actor/model has not changed since step 1"]
    assert caplog.text.count("has not changed") == 1  # the log had it already


def test_a_step_that_is_committed_late_is_not_compared_with_a_later_one(job: Job) -> None:
    save(job, 2, model=1)
    assert not save(job, 1, model=1).alarms


@pytest.mark.parametrize(
    ("component", "make"),
    [
        ("dcp", lambda: LaidOut("__0_0.distcp", *lay_out({"w": torch.full((50,), 1.0)}))),
        ("model", lambda: {"w": torch.arange(9)}),
    ],
    ids=["files of DCP", "whole numbers"],
)
def test_weights_of_any_form_are_compared(
    job: Job, component: str, make: Callable[[], Any]
) -> None:
    for step in (1, 2):
        job.commit_states(step, {component: make()})
    assert not read(job, 1).alarms
    assert read(job, 2).alarms == [f"actor/{component} has not changed since step 1"]


def test_a_part_is_unchanged_only_if_it_is_so_on_all_ranks(job: Job) -> None:
    job.world_size = 2
    for step in (1, 2, 3):
        for rank in (0, 1):
            value = float(step) if rank and step < 3 else 1.0 + rank
            job.stage(step, {"model": {"w": torch.full((50,), value)}}, rank=rank)
        job.commit(step)
    assert [bool(read(job, step).alarms) for step in (1, 2, 3)] == [False, False, True]


def test_a_manifest_without_health_is_read_and_its_step_counts_as_healthy(job: Job) -> None:
    manifest = save(job, 1, model=float("nan"))
    assert manifest.nonfinite
    files = tuple(replace(file, health=None) for file in manifest.files)
    text = encode_manifest(replace(manifest, files=files))
    assert parse_manifest(text, "manifest.json", 1).alarms == []


STATE: Mapping[str, Any] = {"model": {"w": torch.zeros(9)}, "optim": {"w": torch.ones(9)}}


def tickets(job: Job, step: int) -> list[Ticket]:
    return [sealed.ticket for sealed in job.spool.read_step(job.save(step))]


def test_every_ticket_of_a_submission_has_the_seconds_that_the_call_held_its_rank(job: Job) -> None:
    began = time.perf_counter()
    staged = job.stage(4, dict(STATE))
    took = time.perf_counter() - began
    model, optim = tickets(job, 4)
    assert model.stall_s == optim.stall_s
    assert 0 < model.stall_s <= staged.stall_s <= took


def test_the_copy_of_an_overlapped_save_is_no_stall_unless_the_trainer_waits_for_it(
    job: Job,
) -> None:
    stager = job.stager()
    saver = StateSaver(stager, lambda *_: None)
    began = time.perf_counter()
    with held(stager):
        staged = saver.save(job.origin(4), STATE, overlap=True)
        called = time.perf_counter() - began
    assert staged.submitted
    assert staged.submitted.result()
    assert 0 < tickets(job, 4)[0].stall_s <= called
    with ThreadPoolExecutor(1) as trainer:
        with held(stager):
            staged = saver.save(job.origin(5), STATE, overlap=True)
            waiting = trainer.submit(saver.wait_staged)
            until(lambda: stager.waiting_since is not None, "the trainer waits")
        waiting.result()
    assert tickets(job, 5)[0].stall_s > staged.stall_s


def test_the_manifest_names_the_slowest_rank_of_each_role_and_the_phases(job: Job) -> None:
    job.world_size = 2
    for rank in (0, 1):
        job.stage(4, dict(STATE), rank=rank)
    slowest = max(tickets(job, 4), key=lambda ticket: ticket.stall_s)
    submitted_at = max(ticket.sealed_at for ticket in tickets(job, 4))
    written = job.persist(4, "model", "optim")
    started_at = submitted_at + 0.5
    manifest = commit(
        job.save(4),
        written,
        started_at=started_at,
        persisted_at=started_at + 2,
        clock=lambda: started_at + 2.25,
    )
    assert read_manifest(job.root, 4) == manifest
    (timing,) = manifest.timings
    assert timing.stalls == (Stall("actor", slowest.rank, slowest.stall_s),)
    phases = (timing.queue_s, timing.write_s, timing.commit_s)
    assert phases == pytest.approx((0.5, 2.0, 0.25), abs=1e-5)
    assert timing.total_s == pytest.approx(manifest.committed_at - timing.submitted_at, abs=1e-5)
    assert (timing.nbytes, timing.ranks, timing.nodes) == (manifest.nbytes, 2, 1)


def test_a_sync_and_the_checkpoint_of_its_step_have_a_timing_each(job: Job) -> None:
    job.commit_states(4, {"model": STATE["model"]}, kind="state_dict")
    job.stage(4, {"optim": STATE["optim"]}, also=("model",))
    first = job.commit(4, "model", "optim")
    again = job.commit(4, "model", "optim")  # a flow run that is retried after its commit
    found = read_manifest(job.root, 4)
    assert [timing.kind for timing in found.timings] == ["state_dict", "checkpoint"]
    assert found.timings[1] == first.timings[0] != again.timings[0]
    assert found.timings[1].nbytes == found.nbytes - found.timings[0].nbytes


def test_the_log_of_saves_outlives_a_step_and_survives_torn_lines(job: Job) -> None:
    for step in (4, 5):
        job.stage(step, dict(STATE))
        manifest = job.commit(step, "model", "optim")
    job.commit(5, "model", "optim")  # a retry
    shutil.rmtree(job.root / "global_step_4")
    log = job.root / ".trinity_sync/saves.jsonl"
    log.write_bytes(log.read_bytes() + b'{"run": 1}\n{"run"')
    found = read_saves(job.root)
    assert [(each.run, each.step) for each in found] == [(1, 4), (1, 5)]
    assert found[1].committed_at == manifest.committed_at
    assert found[1].timing == manifest.timings[0]


def test_the_log_of_saves_tells_when_steps_were_removed(job: Job) -> None:
    for step in (1, 2, 3, 4):
        job.stage(step, dict(STATE))
        job.commit(step, "model", "optim")
    prune(job.root, plan_prune(job.root, Rules.of_job(JobSettings(keep="last=2")), 0.0))
    rewind(job.root, 3, clock=lambda: 1.7e9)
    first, second, rewound = read_removals(job.root)
    assert [each.step for each in (first, second, rewound)] == [1, 2, 4]
    assert (rewound.run, rewound.removed_at) == (1, 1.7e9)
    saved = [each.committed_at for each in read_saves(job.root)]
    assert len(saved) == 4
    assert first.removed_at > saved[-1]


def test_the_log_of_saves_does_not_grow_without_end(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_timing, "MAX_BYTES", 2000)
    for step in range(1, 21):
        job.commit_states(step, {"model": STATE["model"]})
    steps = [each.step for each in read_saves(job.root)]
    assert steps == [*range(steps[0], 21)]
    assert 1 < steps[0] < 20


def test_a_sync_that_was_committed_and_removed_tells_nothing_of_the_checkpoint(job: Job) -> None:
    job.commit_states(3, {"model": {"w": torch.zeros(3)}}, kind="state_dict")
    refuse_removed(job.save(3))
    with pytest.raises(RemovedStepError, match=r"was committed at .* removed or replaced since"):
        refuse_removed(job.save(3, kind="state_dict"))
