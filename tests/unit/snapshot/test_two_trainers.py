"""Two trainers of one job on one node use the same slots in turn, and each saves its own state.

A restarted trainer uses the slots of its predecessor, which may still run.
"""

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.dying import end_of
from tests.support.job import Job
from tests.support.weights import version_in
from trinity_sync.errors import ImageError
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.stager import Stager
from trinity_sync.snapshot.ticket import VersionTag
from trinity_sync.weights.version_view import SlotReader

State = dict[str, dict[str, Any]]


class Trainer:
    """One of the trainers: a run of the job with a stager of its own."""

    def __init__(self, job: Job, run: int, slots: int) -> None:
        self.job, self.run = job, run
        self.stager = Stager(job.spool, slots=slots, slot_wait_s=0.2)

    def state(self, step: int, numel: int = 5000) -> State:
        """The model differs in its data, the extra state in its headers."""
        value = float(100 * self.run + step)
        said = {"run": f"run {self.run}", "lr": value}
        return {"model": {"w": torch.full((numel,), value)}, "extra_state": said}

    def stage(self, step: int, state: State | None = None) -> None:
        self.job.stagers[0] = self.stager
        self.job.stage(step, state or self.state(step), run=self.run)

    def upload(self, step: int) -> None:
        state = {"model": self.state(step)["model"]}
        self.stager.stage(self.job.origin(step, run=self.run), state, seals=False)

    def publish(self, step: int) -> VersionTag | None:
        return self.stager.publish(self.job.origin(step, run=self.run), "model")

    def commit(self, step: int) -> State:
        """What is in the step's files, once they are committed."""
        self.job.commit(step, "model", "extra_state", run=self.run)
        folder = self.job.root / f"global_step_{step}/actor"
        found: State = {}
        for component in ("model", "extra_state"):
            file = folder / f"{component}_world_size_1_rank_0.pt"
            found[component] = torch.load(file, weights_only=True)
        return found


def same(one: State, other: State) -> bool:
    weights = [state["model"]["w"] for state in (one, other)]
    return torch.equal(*weights) and one["extra_state"] == other["extra_state"]


@pytest.fixture
def trainers(job: Job, request: pytest.FixtureRequest) -> Iterator[tuple[Trainer, Trainer]]:
    slots = getattr(request, "param", 1)
    both = Trainer(job, 1, slots), Trainer(job, 2, slots)
    yield both
    job.kill()
    for trainer in both:
        trainer.stager.close()


@pytest.mark.parametrize("trainers", [1, 2], indirect=True, ids=["one slot", "two slots"])
@pytest.mark.parametrize("seed", range(5))
def test_each_commit_holds_its_own_run_in_any_order_of_turns(
    trainers: tuple[Trainer, Trainer], seed: int
) -> None:
    chance = random.Random(seed)
    uploaded: dict[Trainer, int] = {}
    for step in range(1, 30):
        trainer = chance.choice(trainers)
        numel = 900_000 if chance.random() < 0.1 else 5000
        what = chance.choice(["upload", "publish", "save", "save the upload", "prewarm"])
        if what == "prewarm":
            nbytes = chance.choice([100, 8 << 20])
            trainer.stager.memory.map_slots(lambda nbytes=nbytes: [("actor", "model", 0, nbytes)])
        elif what == "upload":
            trainer.upload(step)
            uploaded[trainer] = step
        elif what == "publish" and trainer in uploaded:
            if published := trainer.publish(uploaded[trainer]):
                require_published(trainer, published)
        else:
            if what == "save the upload":
                step, numel = uploaded.pop(trainer, step), 5000
            trainer.stage(step, trainer.state(step, numel))
            assert same(trainer.commit(step), trainer.state(step, numel))


