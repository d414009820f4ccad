"""Verify committed steps: choose files, read them in parallel, mark corrupted steps; or load."""

import time
from collections.abc import Sequence
from datetime import date

from prefect import task
from prefect.artifacts import create_table_artifact

from trinity_sync.errors import CommitError, TrinitySyncError
from trinity_sync.orchestration.job_registry import select_roots
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.storage import verify
from trinity_sync.storage.verify import CheckedFile, ChosenFile, VerifiedStep


@task(name="choose-files", persist_result=False)
def choose_files(
    root: str | None, step: int | None, newest: int, sample_gb: float, seed: int | None
) -> list[ChosenFile]:
    """Choose the files to read, of one job or of all known jobs.

    Args:
        root: Root of the job; None for all known jobs, among which the sample is divided.
        step: Step to read in addition to the newest ones.
        newest: Number of newest steps to read, per job.
        sample_gb: Approximate size in GB of an additional sample of all steps.
        seed: Which sample to read; None for the number of the day.
    """
    roots = select_roots(root, Settings())
    return [
        file
        for each in roots
        for file in verify.choose_files(
            each,
            step=step,
            newest=newest,
            sample_bytes=int(sample_gb * 1e9 / len(roots)),
            seed=date.today().toordinal() if seed is None else seed,
        )
    ]


@task(name="read-files", persist_result=False)
def read_files(files: Sequence[ChosenFile]) -> list[CheckedFile]:
    """Read files and compare their digests with the manifests."""
    return verify.check_files(files, nice=StackSettings().worker.nice, clock=time.perf_counter)


@task(name="mark-steps", persist_result=False)
def mark_steps(checked: Sequence[CheckedFile]) -> list[VerifiedStep]:
    """Mark corrupted steps, unmark valid ones, update the latest pointers, and show the result.

    Raises:
        CommitError: A step is corrupted.
    """
    verified = verify.judge_steps(checked)
    create_verification_artifact(verified)
    if corrupted := [each for each in verified if each.state == "corrupted"]:
        reasons = "; ".join(f"step {each.step} in {each.root}: {each.wrong}" for each in corrupted)
        raise CommitError(
            f"{len(corrupted)} of {len(verified)} steps are corrupted and no longer loaded: "
            f"{reasons}. Restore the files from a copy and verify the step again, or remove it."
        )
    return verified


@task(name="load-checkpoints", persist_result=False)
def load_newest_checkpoints(root: str | None) -> None:
    """Load the newest checkpoint of a job, or of all known jobs, and show how long it took.

    Args:
        root: Root of the job; None for all known jobs.

    Raises:
        CommitError: A checkpoint cannot be loaded; the others were loaded and are shown.
    """
    from trinity_sync.storage.verify_load import load_newest  # imports torch, which is slow

    rows, failures = [], []
    for each in select_roots(root, Settings()):
        try:
            done = load_newest(each)
        except (TrinitySyncError, OSError) as error:
            failures.append(str(error))
            rows.append({"root": str(each), "step": "", "result": str(error)})
            continue
        if done:
            result = "loaded, digests compared" if done.checked else "loaded"
            rows.append(
                {
                    "root": done.root,
                    "step": str(done.step),
                    "result": result,
                    "seconds": f"{done.seconds:.2f}",
                    "GB/s": f"{done.nbytes / done.seconds / 1e9:.2f}",
                    "bytes": f"{done.nbytes:,}",
                    "files": str(done.files),
                }
            )
    create_table_artifact(
        key="loaded-checkpoints",
        description="Time to load the newest checkpoint on this node, as a restart does",
        table=rows,
    )
    if failures:
        raise CommitError("; ".join(failures))


def create_verification_artifact(steps: Sequence[VerifiedStep]) -> None:
    """Show the verified steps in the Prefect UI."""
    files = sum(step.files for step in steps)
    nbytes = sum(step.nbytes for step in steps)
    create_table_artifact(
        key="verified-steps",
        description=f"Read {files} files, {nbytes:,} bytes, of {len(steps)} steps",
        table=[
            {
                "root": step.root,
                "step": step.step,
                "state": step.state,
                "files": step.files,
                "bytes": f"{step.nbytes:,}",
                "GB/s": f"{step.nbytes / step.seconds / 1e9:.2f}" if step.seconds else "",
                "problem": step.wrong,
            }
            for step in steps
        ],
    )
