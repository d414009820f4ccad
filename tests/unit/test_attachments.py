"""What is attached to a step is committed with it, or not at all."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.unit.job import Job
from trinity_sync.coordinator import CheckpointCoordinator
from trinity_sync.errors import CommitError, ConfigError, MissingShards
from trinity_sync.settings import Settings
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.restore import load_states

MODEL = {"model": {"w": torch.ones(9)}}
Open = Callable[..., CheckpointCoordinator]


@pytest.fixture
def coordinator_of(job: Job, spool_folder: Path, tmp_path: Path) -> Iterator[Open]:
    """Coordinators of the job's ranks, with no server to ask: the test commits by itself."""
    settings = Settings(spool=spool_folder, home=tmp_path)
    with ExitStack() as open_ones:

        def make(rank: int = 0, world_size: int = 1) -> CheckpointCoordinator:
            made = CheckpointCoordinator(
                job.root, rank=rank, world_size=world_size, run_key="run", settings=settings
            )
            open_ones.callback(made.close, timeout=0)
            return made

        yield make


def test_bytes_and_files_are_committed_with_their_step(
    coordinator_of: Open, job: Job, tmp_path: Path
) -> None:
    saves = coordinator_of()
    (tmp_path / "buffer").write_bytes(b"\0" * 5000)
    saves.attach("dataloader.json", b"[1]", step=4)
    saves.attach("dataloader.json", b"[2]", step=4)
    saves.attach("replay", tmp_path / "buffer", step=4)
    (tmp_path / "buffer").write_bytes(b"later")
    saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    assert saves.attachment(4, "dataloader.json") == b"[2]"
    assert saves.attachment(4, "replay") == b"\0" * 5000
    assert (job.root / "global_step_4/attachments/replay").stat().st_size == 5000
    assert "attachments" in {record.component for record in read_manifest(job.root, 4).files}
    assert set(load_states(job.root, 4, "actor")) == {"model"}


def test_they_go_with_the_checkpoint_and_not_with_the_sync_before_it(
    coordinator_of: Open, job: Job
) -> None:
    saves = coordinator_of()
    saves.attach("position", b"17", step=4)
    saves.save(4, MODEL, kind="state_dict")
    job.commit(4, "model", kind="state_dict")
    saves.save(4, {**MODEL, "optim": {}})
    job.commit(4, "model", "optim", "attachments")
    assert saves.attachment(4, "position") == b"17"


def test_each_rank_has_its_own(coordinator_of: Open, job: Job) -> None:
    ranks = [coordinator_of(rank, 2) for rank in (0, 1)]
    for rank, saves in enumerate(ranks):
        saves.attach("position", str(rank).encode(), step=4)
        saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    assert [saves.attachment(4, "position") for saves in ranks] == [b"0", b"1"]
    assert ranks[0].attachment(4, "position", rank=1) == b"1"


def test_one_rank_may_attach_alone(coordinator_of: Open, job: Job) -> None:
    ranks = [coordinator_of(rank, 2) for rank in (0, 1)]
    ranks[0].attach("position", b"0", step=4)
    for saves in ranks:
        saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    assert ranks[0].attachment(4, "position") == b"0"


def test_a_step_without_what_was_attached_is_not_committed(coordinator_of: Open, job: Job) -> None:
    saves = coordinator_of()
    saves.attach("position", b"17", step=4)
    saves.save(4, MODEL)
    with pytest.raises(MissingShards, match=r"lacks attachments of ranks \[0\]"):
        job.commit(4, "model")


def test_a_trainer_that_is_killed_leaves_them_to_be_committed(
    job: Job, spool_folder: Path, tmp_path: Path
) -> None:
    script = f"""
import os, signal, torch
from pathlib import Path
from trinity_sync.coordinator import CheckpointCoordinator
from trinity_sync.settings import Settings
settings = Settings(spool=Path({str(spool_folder)!r}), home=Path({str(tmp_path)!r}))
saves = CheckpointCoordinator({str(job.root)!r}, settings=settings)
saves.attach("position", b"17", step=4)
saves.save(4, {{"model": {{"w": torch.ones(9)}}}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    job.commit(4, "model", "attachments")
    assert (job.root / "global_step_4/attachments/position").read_bytes() == b"17"


def test_what_was_attached_to_another_step_is_not_part_of_this_one(
    coordinator_of: Open, job: Job
) -> None:
    saves = coordinator_of()
    saves.attach("position", b"3", step=3)  # which is never saved
    saves.attach("position", b"5", step=5)
    saves.save(4, MODEL)
    job.commit(4)
    saves.save(5, MODEL)
    job.commit(5, "model", "attachments")
    assert not (job.root / "global_step_4/attachments").exists()
    assert saves.attachment(5, "position") == b"5"


def test_what_comes_too_late_or_is_misnamed_or_missing_is_refused(
    coordinator_of: Open, job: Job, tmp_path: Path
) -> None:
    saves = coordinator_of()
    for name in ("../x", "", ".hidden", "a/b", "rank_1"):
        with pytest.raises(ConfigError, match="attachment"):
            saves.attach(name, b"", step=4)
    with pytest.raises(ConfigError, match="nowhere"):
        saves.attach("x", tmp_path / "nowhere", step=4)
    saves.save(4, MODEL)
    with pytest.raises(ConfigError, match="handed over"):
        saves.attach("x", b"", step=4)
    job.commit(4)
    with pytest.raises(CommitError, match="no file attachments/x"):
        saves.attachment(4, "x")


def test_a_damaged_attachment_is_not_given_out(coordinator_of: Open, job: Job) -> None:
    saves = coordinator_of()
    saves.attach("position", b"17", step=4)
    saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    (job.root / "global_step_4/attachments/position").write_bytes(b"71")
    with pytest.raises(CommitError, match="is damaged"):
        saves.attachment(4, "position")
