"""Committed shards come back from the spool or from disk, and always as the manifest has them."""

import logging
import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.disk import flip_a_byte
from tests.support.dying import end_of
from tests.support.job import Job
from trinity_sync.errors import CommitError
from trinity_sync.fs.records import encode_record
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import KEPT_SUFFIX, read_cached_file
from trinity_sync.storage.restore import RestoredShard, fill_states, load_shards, load_states

SHARD = "actor/model_world_size_1_rank_0.pt"


def state(value: float, size: int = 20_000) -> dict[str, Any]:
    return {"w": torch.full((size,), value)}


def save(job: Job, step: int, value: float) -> None:
    job.commit_states(step, {"model": state(value)})


def load_shard(root: Path, step: int, path: str, *, spool: JobSpool | None = None) -> RestoredShard:
    (restored,) = load_shards(root, step, [path], spool=spool)
    return restored


def load(job: Job, step: int) -> RestoredShard:
    restored = load_shard(job.root, step, SHARD, spool=job.spool)
    expected = torch.load(job.root / f"global_step_{step}" / SHARD)
    assert torch.equal(restored.state["w"], expected["w"])
    return restored


def kept_slots(job: Job) -> list[Path]:
    return sorted(slot for slot in job.spool.folder.glob("*.slot") if read_cached_file(slot))


def test_what_was_restored_from_the_spool_is_not_changed_by_the_next_save(job: Job) -> None:
    save(job, 1, 1.5)
    restored = load(job, 1)
    assert restored.source == "spool"
    assert load_shard(job.root, 1, SHARD).source == "disk"
    save(job, 2, 2)
    assert torch.equal(restored.state["w"], torch.full((20_000,), 1.5))


def test_a_slot_that_was_filled_again_no_longer_restores_the_old_step(job: Job) -> None:
    save(job, 1, 1)
    assert len(kept_slots(job)) == 1
    job.stage(2, {"model": state(2)})  # sealed, not committed
    assert kept_slots(job) == []
    assert load(job, 1).source == "disk"


def test_a_borrowed_state_is_the_slot_which_is_locked_meanwhile(job: Job) -> None:
    """What is written to it does not reach the slot."""
    save(job, 1, 1)
    (path,) = kept_slots(job)
    slot = Slot(path)
    shards = load_shards(job.root, 1, [SHARD], spool=job.spool, borrow=[SHARD])
    weight = next(shards).state["w"]
    assert torch.equal(weight, torch.full((20_000,), 1.0))
    assert str(path) in Path("/proc/self/maps").read_text().split("rw-p", 1)[1]
    assert not slot.try_lock()
    weight.zero_()
    shards.close()
    assert slot.try_lock()
    slot.close(remove=False)
    assert load(job, 1).source == "spool"


def test_a_state_that_cannot_be_borrowed_is_read_from_disk(job: Job) -> None:
    save(job, 1, 1)
    (slot,) = kept_slots(job)
    for content in (slot.read_bytes()[:5000], b""):
        slot.write_bytes(content)
        (restored,) = load_shards(job.root, 1, [SHARD], spool=job.spool, borrow=[SHARD])
        assert restored.source == "disk"
        assert torch.equal(restored.state["w"], torch.full((20_000,), 1.0))


def test_slots_of_equal_files_are_borrowed_and_unlocked_when_that_ends_early(job: Job) -> None:
    names = ("model", "optim")
    job.stage(1, {name: state(1) for name in names})
    job.commit(1, *names)
    paths = [f"actor/{name}_world_size_1_rank_0.pt" for name in names]
    with closing(load_shards(job.root, 1, paths, spool=job.spool, borrow=paths)) as shards:
        next(shards)
    for path in kept_slots(job):
        slot = Slot(path)
        assert slot.try_lock()
        slot.close(remove=False)