def require_published(trainer: Trainer, published: VersionTag) -> None:
    """Require that the slot of a published image holds the weights of that step."""
    weight = trainer.state(published.step)["model"]["w"]
    job = trainer.job
    (image,) = version_in(job.spool, job.root, published.run, published.step).images
    reader = SlotReader(Path(image.slot))
    assert reader.try_lock(published.image)
    assert weight.numpy().tobytes() in reader.memory.numpy().tobytes()
    reader.unlock()


def test_an_upload_that_another_trainer_has_overwritten_is_not_published(
    trainers: tuple[Trainer, Trainer],
) -> None:
    first, second = trainers
    first.upload(5)
    second.upload(6)
    assert first.publish(5) is None
    assert version_in(first.job.spool, first.job.root, 1, 5).images == ()
    require_published(second, second.publish(6))


def test_an_image_that_a_save_was_laid_out_with_stays_until_it_is_sealed(
    trainers: tuple[Trainer, Trainer],
) -> None:
    first, second = trainers
    first.upload(5)
    published = first.publish(5)
    plan = first.stager.lay_out(first.job.origin(5), first.state(5))
    second.upload(6)  # into a slot that it adds
    assert published.image in first.stager.copy(plan).images
    assert same(first.commit(5), first.state(5))


def test_a_layout_that_fails_releases_the_image(trainers: tuple[Trainer, Trainer]) -> None:
    first, second = trainers
    first.upload(5)
    unfit = {**first.state(5), "extra_state": (i for i in range(3))}
    with pytest.raises(ImageError, match="cannot pickle 'generator' object"):
        first.stager.stage(first.job.origin(5), unfit)
    second.stage(6)
    assert same(second.commit(6), second.state(6))


def test_a_trainer_killed_in_the_middle_of_an_image_leaves_no_image_that_is_used_again(
    trainers: tuple[Trainer, Trainer],
) -> None:
    first, _ = trainers
    first.upload(5)
    slot = first.job.spool.slot("actor", "model", 0, 0)

    def fill_in_part_and_die() -> None:
        filled = Slot(slot)
        assert filled.try_lock()
        filled.begin("another image", 20_000)[:1000] = 7
        os.kill(os.getpid(), signal.SIGKILL)

    assert end_of(fill_in_part_and_die) == -signal.SIGKILL
    assert first.publish(5) is None
    first.stage(5)
    assert same(first.commit(5), first.state(5))
    first.stage(6)
    assert same(first.commit(6), first.state(6))


def test_a_child_of_a_trainer_shares_no_lock_with_it(trainers: tuple[Trainer, Trainer]) -> None:
    parent, other = trainers
    parent.upload(5)
    (slot,) = parent.stager.slots.list_slots("actor", "model", 0)
    assert slot.try_lock()

    def end() -> None:
        assert not slot.try_lock()
        parent.stager.close()  # it is the parent's to remove

    assert end_of(end) == 0
    (same_slot,) = other.stager.slots.list_slots("actor", "model", 0)
    assert not same_slot.try_lock()
    slot.unlock()
    assert parent.publish(5)


@pytest.mark.parametrize("instant", range(1, 9))
def test_a_trainer_that_ends_leaves_the_folder_to_one_that_begins_meanwhile(
    job: Job, instant: int
) -> None:
    job.spool.receipts.mkdir()
    seen = 0

    def look(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if active and event in ENDING:
            seen += 1
            if seen == instant:
                active.clear()  # what the other does is none of these
                job.stage(1, {"model": {"w": torch.ones(3)}})

    active = [True]
    sys.addaudithook(look)  # it stays until the process ends
    job.spool.remove_if_unused()
    active.clear()
    if seen < instant:
        assert not job.spool.folder.exists()
        return
    assert [sealed.ticket.step for sealed in job.spool.tickets()[0]] == [1]
    assert job.spool.read_root() == job.root
    job.commit(1)


ENDING = {"os.listdir", "os.scandir", "os.remove", "os.rmdir", "shutil.rmtree"}
"""Audit events of what removes a folder, each raised before the deed."""
