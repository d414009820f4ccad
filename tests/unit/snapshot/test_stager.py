"""Staging: one copy into warm slots, sealed; a trainer is never held up for ever."""

import errno
import gc
import io
import logging
import mmap
import os
import resource
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.dying import end_of
from tests.support.job import Job, mapped_nbytes
from tests.support.meanwhile import when_opened
from tests.support.waiting import WAIT_S
from trinity_sync.errors import ImageError, SpoolError, SpoolFullError
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX
from trinity_sync.saves.save_status import end_images
from trinity_sync.snapshot import slot_pool
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.spool import mark_image_failed, open_job_spool
from trinity_sync.snapshot.stager import Stager
from trinity_sync.snapshot.ticket import (
    failure_path,
    free_slot,
    hold_slot,
    lock_slot,
    read_cached_file,
    seal,
    ticket_path,
)


def staged_state(job: Job, step: int) -> dict[str, torch.Tensor]:
    sealed = [s for s in job.spool.tickets()[0] if s.ticket.step == step]
    with lock_slot(sealed[0].slot) as content:
        copy = bytes(content[: sealed[0].ticket.nbytes])
    return torch.load(io.BytesIO(copy), weights_only=True)


def test_what_is_staged_is_the_state_at_the_call(job: Job) -> None:
    weight = torch.arange(10.0)
    job.stage(1, {"model": {"w": weight}})
    weight.fill_(-1)
    assert staged_state(job, 1)["w"].tolist() == list(range(10))


def test_slots_are_reused_and_never_shrink(job: Job) -> None:
    inodes = set()
    for step, size in enumerate((10_000, 900_000, 5, 700_000), start=1):
        job.stage(step, {"model": {"w": torch.full((size,), float(step))}})
        assert torch.equal(staged_state(job, step)["w"], torch.full((size,), float(step)))
        inodes |= {s.slot.stat().st_ino for s in job.spool.tickets()[0]}
        job.commit(step)
    assert len(inodes) <= 2
    assert max(p.stat().st_size for p in job.spool.folder.glob("*.slot")) >= 3_600_000


def test_a_structure_that_changes_between_saves_leaves_no_trace_of_the_old_one(job: Job) -> None:
    states = [
        {"a": torch.zeros(1000), "b": torch.ones(10)},
        {"a": torch.ones(1000), "b": torch.zeros(10)},
        {"b": torch.ones(3, dtype=torch.bfloat16), "c": {"d": torch.tensor(2.5)}},
        {"a": torch.zeros(1000), "b": torch.ones(10)},
    ]
    for step, state in enumerate(states, start=1):
        job.commit_states(step, {"model": state})
        file = job.root / f"global_step_{step}/actor/model_world_size_1_rank_0.pt"
        again = torch.load(file, weights_only=True)
        assert again.keys() == state.keys()
        again_leaves = torch.utils._pytree.tree_leaves(again)
        for one, other in zip(again_leaves, torch.utils._pytree.tree_leaves(state), strict=True):
            assert torch.equal(one, other)


def test_staging_keeps_no_reference_to_the_live_tensors(job: Job) -> None:
    weight = torch.zeros(10)
    seen = weakref.ref(weight)
    job.stage(1, {"model": {"w": weight}})
    del weight
    gc.collect()
    assert seen() is None


