"""Readers share slots with training, which never waits for one, nor stops if a slot is removed.

systemd's RemoveIPC removes a spool at a logout, cleaners of temporary files do, and `rm -r` does.
"""

import os
import shutil
import stat
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from tests.support.dying import end_of
from tests.support.forked import Program
from tests.support.job import Job
from tests.support.weights import upload
from tests.unit.conftest import Open
from trinity_sync.errors import SpoolError
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.spool import JobSpool, get_job_spool, open_job_spool
from trinity_sync.snapshot.ticket import hold_image, lock_slot, read_version_tag
from trinity_sync.weights.version_view import SlotReader, VersionOpener
from trinity_sync.weights.versions import Version


def weights(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5000,), float(step))}


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": weights(step)}


def committed(job: Job, step: int) -> torch.Tensor:
    job.commit(step)
    file = job.root / f"global_step_{step}/actor/model_world_size_1_rank_0.pt"
    return torch.load(file, weights_only=True)["w"]


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
    free = Slot(held.path).try_lock()
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
    mapped(upload(job, 2, weights(2), run=2)).unlock()
    job.commit_states(3, state(3), run=2)
    job.stagers.pop(0).close()
    assert slots(job) == []


def test_a_sleeping_reader_keeps_its_version_and_delays_neither_saves_nor_uploads(
    job: Job,
) -> None:
    asleep = mapped(upload(job, 1, weights(1)))
    before = asleep.memory.clone()
    for step in range(1, 6):
        assert job.stage(step, state(step)).waited_s < 0.1
        assert torch.equal(committed(job, step), weights(step)["w"])
        assert upload(job, step + 10, weights(step))
    assert torch.equal(asleep.memory, before)
    assert len(slots(job)) == 2  # the others took turns in one
    assert asleep.try_lock(read_version_tag(asleep.path).image)  # type: ignore[union-attr]


def test_a_save_of_an_uploaded_step_takes_its_image(job: Job) -> None:
    version = upload(job, 1, weights(1))
    assert job.stage(1, state(1)).nbytes == 0
    ((sealed,), _) = job.spool.tickets()
    assert sealed.ticket.image == version.images[0].image
    assert torch.equal(committed(job, 1), weights(1)["w"])
    mapped(version).unlock()  # it stays a version, committed or not


def test_an_upload_of_a_saved_step_takes_its_image(job: Job) -> None:
    job.stage(1, state(1))
    ((sealed,), _) = job.spool.tickets()
    version = upload(job, 1, None)  # nothing is there that could be staged
    assert version.images[0].image == sealed.ticket.image
    job.commit(1)
    assert upload(job, 1, None) == version


def test_an_image_is_read_while_it_is_written_out(job: Job) -> None:
    job.stage(1, state(1))
    version = upload(job, 1, None)
    slot = Path(version.images[0].slot)
    with hold_image(slot, version.images[0].image), lock_slot(slot):
        mapped(version).unlock()
    reader = mapped(version)
    job.commit(1)  # and freed while it is read
    assert job.spool.tickets() == ([], [])
    reader.unlock()


def remove_spool(job: Job) -> None:
    while (spool := job.spool.folder.parent).exists():
        shutil.rmtree(spool, ignore_errors=True)  # the trainer's threads may replace a file in it


def test_a_folder_is_made_while_other_ranks_remove_it_as_unused(job: Job) -> None:
    """Those that end as a job is started again."""
    others, ended = JobSpool(job.spool.folder), threading.Event()

    def end_again_and_again() -> None:
        while not ended.is_set():
            others.remove_if_unused()

    rank = threading.Thread(target=end_again_and_again)
    rank.start()
    try:
        for _ in range(300):
            JobSpool(job.spool.folder, job.root).make()
    finally:
        ended.set()
        rank.join()


