"""What becomes of saves when Slurm ends a step or a job."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments.slurm.conftest import Slurm
from tests.support.savers import savers_of
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.storage.discovery import find_newest

TRAIN = f"{sys.executable} -m tests.environments.slurm.training"
ASK = (
    f"{sys.executable} -c 'import sys; from trinity_sync import CheckpointCoordinator; "
    "print(CheckpointCoordinator(sys.argv[1]).latest_step())'"
)


@pytest.fixture
def training(
    slurm: Slurm, root: Path, spool_folder: Path, tmp_path: Path
) -> Iterator[dict[str, str]]:
    """Variables of the jobs: a training without a stack, with a spool of its own."""
    before = dict(slurm.variables)
    slurm.variables |= {
        "PYTHONPATH": str(Path(__file__).parents[3]),
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


def test_what_a_killed_job_left_in_memory_is_what_the_next_one_resumes_from(
    slurm: Slurm, training: dict[str, str], root: Path
) -> None:
    with acquire_commit_lock(root):
        job = slurm.submit(f"{TRAIN} {root} 2")
        slurm.await_output(job, "saved 2 ")
        slurm.run("scancel", "--full", "--signal=KILL", job)
        slurm.await_end(job)
        assert find_newest(root) is None
    after = slurm.submit(f"{TRAIN} {root} 3")
    slurm.await_output(after, "saved 3 ")
    assert lines(slurm.output(after), "resumed") == lines(slurm.output(job), "saved")[-1:]


def test_what_a_killed_step_left_in_memory_is_what_the_next_one_resumes_from(
    slurm: Slurm, training: dict[str, str], root: Path
) -> None:
    with acquire_commit_lock(root):
        job = slurm.submit(f"srun {TRAIN} {root} 2\necho ended\nsrun {TRAIN} {root} 3")
        slurm.await_output(job, "saved 2 ")
        slurm.run("scancel", "--signal=KILL", f"{job}.0")
        slurm.await_output(job, "ended")
        assert find_newest(root) is None
    slurm.await_output(job, "saved 3 ")
    saved = lines(slurm.output(job), "saved")
    assert lines(slurm.output(job), "resumed") == [saved[1]]


def test_a_step_that_only_asks_commits_what_a_killed_step_left_before_its_job_ends(
    slurm: Slurm, training: dict[str, str], root: Path
) -> None:
    with acquire_commit_lock(root):
        job = slurm.submit(f"srun {TRAIN} {root} 2\necho ended\nsrun {ASK} {root}")
        slurm.await_output(job, "saved 2 ")
        slurm.run("scancel", "--signal=KILL", f"{job}.0")
        slurm.await_output(job, "ended")
    assert slurm.await_end(job) == "COMPLETED"
    assert slurm.output(job).splitlines()[-1] == "2"


def test_a_job_that_is_requeued_resumes_from_what_its_first_start_left_in_memory(
    slurm: Slurm, training: dict[str, str], root: Path
) -> None:
    with acquire_commit_lock(root):
        job = slurm.submit(f"srun {TRAIN} {root} 2 $SLURM_RESTART_COUNT", "--requeue")
        slurm.await_output(job, "saved 2 ")
        slurm.requeue(job)
        slurm.await_output(job, "started")  # its first start is gone
    slurm.await_output(job, "saved 4 ")
    saved = lines(slurm.output(job), "saved")
    assert lines(slurm.output(job), "resumed") == [saved[1]]


@pytest.mark.parametrize(
    ("script", "signal"),
    [(f"srun {TRAIN}", "--signal=USR1@30"), (f"exec {TRAIN}", "--signal=B:USR1@30")],
    ids=["to the steps", "to the batch script"],
)
def test_the_step_at_which_the_signal_before_the_time_limit_comes_is_resumed(
    slurm: Slurm, training: dict[str, str], root: Path, script: str, signal: str
) -> None:
    job = slurm.submit(f"{script} {root} 0", "--requeue", "--time=2", signal)
    slurm.await_output(job, "ended ")
    assert slurm.await_end(job) == "COMPLETED"
    ((step, digest, *kinds),) = lines(slurm.output(job), "ended")
    assert kinds == ["checkpoint", "state_dict"]
    slurm.requeue(job)
    slurm.await_output(job, "resumed ")
    assert lines(slurm.output(job), "resumed") == [[step, digest]]


def test_a_job_without_a_signal_ends_with_a_save_before_its_time_limit(
    slurm: Slurm, training: dict[str, str], root: Path
) -> None:
    end = "date -d $(squeue -h -j $SLURM_JOB_ID -o %e) +%s"  # newer Slurms set the variable
    job = slurm.submit(f"export SLURM_JOB_END_TIME=$({end})\nsrun {TRAIN} {root} 0", "--time=1")
    slurm.await_output(job, "ended ")
    assert slurm.await_end(job) == "COMPLETED"
    ((step, _, *kinds),) = lines(slurm.output(job), "ended")
    assert kinds == ["checkpoint", "state_dict"]
    assert find_newest(root).step == int(step)
