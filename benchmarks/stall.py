"""How long the trainer stands still: staging, beside a warm memcpy of the same bytes."""

import os
import tempfile
from pathlib import Path

import torch

from benchmarks.measure import Record, alternate, record, state_of, timed
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.snapshot.stager import Origin, Stager
from trinity_sync.storage.commit import commit, release_slots
from trinity_sync.storage.persist import Save, WriteOptions, persist


def stall(folder: Path, nbytes: int, tensors: int, runs: int) -> list[Record]:
    """Staging, a flat memcpy and the usual ``torch.save`` with fsync, in turns."""
    state = state_of(nbytes, tensors)
    flat, target = torch.rand(nbytes // 4), torch.rand(nbytes // 4)
    with tempfile.TemporaryDirectory(prefix="trinity_sync-bench-", dir="/dev/shm") as shared:
        spool = open_job_spool(Path(shared) / "spool", folder)
        stager = Stager(spool, slots=2)
        step = 0

        def stage() -> float:
            nonlocal step
            step += 1
            origin = Origin(str(folder), 1, "", step, "checkpoint", "actor", ("actor",), 0, 1, (0,))
            seconds = stager.stage(origin, {"model": state}).stall_s
            for sealed in spool.tickets()[0]:
                release_slots(spool, Save(str(folder), 1, step, "checkpoint", ("actor",)), [])
                sealed.slot.with_name(sealed.slot.name + ".ticket").unlink()
            return seconds

        def usual() -> float:
            path = folder / "usual.pt"
            seconds = timed(lambda: _save_and_sync(state, path))
            path.unlink()
            return seconds

        samples = alternate(
            {
                "warm memcpy": lambda: timed(lambda: target.copy_(flat)),
                "trinity_sync": stage,
                "torch.save + fsync": usual,
            },
            runs,
        )
        stager.close()
    return [
        record("stall", name, nbytes, tensors, "seconds", seconds)
        for name, seconds in samples.items()
    ]


def durable(folder: Path, nbytes: int, tensors: int, runs: int) -> list[Record]:
    """Persist and commit without orchestration, beside a raw direct-I/O write of the bytes."""
    state = state_of(nbytes, tensors)
    content = torch.empty(nbytes + 4096, dtype=torch.uint8).random_()
    start = -content.data_ptr() % 4096
    raw = memoryview(content.numpy())[start : start + nbytes]
    with tempfile.TemporaryDirectory(prefix="trinity_sync-bench-", dir="/dev/shm") as shared:
        spool = open_job_spool(Path(shared) / "spool", folder)
        stager = Stager(spool, slots=2)
        step = 0

        def ours() -> float:
            nonlocal step
            step += 1
            save = Save(str(folder), 1, step, "checkpoint", ("actor",))
            origin = Origin(str(folder), 1, "", step, "checkpoint", "actor", ("actor",), 0, 1, (0,))
            stager.stage(origin, {"model": state})

            def persist_and_commit() -> None:
                written = persist(spool, save, "model", WriteOptions(gather_s=1))
                commit(save, written)
                release_slots(spool, save, written)

            seconds = timed(persist_and_commit)
            shard = save.folder / "actor/model_world_size_1_rank_0.pt"
            again = torch.load(shard, mmap=True, weights_only=True)
            assert all(torch.equal(again[name], state[name]) for name in state), "not bit-equal"
            del again
            shard.unlink()
            return seconds

        samples = alternate(
            {"raw direct-I/O write": lambda: _raw_write(raw, folder / "raw"), "trinity_sync": ours},
            runs,
            warm_up=1,
        )
        stager.close()
    return [
        record("durable", name, nbytes, tensors, "seconds", seconds)
        for name, seconds in samples.items()
    ]


def _save_and_sync(state: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _raw_write(content: memoryview, path: Path) -> float:
    """The physical limit: large aligned pwrites past the page cache, and one fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    size = len(content) // 4096 * 4096

    def write() -> None:
        for offset in range(0, size, 16 << 20):
            os.pwrite(fd, content[offset : min(offset + (16 << 20), size)], offset)
        os.fsync(fd)

    seconds = timed(write)
    os.close(fd)
    path.unlink()
    return seconds