@pytest.mark.parametrize("unsaved", [0, 1, 2])
def test_a_save_after_the_spool_was_removed_makes_it_again(job: Job, unsaved: int) -> None:
    for step in (1, 2):
        job.stage(step, state(step))
        if step + unsaved <= 2:
            job.commit(step)
    remove_spool(job)
    for step in range(3, 8):
        job.stage(step, state(step))
        assert torch.equal(committed(job, step), weights(step)["w"])
    for folder in (job.spool.folder, job.spool.folder.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert get_job_spool(job.spool.folder, job.save(7)).read_root() == job.root


def test_slots_of_a_removed_spool_take_no_memory_once_they_are_used_again(job: Job) -> None:
    job.stage(1, state(1))
    remove_spool(job)
    job.stage(2, state(2))
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert [line for line in maps if str(job.spool.folder) in line and "(deleted)" in line] == []


def test_a_trainer_that_is_started_again_has_the_memory_of_slots_that_a_reader_has_mapped(
    job: Job, small_disk: Path
) -> None:
    job.spool = open_job_spool(small_disk / "spool", job.root)  # of 4 MiB, as two slots
    opener, large = VersionOpener("reader"), {"w": torch.ones(300_000)}
    for step in (1, 2):
        with opener.open_images(upload(job, step, large), lambda _: ()):
            pass
    job.stagers.pop(0).close()
    job.stage(3, {"model": large}, run=2)


def test_memory_that_is_read_or_filled_stays_when_its_trainer_ends(job: Job) -> None:
    reader = mapped(upload(job, 1, weights(1)))
    slot, _ = job.stager().slots.acquire(job.origin(2), "model", 5000)
    filled = slot.begin("an image", 5000)
    job.stagers.pop(0).close()
    assert end_of(lambda: (filled.numpy().fill(1), reader.memory.numpy().tobytes())) == 0


def test_a_reader_keeps_nothing_of_the_training_that_was_in_the_root_before(
    job: Job, tmp_path: Path
) -> None:
    opener, again = VersionOpener("reader"), Job.open(tmp_path / "again", job.spool.folder.parent)
    for begun in (job, again):
        with opener.open_images(upload(begun, 1, weights(1)), lambda _: ()):
            maps = Path("/proc/self/maps").read_text().splitlines()
    assert [line for line in maps if str(job.spool.folder) in line and " r--s " in line] == []
    again.close()


def test_an_upload_whose_slot_was_removed_is_staged_again(job: Job) -> None:
    first = upload(job, 1, weights(1))
    remove_spool(job)
    assert job.stager().publish(job.origin(1), "model") is None
    assert upload(job, 1, weights(1)).images[0].image != first.images[0].image
    remove_spool(job)
    job.stage(1, state(1))
    assert torch.equal(committed(job, 1), weights(1)["w"])


def test_a_slot_that_is_removed_before_its_seal_is_not_sealed(job: Job) -> None:
    job.stage(1, state(1))
    job.commit(1)
    stager, origin = job.stager(), job.origin(2)
    stager.stage(origin, state(2), seals=False)
    plan = stager.lay_out(origin, {**state(2), "optim": {"s": torch.ones(3)}})
    remove_spool(job)
    with pytest.raises(
        SpoolError, match=r"step 2, role actor, rank 0: nothing was .*model.* was removed"
    ):
        stager.copy(plan)
    assert job.spool.tickets() == ([], [])
    job.stage(2, state(2))
    assert torch.equal(committed(job, 2), weights(2)["w"])


def test_a_trainer_that_ends_leaves_the_slots_that_have_replaced_its_own(job: Job) -> None:
    job.stage(1, state(1))
    ends = job.stagers.pop(0)
    remove_spool(job)
    version = upload(job, 2, weights(2), run=2)
    ends.close()
    reader = SlotReader(Path(version.images[0].slot))
    assert reader.try_lock(version.images[0].image)
    reader.unlock()


def test_a_child_of_a_trainer_writes_into_the_file_that_has_the_slots_name(job: Job) -> None:
    job.stage(1, state(1))
    size = job.spool.slot("actor", "model", 0, 0).stat().st_size
    remove_spool(job)
    job.spool.make()
    job.spool.slot("actor", "model", 0, 0).write_bytes(bytes(size))
    assert end_of(lambda: job.stage(2, state(2))) == 0
    assert torch.equal(committed(job, 2), weights(2)["w"])


def test_a_coordinator_finds_room_and_saves_after_the_spool_was_removed(
    job: Job, coordinator_of: Open
) -> None:
    coordinator = coordinator_of()
    coordinator.save(1, state(1))
    remove_spool(job)
    coordinator.prewarm({"model": 1 << 20})
    remove_spool(job)
    coordinator.save(2, state(2))
    assert [sealed.ticket.step for sealed in job.spool.tickets()[0]] == [2]


@pytest.mark.parametrize("left", [0, 5000, 3 << 20])
def test_a_slot_that_was_cut_short_is_filled_again(job: Job, left: int) -> None:
    script = textwrap.dedent(
        f"""
        import os
        import torch
        from pathlib import Path
        from tests.support.job import Job
        from trinity_sync.snapshot.spool import JobSpool
        job = Job(Path({str(job.root)!r}), JobSpool(Path({str(job.spool.folder)!r})))
        for step in range(1, 5):
            job.stage(step, {{"model": {{"w": torch.full((1_000_000,), float(step))}}}})
            job.commit(step)
            for slot in job.spool.folder.glob("*.slot"):
                os.truncate(slot, min({left}, slot.stat().st_size))
        """
    )
    Program(script).end()
    for step in range(1, 5):
        file = job.root / f"global_step_{step}/actor/model_world_size_1_rank_0.pt"
        weight = torch.load(file, weights_only=True)["w"]
        assert torch.equal(weight, torch.full((1_000_000,), float(step)))


def test_a_version_in_a_slot_that_was_cut_short_or_removed_is_gone(job: Job) -> None:
    (image,) = upload(job, 1, weights(1)).images
    reader = SlotReader(Path(image.slot))
    assert reader.try_lock(image.image)
    reader.unlock()
    os.truncate(image.slot, 5000)
    assert reader.try_lock(image.image) is None
    remove_spool(job)
    assert reader.try_lock(image.image) is None
    (image,) = upload(job, 2, weights(2)).images
    assert Path(image.slot) == reader.path
    assert reader.try_lock(image.image)
    assert weights(2)["w"].numpy().tobytes() in reader.memory.numpy().tobytes()
    reader.unlock()
