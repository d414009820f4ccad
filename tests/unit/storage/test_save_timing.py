"""How long a save took: the stall in tickets, the phases in the manifest, both in ``show``."""

import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.job import Job, held
from tests.support.waiting import until
from trinity_sync.client.savers import StateSaver
from trinity_sync.errors import SaveError
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.snapshot.ticket import Ticket
from trinity_sync.storage import save_timing
from trinity_sync.storage.commit import commit
from trinity_sync.storage.job_settings import JobSettings
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.quarantine import rewind
from trinity_sync.storage.save_timing import Stall, read_removals, read_saves, refuse_removed

STATE: Mapping[str, Any] = {"model": {"w": torch.zeros(9)}, "optim": {"w": torch.ones(9)}}


def tickets(job: Job, step: int) -> list[Ticket]:
    return [sealed.ticket for sealed in job.spool.read_step(1, step)[0]]


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
    assert found
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
    with pytest.raises(SaveError, match=r"was committed at .* removed or replaced since"):
        refuse_removed(job.save(3, kind="state_dict"))
