"""Verification by loading the newest checkpoint as a restart would."""

from pathlib import Path

import pytest
import torch

from tests.support.disk import flip_a_byte
from tests.support.job import Job
from trinity_sync.errors import CommitError
from trinity_sync.layout import step_folder
from trinity_sync.storage.commit import commit
from trinity_sync.storage.leases import LEASE_S, list_leases
from trinity_sync.storage.save_functions import CallableStatus
from trinity_sync.storage.verify_load import load_newest


def save(job: Job, *steps: int) -> None:
    job.world_size = 2
    for step in steps:
        for rank in range(2):
            state = {"w": torch.arange(5000.0) * step}
            job.stage(step, {"model": state, "optim": state}, rank=rank)
        job.commit(step, "model", "optim")


def test_all_shards_of_the_newest_checkpoint_are_loaded(job: Job) -> None:
    save(job, 1, 2)
    ticks = iter([10.0, 14.0])
    done = load_newest(job.root, clock=lambda: next(ticks))
    assert done
    assert (done.step, done.files, done.seconds) == (2, 4, 4.0)
    assert done.nbytes == sum(p.stat().st_size for p in step_folder(job.root, 2).rglob("*.pt"))
    assert list_leases(job.root) == []


def test_a_checkpoint_that_does_not_load_fails_and_is_named(job: Job) -> None:
    save(job, 1)
    shard = step_folder(job.root, 1) / "actor/optim_world_size_2_rank_1.pt"
    flip_a_byte(shard, -3000)
    with pytest.raises(CommitError, match=f"{shard} is corrupted"):
        load_newest(job.root)
    shard.unlink()
    with pytest.raises(CommitError, match="none can be loaded"):
        load_newest(job.root)


def test_files_that_only_their_writer_can_load_are_digested(job: Job) -> None:
    file = step_folder(job.root, 1) / "actor/dist_ckpt.bin"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"megatron")
    wrote = ("actor/dist_ckpt.bin",)
    receipt = CallableStatus("dist", 1, 1, "checkpoint", 0, "1/1", "finished", files=wrote)
    commit(job.save(1), [], [receipt])
    done = load_newest(job.root)
    assert done
    assert (done.files, done.nbytes) == (1, 8)
    file.write_bytes(b"megatorn")
    with pytest.raises(CommitError, match=f"{file} is corrupted"):
        load_newest(job.root)


def test_a_checkpoint_with_nothing_to_load_fails(job: Job) -> None:
    receipt = CallableStatus("nothing", 1, 1, "checkpoint", 0, "1/1", "finished")
    commit(job.save(1), [], [receipt])
    with pytest.raises(CommitError, match="contains nothing that can be loaded"):
        load_newest(job.root)


def test_a_step_stays_leased_however_long_it_takes_to_load(job: Job) -> None:
    save(job, 1)
    leased: list[float] = []

    def clock() -> float:
        leased.extend(lease.ttl_s for lease in list_leases(job.root))
        return float(len(leased))

    load_newest(job.root, clock=clock)
    assert leased == [LEASE_S, LEASE_S]


def test_a_checkpoint_of_another_system_is_none_of_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_3/actor"
    folder.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(CommitError, match="none can be loaded"):
        load_newest(tmp_path)
    torch.save({"w": torch.ones(10)}, folder / "model_world_size_1_rank_0.pt")
    assert load_newest(tmp_path) is None