@pytest.mark.parametrize("borrow", [[], [SHARD]], ids=["copied", "borrowed"])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_a_kept_image_with_a_flipped_byte_is_not_used(
    job: Job, place: float, borrow: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    save(job, 1, 1)
    (slot,) = kept_slots(job)
    nbytes = step_folder(job.root, 1).joinpath(SHARD).stat().st_size
    flip_a_byte(slot, int(place * (nbytes - 1)))
    with caplog.at_level(logging.WARNING):
        (restored,) = load_shards(job.root, 1, [SHARD], spool=job.spool, borrow=borrow)
    assert restored.source == "disk"
    assert torch.equal(restored.state["w"], torch.full((20_000,), 1.0))
    assert f"no longer holds {SHARD}" in caplog.text


def test_a_note_of_another_file_is_passed_over(job: Job) -> None:
    save(job, 1, 1)
    (slot,) = kept_slots(job)
    kept = read_cached_file(slot)
    assert kept is not None
    other = replace(kept, file_digest="xxh3-128:" + "0" * 32)
    slot.with_name(slot.name + KEPT_SUFFIX).write_text(encode_record(other))
    assert load(job, 1).source == "disk"


def test_a_folder_of_small_files_leaves_no_note(job: Job, tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/config.json").write_text("{}")
    job.stage(1, {"model": state(1)}, metadata=tmp_path / "meta")
    job.commit(1, "model", "metadata")
    assert [slot.name for slot in kept_slots(job)] == ["actor.model.rank0.0.slot"]


def test_a_restart_after_a_kill_finds_the_image_in_memory(job: Job) -> None:
    def train() -> None:
        job.stage(5, {"model": state(5)})
        signal.raise_signal(signal.SIGKILL)

    assert end_of(train) == -signal.SIGKILL
    job.commit(5)
    restored = load(job, 5)
    assert restored.source == "spool"
    assert torch.equal(restored.state["w"], state(5)["w"])
    job.stage(6, {"model": state(6)})  # and the slots serve the new trainer
    job.commit(6)
    assert load(job, 6).source == "spool"


@pytest.mark.parametrize(
    ("alter", "told"),
    [
        (partial(os.truncate, length=5000), "step 1 .*: .* has 5,000 bytes.*Choose another"),
        (partial(flip_a_byte, at=9000), "is corrupted: its digest.*load another step"),
    ],
    ids=["cut", "flipped"],
)
def test_a_file_that_was_altered_is_refused_with_a_way_out(
    job: Job, alter: Callable[[Path], None], told: str
) -> None:
    save(job, 1, 1)
    alter(job.root / "global_step_1" / SHARD)
    with pytest.raises(CommitError, match=told):
        load_shard(job.root, 1, SHARD)


class Moved:
    """Its class is somewhere else, or has other arguments, by the time that it is loaded."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        make = {"no_such_module": __import__, "no_such_argument": bytes.decode}
        return make.get(self.how, getattr), (self.how, "gone")


@pytest.mark.parametrize("how", ["no_such_module", "no_such_argument", "a text"])
def test_an_object_whose_class_is_gone_is_named_with_its_file_and_spares_the_others(
    job: Job, how: str
) -> None:
    manifest = job.commit_states(1, {"model": state(1), "extra_state": {"data": Moved(how)}})
    match = r"extra_state\S+rank_0.pt holds an object .*(no_such_module|'gone'|'str').*only="
    for spool in (job.spool, None):
        with pytest.raises(CommitError, match=match):
            load_states(job.root, 1, "actor", spool=spool)
    with pytest.raises(CommitError, match=match):
        fill_states(job.root, manifest, "actor", {"extra_state": {"data": 0}})
    assert [*load_states(job.root, 1, "actor", only=["model"])] == ["model"]


def test_a_step_a_file_or_a_role_that_is_not_committed_is_refused(job: Job) -> None:
    job.stage(1, {"model": state(1)})
    with pytest.raises(CommitError, match="not committed"):
        load_shard(job.root, 1, SHARD, spool=job.spool)
    job.commit(1)
    with pytest.raises(CommitError, match="has no file actor/optim"):
        load_shard(job.root, 1, "actor/optim_world_size_1_rank_0.pt")
    with pytest.raises(CommitError, match="has no shards of role critic"):
        load_states(job.root, 1, "critic")


def test_shards_come_in_the_order_that_was_asked_for(job: Job) -> None:
    names = ("model", "optim", "extra_state")
    job.stage(1, {name: {"is": name} for name in names})
    job.commit(1, *names)
    paths = [f"actor/{name}_world_size_1_rank_0.pt" for name in reversed(names)]
    found = [restored.state["is"] for restored in load_shards(job.root, 1, paths, spool=job.spool)]
    assert found == ["extra_state", "optim", "model"]