def test_an_image_whose_save_failed_is_evicted_at_once_and_loudly(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.stage(1, {"model": {"w": torch.zeros(3)}})
    end_images(job.spool, job.request(1), "the disk is full")
    job.stage(2, {"model": {"w": torch.zeros(3)}})
    with caplog.at_level(logging.WARNING):
        staged = job.stage(3, {"model": {"w": torch.ones(3)}})
    assert "(model of step 1, role actor, rank 0) for step 3" in caplog.text
    assert staged.waited_s < 0.1
    assert sorted(s.ticket.step for s in job.spool.tickets()[0]) == [2, 3]


@pytest.mark.parametrize(("slot_wait_s", "is_away"), [(30, False), (300, True)])
def test_while_nothing_saves_training_does_not_wait_for_old_images_or_those_of_a_root_that_is_away(
    job: Job, slot_wait_s: float, is_away: bool
) -> None:
    now = [1e10]
    job.stagers[0] = Stager(job.spool, slot_wait_s=slot_wait_s, clock=lambda: now[0])
    if is_away:
        job.spool.away.touch()
    for step in range(1, 6):
        assert job.stage(step, {"model": {"w": torch.zeros(3)}}).waited_s < 1
        now[0] += 60
    assert sorted(s.ticket.step for s in job.spool.tickets()[0]) == [4, 5]


def test_weights_are_evicted_for_newer_weights_while_a_checkpoint_waits_for_its_writer(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1e10]
    job.stagers[0] = Stager(job.spool, slot_wait_s=300, clock=lambda: now[0])
    job.stage(1, {"model": {"w": torch.zeros(3)}})
    for step in (2, 3, 4):
        staged = job.stage(step, {"model": {"w": torch.zeros(3)}}, kind="state_dict")
        assert staged.waited_s < 1
        now[0] += slot_pool.WEIGHTS_WAIT_S
    assert sorted(s.ticket.step for s in job.spool.tickets()[0]) == [1, 4]
    assert caplog.text.count("Evicting unsaved image") == 2


def test_weights_that_a_checkpoint_shares_outlive_those_of_later_steps(job: Job) -> None:
    now = [1e10]
    job.stagers[0] = Stager(job.spool, slot_wait_s=300, clock=lambda: now[0])
    state = {"w": torch.zeros(3)}
    job.stage(1, {"model": state}, kind="state_dict")
    job.stage(1, {"optim": state}, also=("model",))
    for step in (2, 3, 4):
        now[0] += 2 * slot_pool.WEIGHTS_WAIT_S
        assert job.stage(step, {"model": state}, kind="state_dict").waited_s < 1
    assert sorted(s.ticket.step for s in job.spool.tickets()[0]) == [1, 1, 4]
    (optim,) = (s for s in job.spool.tickets()[0] if s.ticket.component == "optim")
    mark_image_failed(optim, "its disk was full")
    job.stage(5, {"model": state}, kind="state_dict")
    assert sorted(s.ticket.step for s in job.spool.tickets()[0]) == [1, 4, 5]


def test_weights_get_a_slot_of_their_own_if_checkpoints_hold_all(job: Job) -> None:
    now = [1e10]
    job.stagers[0] = Stager(job.spool, slot_wait_s=300, clock=lambda: now[0])
    for step in (1, 2):
        job.stage(step, {"model": {"w": torch.zeros(3)}})
    for step in (3, 4, 5):
        now[0] += 200
        staged = job.stage(step, {"model": {"w": torch.zeros(3)}}, kind="state_dict")
        assert staged.waited_s < 1
    assert sorted(s.ticket.step for s in job.spool.tickets()[0]) == [1, 2, 5]
    job.stagers[0].slots.wait_at_most(1)  # the process is about to end: the newest weights count
    assert job.stage(6, {"model": {"w": torch.zeros(3)}}, kind="state_dict").waited_s < 1
    assert len(job.spool.tickets()[0]) == 3


def test_no_image_of_a_save_is_evicted_for_its_second_submission(job: Job) -> None:
    job.stagers[0] = Stager(job.spool, slot_wait_s=0)
    job.stage(1, {"optim": {"w": torch.zeros(3)}})  # of one component alone
    for value in (2.0, 3.0):
        state = {"w": torch.full((3,), value)}
        job.stage(2, {"model": state, "optim": state}, kind="state_dict")
    found = [image.ticket for image in job.spool.read_step(job.save(2))]
    submissions = [
        {ticket.monotonic_s for ticket in found if ticket.component == component}
        for component in ("model", "optim")
    ]
    assert submissions[0] == submissions[1]
    assert len(submissions[0]) == 2


def test_a_save_that_waits_for_a_slot_says_so_and_fails_in_time(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_pool, "LONG_WAIT_S", 0.01)
    job.stagers[0] = Stager(job.spool, slot_wait_s=0.1, clock=lambda: 1e10)
    for step in (1, 2):
        job.stage(step, {"model": {"w": torch.zeros(3)}})
    with pytest.raises(SpoolError, match="step 3, role actor, rank 0: model is not saved"):
        job.stage(3, {"model": {"w": torch.zeros(3)}})
    assert caplog.text.count("Step 3 waits for a slot for model") == 1


def test_a_wall_clock_that_is_set_forward_evicts_no_fresh_image(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.stagers[0] = Stager(job.spool, slot_wait_s=60)
    for step in (1, 2):
        job.stage(step, {"model": {"w": torch.zeros(3)}})
    an_hour_ago = time.time() - 3600  # by the clock as it is set now
    for sealed in job.spool.tickets()[0]:
        os.utime(ticket_path(sealed.slot), (an_hour_ago, an_hour_ago))
    committer = threading.Timer(0.05, job.commit, args=(1,))
    committer.start()
    job.stage(3, {"model": {"w": torch.zeros(3)}})
    committer.join()
    assert sorted(s.ticket.step for s in job.spool.tickets()[0]) == [2, 3]
    assert "Evicting" not in caplog.text


def test_images_of_a_process_that_was_killed_are_evicted_oldest_first(job: Job) -> None:
    def stage_and_die() -> None:
        for step in (1, 2):
            job.stage(step, {"model": {"w": torch.zeros(3)}})
        os.kill(os.getpid(), signal.SIGKILL)

    assert end_of(stage_and_die) == -signal.SIGKILL
    first = job.spool.read_step(job.save(1))[0]
    os.utime(ticket_path(first.slot))  # as of a wall clock that was set back in between
    job.stage(3, {"model": {"w": torch.zeros(3)}})
    assert sorted(s.ticket.step for s in job.spool.tickets()[0]) == [2, 3]


@pytest.mark.parametrize("how", ["from before a reboot", "torn"])
def test_an_image_whose_ticket_tells_nothing_is_evicted(job: Job, how: str) -> None:
    for step in (1, 2):
        job.stage(step, {"model": {"w": torch.zeros(3)}})
    image = job.spool.read_step(job.save(2))[0]
    if how == "torn":
        ticket_path(image.slot).write_text("{")
    else:
        seal(image.slot, replace(image.ticket, monotonic_s=time.monotonic() + 1e6))
    job.stagers.pop(0).close()
    job.stagers[0] = Stager(job.spool, slot_wait_s=60)
    assert job.stage(3, {"model": {"w": torch.zeros(3)}}).waited_s < 60
    assert sorted(s.ticket.step for s in job.spool.tickets()[0]) == [1, 3]


def test_an_image_that_another_trainer_has_just_sealed_is_not_evicted(job: Job) -> None:
    now = [1e10]
    job.stagers[0] = other = Stager(job.spool, slots=1, slot_wait_s=30, clock=lambda: now[0])
    job.stage(1, {"model": {"w": torch.zeros(3)}})
    now[0] += 60

    def clock() -> float:
        if job.spool.read_step(job.save(1)):  # its age has been asked for
            job.commit(1)
            job.stagers[0] = other
            job.stage(2, {"model": {"w": torch.ones(3)}})
        return now[0]

    job.stagers[0] = Stager(job.spool, slots=1, slot_wait_s=0.2, clock=clock)
    with pytest.raises(SpoolError, match="step 3"):
        job.stage(3, {"model": {"w": torch.zeros(3)}})
    assert [s.ticket.step for s in job.spool.tickets()[0]] == [2]
    other.close()


def test_a_slot_that_another_trainer_has_just_filled_is_not_free(job: Job) -> None:
    mine, other = (Stager(job.spool, slots=1, slot_wait_s=0.2, clock=lambda: 1e10) for _ in "12")
    state = {"model": {"w": torch.ones(3)}}
    other.stage(job.origin(1), state, seals=False)
    assert other.publish(job.origin(1), "model") is not None
    (published,) = job.spool.folder.glob("*.published")
    other.memory.close()  # whose thread reads it, too
    with (
        when_opened(published, lambda: other.stage(job.origin(2), state)),
        pytest.raises(SpoolError, match="step 3"),
    ):
        mine.stage(job.origin(3), state)
    assert [s.ticket.step for s in job.spool.tickets()[0]] == [2]
    other.close()
    mine.close()


def test_an_image_that_is_being_written_is_never_evicted(job: Job) -> None:
    for step in (1, 2):
        job.stage(step, {"model": {"w": torch.full((3,), float(step))}})
    first, second = (s.slot for s in job.spool.tickets()[0])
    with (
        lock_slot(first),
        lock_slot(second),
        pytest.raises(SpoolError, match=r"step 3, role actor"),
    ):
        job.stage(3, {"model": {"w": torch.zeros(3)}})
    assert staged_state(job, 1)["w"].tolist() == [1, 1, 1]


def prewarm(stager: Stager, nbytes: int) -> None:
    """Prewarm memory for a model, to the end."""
    stager.memory.map_slots(lambda: [("actor", "model", 0, nbytes)])
    stager.memory.run(looks=False)


def test_prewarming_touches_the_memory_of_the_next_image_and_of_no_other(job: Job) -> None:
    prewarm(job.stager(), 40 << 20)
    first, second = (job.spool.slot("actor", "model", 0, number) for number in (0, 1))
    assert mapped_nbytes(first) >= 40 << 20
    assert second.stat().st_blocks == 0
    job.stage(1, {"model": {"w": torch.ones(10 << 20)}})
    assert staged_state(job, 1)["w"].all()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_image_takes_no_page_fault_a_page_and_is_mapped_afterwards(
    job: Job, overlap: bool
) -> None:
    torch.set_num_threads(1)
    stager = job.stager()
    plan = stager.lay_out(job.origin(1), {"model": {"w": torch.ones(16 << 20)}}, overlap=overlap)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    stager.copy(plan)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < (64 << 20) // mmap.PAGESIZE // 4
    stager.memory.run(looks=False)
    assert mapped_nbytes(job.spool.slot("actor", "model", 0, 0)) >= 64 << 20


def test_threads_that_fill_fresh_memory_in_two_ways_make_one_image(job: Job) -> None:
    torch.set_num_threads(4)
    state = {f"w{number}": torch.rand(3_000_001) for number in range(12)}
    job.stage(1, {"model": state})
    assert all(map(torch.equal, staged_state(job, 1).values(), state.values()))


def test_what_maps_an_image_keeps_its_slot_from_nobody_and_survives_that_it_is_cut(
    job: Job,
) -> None:
    slot = Slot(job.spool.slot("actor", "model", 0, 0))
    slot.image(20 << 20)

    def cut() -> bool:
        assert slot.try_lock()
        slot.unlock()
        os.truncate(slot.path, 4096)
        return False

    slot.touch(None, cut)
    assert not slot.is_mapped
    slot.close(remove=True)


def test_a_save_ends_what_touches_memory_and_uses_its_slot(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    touching = threading.Event()

    def touch(slot: Slot, nbytes: int, ended: Callable[[], bool]) -> None:
        assert slot.try_lock()
        touching.set()
        while not ended():
            time.sleep(0.001)
        slot.unlock()

    monkeypatch.setattr(Slot, "touch", touch)
    job.stager().memory.map_slots(lambda: [("actor", "model", 0, 100)])
    assert touching.wait(WAIT_S)
    job.stage(1, {"model": {"w": torch.ones(3)}})
    assert [sealed.slot for sealed in job.spool.tickets()[0]] == [
        job.spool.slot("actor", "model", 0, 0)
    ]


def test_a_slot_that_is_being_filled_keeps_its_lock_while_slots_are_prewarmed(job: Job) -> None:
    slot = job.stager().slots.list_slots("actor", "model", 0)[0]
    assert slot.try_lock()
    prewarm(job.stager(), 1 << 20)
    other = Slot(slot.path)
    assert not other.try_lock()
    slot.unlock()
    assert other.try_lock()
    prewarm(job.stager(), 1 << 20)
    other.close(remove=False)


def test_a_view_that_outlives_its_lock_does_not_keep_it(job: Job) -> None:
    """A failed write's traceback kept its view, and so every retry of it waiting for ever."""
    job.stage(1, {"model": {"w": torch.zeros(3)}})
    slot = job.spool.tickets()[0][0].slot
    with lock_slot(slot) as content:
        view = content[:10]
    assert job.stager().slots.list_slots("actor", "model", 0)[0].try_lock()
    assert len(view) == 10


def test_a_spool_that_is_too_small_says_how_many_bytes_it_lacks(job: Job) -> None:
    with pytest.raises(SpoolFullError, match=r"TRINITY_SYNC_SPOOL"):
        job.spool.require_room(1 << 60)
    with pytest.raises(SpoolFullError, match=r"needs [\d,]+ more bytes and [\d,]+ are free"):
        Slot(job.spool.slot("actor", "model", 0, 0)).image(1 << 50)
    job.stage(1, {"model": {"w": torch.zeros(3)}})  # and goes on working


def test_the_slots_of_a_job_are_room_for_its_images(job: Job, small_disk: Path) -> None:
    spool = open_job_spool(small_disk / "spool", job.root)
    with closing(Stager(spool)) as stager:
        stager.stage(job.origin(1), {"model": {"w": torch.zeros(3)}})
        spool.require_room(3 << 20)  # of 4, half of which the slot has
        with pytest.raises(SpoolFullError, match="need 5,242,880 bytes"):
            spool.require_room(5 << 20)


def test_a_slot_that_its_commit_frees_does_not_count_as_evicted(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    def commit_meanwhile() -> float:
        if job.spool.read_step(job.save(1)) and job.spool.read_step(job.save(2)):
            job.commit(1)
        return time.monotonic()

    job.stagers[0] = Stager(job.spool, slot_wait_s=60, clock=commit_meanwhile)
    for step in (1, 2, 3):
        job.stage(step, {"model": {"w": torch.zeros(3)}})
    assert sorted(s.ticket.step for s in job.spool.tickets()[0]) == [2, 3]
    assert "Evicting" not in caplog.text


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_in_a_full_spool_all_is_sealed_or_nothing(job: Job) -> None:
    states = {"model": {"w": torch.zeros(3)}, "optim": {"s": torch.ones(3)}}
    second = job.spool.slot("actor", "optim", 0, 0)
    temporary = second.with_name(f"{second.name}.ticket.tmp")
    with (
        when_opened(temporary, full),
        pytest.raises(SpoolError, match=r"nothing was submitted, because .* No space left"),
    ):
        job.stage(1, states)
    assert job.spool.tickets() == ([], [])
    assert not temporary.exists()
    job.stage(1, states)
    assert len(job.spool.tickets()[0]) == 2


def test_an_evicted_image_leaves_nothing_if_no_other_takes_its_place(job: Job) -> None:
    job.stagers[0] = Stager(job.spool, slots=1)
    states = {"model": {"w": torch.zeros(3)}, "optim": {"s": torch.ones(3)}}
    job.stage(1, states)
    end_images(job.spool, job.request(1), "the disk is full")
    first = job.spool.slot("actor", "model", 0, 0)
    temporary = first.with_name(f"{first.name}.ticket.tmp")
    with when_opened(temporary, full), pytest.raises(SpoolError, match="No space left"):
        job.stage(2, states)
    job.stager().close()
    job.spool.remove_if_unused()
    assert not job.spool.folder.exists()


def test_a_state_that_cannot_be_saved_hands_nothing_over(job: Job) -> None:
    with pytest.raises(
        ImageError, match=r"step 1, role actor, rank 0.*extra_state cannot be staged"
    ):
        job.stage(1, {"model": {"w": torch.zeros(3)}, "extra_state": (i for i in range(3))})
    assert job.spool.tickets() == ([], [])
    job.stage(1, {"model": {"w": torch.zeros(3)}})


def test_another_users_spool_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "spool"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(SpoolError, match="chmod 700"):
        open_job_spool(open_to_all, tmp_path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(SpoolError, match="not a folder"):
        open_job_spool(link, tmp_path)


def test_closing_removes_free_slots_and_the_others_are_removed_once_their_image_is_committed(
    job: Job,
) -> None:
    job.stage(1, {"model": {"w": torch.zeros(3)}})
    job.stagers.pop(0).close()
    for _ in range(2):
        left = {path.name.partition(".slot")[2] for path in job.spool.folder.glob("*.slot*")}
        assert left == {"", ".ticket", ".closed"}
        job.spool.remove_if_unused()
        job.spool.remove_closed()
    job.commit(1)
    job.spool.remove_closed()
    assert not [*job.spool.folder.glob("*.slot*")]


def test_threads_that_close_at_the_same_moment_do_not_trip_over_each_other(job: Job) -> None:
    meet = threading.Barrier(4)

    def close(stager: Stager) -> None:
        meet.wait()
        stager.close()

    for _ in range(10):
        stager = Stager(job.spool)
        for rank in range(20):
            stager.slots.list_slots("actor", "model", rank)
        with ThreadPoolExecutor(4) as threads:
            for end in [threads.submit(close, stager) for _ in range(4)]:
                end.result()
        assert not [*job.spool.folder.glob("*.slot*")]


def test_ranks_that_end_at_the_same_moment_do_not_trip_over_each_other(job: Job) -> None:
    for _ in range(200):
        job.spool.receipts.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(4) as ranks:
            for end in [ranks.submit(job.spool.remove_if_unused) for _ in range(4)]:
                end.result()
    assert not job.spool.folder.exists()


@pytest.mark.parametrize("changed", ["nothing", "a small tensor", "the end of a large one"])
def test_a_state_is_held_if_no_byte_of_it_has_changed_however_large(job: Job, changed: str) -> None:
    state = {f"small.{number}": torch.full((7,), float(number)) for number in range(100)}
    state["large"] = torch.arange(3_000_000.0)
    job.stage(1, {"model": state})
    if changed == "a small tensor":
        state["small.99"][6] = -1
    elif changed == "the end of a large one":
        state["large"][-1] = -1
    assert job.stager().holds(job.origin(1), "model", state) == (changed == "nothing")


def test_the_failure_of_a_save_is_never_noted_at_the_image_of_a_later_save(job: Job) -> None:
    job.stagers[0] = Stager(job.spool, slot_wait_s=0.0)  # whatever waits may be evicted
    for step in (1, 2):
        job.stage(step, {"model": {"w": torch.ones(10)}})
    (slot,) = (sealed.slot for sealed in job.spool.tickets()[0] if sealed.ticket.step == 1)
    evict = partial(job.stage, 3, {"model": {"w": torch.ones(10)}})
    mark = failure_path(slot)
    with when_opened(mark.with_name(mark.name + TEMPORARY_SUFFIX), evict):
        end_images(job.spool, job.request(1), "its disk was full")
    assert {s.ticket.step: s.failed for s in job.spool.tickets()[0]} == {1: True, 3: False}


def test_the_commit_of_an_evicted_image_does_not_free_the_one_in_its_place(job: Job) -> None:
    job.stagers[0] = Stager(job.spool, slots=1, slot_wait_s=0.0)
    job.stage(1, {"model": {"w": torch.ones(10)}})
    (evicted,) = job.spool.tickets()[0]
    job.stage(2, {"model": {"w": torch.ones(10)}})
    free_slot(evicted.slot, evicted.ticket.image, "its digest")
    (sealed,) = job.spool.tickets()[0]
    assert (sealed.slot, sealed.ticket.step) == (evicted.slot, 2)
    assert read_cached_file(evicted.slot) is None


def test_a_save_that_waits_for_a_slot_gives_up_when_the_process_is_about_to_end(job: Job) -> None:
    stager, state = Stager(job.spool, slots=1, slot_wait_s=300), {"w": torch.zeros(3)}
    stager.stage(job.origin(1), {"model": state})
    (slot,) = job.spool.folder.glob("*.slot")
    with hold_slot(slot), ThreadPoolExecutor(1) as thread:  # as its writer does
        waiting = thread.submit(stager.stage, job.origin(2), {"model": state})
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        stager.slots.wait_at_most(0.1)
        with pytest.raises(SpoolError, match="every slot is still being written out"):
            waiting.result(60)
    stager.close()
