"""What becomes of saves when Slurm ends a step or a job."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import Slurm
from tests.support.savers import savers_of
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.storage.discovery import find_newest

TRAIN = f"{sys.executable} -m tests.slurm.training"


@pytest.fixture
def training(
    slurm: Slurm, root: Path, spool_folder: Path, tmp_path: Path
) -> Iterator[dict[str, str]]:
    """Variables of the jobs: a training without a stack, with a spool of its own."""
    before = dict(slurm.variables)
    slurm.variables |= {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TRINITY_SYNC_SPOOL": str(spool_folder),
        "TRINITY_SYNC_HOME": str(tmp_path / "home"),
        "TRINITY_SYNC_SAVER": "auto",
        "OMP_NUM_THREADS": "1",
    }
    yield slurm.variables
    slurm.end_jobs()
    slurm.variables = before
    for saver in savers_of(spool_folder):
        saver.kill()
        saver.wait(10)


def lines(output: str, word: str) -> list[list[str]]:
    """What a training has printed of the steps that it saved, ended at or resumed from."""
    return [line.split()[1:] for line in output.splitlines() if line.startswith(f"{word} ")]


@pytest.mark.parametrize("within", ["", "srun "], ids=["batch", "step"])
def test_what_a_killed_job_left_in_memory_is_what_the_next_one_resumes_from(
    slurm: Slurm, training: dict[str, str], root: Path, within: str
) -> None:
    with acquire_commit_lock(root):
        job = slurm.submit(f"{within}{TRAIN} {root} 2")
        slurm.await_output(job, "saved 2 ")
        slurm.run("scancel", "--full", "--signal=KILL", job)
        slurm.await_end(job)
        assert find_newest(root) is None
    after = slurm.submit(f"{within}{TRAIN} {root} 3")
    slurm.await_output(after, "saved 3 ")
    assert lines(slurm.output(after), "resumed") == lines(slurm.output(job), "saved")[-1:]
