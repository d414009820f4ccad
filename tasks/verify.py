"""Verify committed steps: choose files, read them in parallel, mark corrupted steps; or load."""

import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from prefect import task
from prefect.artifacts import create_table_artifact

from trinity_sync.errors import CommitError, TrinitySyncError
from trinity_sync.orchestration.job_registry import select_roots
from trinity_sync.orchestration.prefect_queries import VERIFIED
from trinity_sync.orchestration.quantities import format_bytes, format_rate, make_artifact_key
from trinity_sync.orchestration.step_events import emit_step_event
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.storage import verify
from trinity_sync.storage.verify import CheckedFile, ChosenFile, VerifiedStep


@task(name="choose-files", persist_result=False)
def choose_files(
    root: str | None, step: int | None, newest: int, sample_percent: float, seed: int | None
) -> list[ChosenFile]:
    """Choose the files to read, of one job or of all known jobs.

    Args:
        root: Root of the job; None for all known jobs.
        step: Step to read in addition to the newest ones.
        newest: Number of newest steps to read, per job.
        sample_percent: Approximate percentage of the bytes of all steps to read as well.
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
            sample=sample_percent / 100,
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
    for each in verified:
        if each.state == "corrupted":
            emit_step_event("corrupted", each.root, each.step, message=each.wrong)
    create_verification_artifacts(verified)
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

    failures = []
    for each in select_roots(root, Settings()):
        try:
            done = load_newest(each)
        except (TrinitySyncError, OSError) as error:
            failures.append(str(error))
            _create_load_artifact(each, {"step": "", "result": str(error)})
            continue
        if done:
            result = "loaded, digests compared" if done.checked else "loaded"
            _create_load_artifact(
                each,
                {
                    "step": str(done.step),
                    "result": result,
                    "seconds": f"{done.seconds:.2f}",
                    "speed": format_rate(done.nbytes, done.seconds),
                    "size": format_bytes(done.nbytes),
                    "files": str(done.files),
                },
            )
    if failures:
        raise CommitError("; ".join(failures))


def _create_load_artifact(root: Path, row: dict[str, str]) -> None:
    create_table_artifact(
        key=make_artifact_key("loaded", root),
        description=f"Time to load the newest checkpoint of `{root}` on this node, as a restart "
        "does",
        table=[row],
    )


def create_verification_artifacts(steps: Sequence[VerifiedStep]) -> None:
    """Show the verified steps of each job in the Prefect UI."""
    by_root: dict[str, list[VerifiedStep]] = {}
    for step in steps:
        by_root.setdefault(step.root, []).append(step)
    for root, verified in by_root.items():
        files = sum(step.files for step in verified)
        nbytes = sum(step.nbytes for step in verified)
        create_table_artifact(
            key=make_artifact_key(VERIFIED, root),
            description=f"Read {files:,} files, {format_bytes(nbytes)}, of {len(verified)} steps "
            f"of `{root}`",
            table=[
                {
                    "step": step.step,
                    "state": step.state,
                    "files": step.files,
                    "size": format_bytes(step.nbytes),
                    "speed": format_rate(step.nbytes, step.seconds),
                    "problem": step.wrong,
                }
                for step in verified
            ],
        )
