"""The spool is removed, or a slot cut short, while a trainer uses it: the next save works.

systemd's RemoveIPC removes it at a logout, cleaners of temporary files do, and so does ``rm -r``.
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
from trinity_sync.snapshot.spool import JobSpool, get_job_spool
from trinity_sync.weights.version_view import SlotReader


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((5000,), float(step))}}


def committed(job: Job, step: int) -> torch.Tensor:
    job.commit(step)
    file = job.root / f"global_step_{step}/actor/model_world_size_1_rank_0.pt"
    return torch.load(file, weights_only=True)["w"]


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
        assert torch.equal(committed(job, step), state(step)["model"]["w"])
    for folder in (job.spool.folder, job.spool.folder.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert get_job_spool(job.spool.folder, job.save(7)).read_root() == job.root


def test_slots_of_a_removed_spool_take_no_memory_once_they_are_used_again(job: Job) -> None:
    job.stage(1, state(1))
    remove_spool(job)
    job.stage(2, state(2))
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert [line for line in maps if str(job.spool.folder) in line and "(deleted)" in line] == []


def test_an_upload_whose_slot_was_removed_is_staged_again(job: Job) -> None:
    first = upload(job, 1, state(1)["model"])
    remove_spool(job)
    assert job.stager().publish(job.origin(1), "model") is None
    again = upload(job, 1, state(1)["model"])
    assert again.images[0].image != first.images[0].image
    remove_spool(job)
    job.stage(1, state(1))
    assert torch.equal(committed(job, 1), state(1)["model"]["w"])


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
    assert torch.equal(committed(job, 2), state(2)["model"]["w"])


def test_a_trainer_that_ends_leaves_the_slots_that_have_replaced_its_own(job: Job) -> None:
    job.stage(1, state(1))
    ends = job.stagers.pop(0)
    remove_spool(job)
    version = upload(job, 2, state(2)["model"], run=2)
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
    assert torch.equal(committed(job, 2), state(2)["model"]["w"])


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
    (image,) = upload(job, 1, state(1)["model"]).images
    reader = SlotReader(Path(image.slot))
    assert reader.try_lock(image.image)
    reader.unlock()
    os.truncate(image.slot, 5000)
    assert reader.try_lock(image.image) is None
    remove_spool(job)
    assert reader.try_lock(image.image) is None
    (image,) = upload(job, 2, state(2)["model"]).images
    assert Path(image.slot) == reader.path
    assert reader.try_lock(image.image)
    assert state(2)["model"]["w"].numpy().tobytes() in reader.memory.numpy().tobytes()
    reader.unlock()
