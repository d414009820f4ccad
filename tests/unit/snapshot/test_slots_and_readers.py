"""Readers share slots with training, and training never waits for one."""

import os
from pathlib import Path

import torch

from tests.support.job import Job
from tests.support.weights import upload
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.ticket import lock_image, lock_slot, read_version_tag
from trinity_sync.weights.version_view import SlotReader
from trinity_sync.weights.versions import Version


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5000,), float(step))}


def mapped(version: Version) -> SlotReader:
    (image,) = version.images
    slot = SlotReader(Path(image.slot))
    assert slot.try_lock(image.image)
    return slot


def slots(job: Job) -> list[str]:
    return sorted(path.name for path in job.spool.folder.glob("*.slot"))


def steps_published(job: Job) -> list[int]:
    said = [read_version_tag(slot) for slot in job.spool.folder.glob("*.slot")]
    return sorted(each.step for each in said if each)


def test_uploads_alternate_between_two_slots_and_the_newest_stays_readable(job: Job) -> None:
    for step in range(1, 6):
        newest = upload(job, step, weights(step))
        assert steps_published(job) == [step - 1, step][-min(step, 2) :]
        mapped(newest).unlock()
    assert len(slots(job)) == 2


def test_a_reader_keeps_its_version_while_training_goes_on(job: Job) -> None:
    first = mapped(upload(job, 1, weights(1)))
    before = first.memory.clone()
    for step in range(2, 7):
        assert upload(job, step, weights(step))
    assert torch.equal(first.memory, before)
    assert len(slots(job)) == 2  # the others took turns in one
    first.unlock()


def test_a_reading_within_a_reading_does_not_give_the_slot_away(job: Job) -> None:
    outer = mapped(upload(job, 1, weights(1)))
    assert outer.try_lock(read_version_tag(outer.path).image)  # type: ignore[union-attr]
    outer.unlock()
    for step in range(2, 7):
        upload(job, step, weights(step))
    assert read_version_tag(outer.path).step == 1  # type: ignore[union-attr]
    outer.unlock()


def test_a_child_that_is_forked_while_its_parent_reads_gives_back_what_it_reads_itself(
    job: Job,
) -> None:
    held = mapped(upload(job, 1, weights(1)))
    image = read_version_tag(held.path).image  # type: ignore[union-attr]
    ends, tell = os.pipe()
    answer, say = os.pipe()
    child = os.fork()
    if not child:
        try:
            assert held.try_lock(image)
            held.unlock()
            os.write(say, b"!")
            os.close(tell)
            os.read(ends, 1)
        finally:
            os._exit(0)
    os.close(say)
    held.unlock()
    said = os.read(answer, 1)
    slot = Slot(held.path)
    free = slot.try_lock()
    for fd in (tell, ends, answer):
        os.close(fd)
    os.waitpid(child, 0)
    assert said
    assert free


def test_where_readers_hold_every_slot_one_is_added_and_stays(job: Job) -> None:
    held = [mapped(upload(job, step, weights(step))) for step in (1, 2)]
    before = [slot.memory.clone() for slot in held]
    third = upload(job, 3, weights(3))
    assert len(slots(job)) == 3
    mapped(third).unlock()
    assert all(torch.equal(slot.memory, old) for slot, old in zip(held, before, strict=True))
    for slot in held:
        slot.unlock()
    for step in range(4, 9):
        upload(job, step, weights(step))
    assert len(slots(job)) == 3
    job.stagers.pop(0).close()
    assert slots(job) == []


def test_slots_that_an_earlier_process_added_are_used_and_removed(job: Job) -> None:
    held = [mapped(upload(job, step, weights(step))) for step in (1, 2)]
    upload(job, 3, weights(3))
    job.kill()
    for slot in held:
        slot.unlock()
    upload(job, 1, weights(1), run=2)
    job.stagers.pop(0).close()
    assert slots(job) == []


def test_a_process_that_ends_late_leaves_the_slots_to_the_one_that_was_started(job: Job) -> None:
    upload(job, 1, weights(1))
    ends_late = job.stagers.pop(0)
    upload(job, 1, weights(1), run=2)
    ends_late.close()
    version = upload(job, 2, weights(2), run=2)
    mapped(version).unlock()
    job.commit_states(3, {"model": weights(3)}, run=2)
    job.stagers.pop(0).close()
    assert slots(job) == []


def test_a_sleeping_reader_delays_no_save(job: Job) -> None:
    asleep = mapped(upload(job, 1, weights(1)))
    for step in range(1, 6):
        staged = job.stage(step, {"model": weights(step)})
        assert staged.waited_s < 0.1
        job.commit(step)
        saved = job.root / f"global_step_{step}/actor/model_world_size_1_rank_0.pt"
        assert torch.equal(torch.load(saved)["w"], weights(step)["w"])
    assert asleep.try_lock(read_version_tag(asleep.path).image)  # type: ignore[union-attr]


def test_a_save_of_an_uploaded_step_takes_its_image(job: Job) -> None:
    version = upload(job, 1, weights(1))
    staged = job.stage(1, {"model": weights(1)})
    assert staged.nbytes == 0
    ((sealed,), _) = job.spool.tickets()
    assert sealed.ticket.image == version.images[0].image
    job.commit(1)
    saved = job.root / "global_step_1/actor/model_world_size_1_rank_0.pt"
    assert torch.equal(torch.load(saved, weights_only=True)["w"], weights(1)["w"])
    mapped(version).unlock()  # it stays a version, committed or not


def test_a_save_of_another_structure_does_not_take_it(job: Job) -> None:
    upload(job, 1, weights(1))
    assert job.stage(1, {"model": {"adapter": torch.ones(3)}}).nbytes > 0
    job.commit(1)
    saved = job.root / "global_step_1/actor/model_world_size_1_rank_0.pt"
    assert list(torch.load(saved, weights_only=True)) == ["adapter"]


def test_an_upload_of_a_saved_step_takes_its_image(job: Job) -> None:
    job.stage(1, {"model": weights(1)})
    ((sealed,), _) = job.spool.tickets()
    version = upload(job, 1, None)  # nothing is there that could be staged
    assert version.images[0].image == sealed.ticket.image
    job.commit(1)
    assert upload(job, 1, None) == version


def test_an_image_is_read_while_it_is_written_out(job: Job) -> None:
    job.stage(1, {"model": weights(1)})
    version = upload(job, 1, None)
    slot = Path(version.images[0].slot)
    with lock_image(slot), lock_slot(slot):
        mapped(version).unlock()
    reader = mapped(version)
    job.commit(1)  # and freed while it is read
    assert job.spool.tickets() == ([], [])
    reader.unlock()
