"""The tasks of a verification: choose files, read them in parallel, mark steps; or load."""

import time
from collections.abc import Sequence
from datetime import date

from prefect import task
from prefect.artifacts import create_table_artifact

from trinity_sync.errors import CommitError, TrinitySyncError
from trinity_sync.orchestration.job_registry import select_roots
from trinity_sync.settings import Settings
from trinity_sync.storage import verify
from trinity_sync.storage.verify import CheckedFile, ChosenFile, VerifiedStep


@task(name="choose", persist_result=False)
def choose_files(
    root: str | None, step: int | None, newest: int, sample_gb: float, seed: int | None
) -> list[ChosenFile]:
    """Choose what to read: of one job, or a share of each that is known."""
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


@task(name="read", persist_result=False)
def read_files(files: Sequence[ChosenFile]) -> list[CheckedFile]:
    """Read files and compare them with their manifests."""
    return verify.check_files(files, nice=Settings().nice, clock=time.perf_counter)


@task(name="judge", persist_result=False)
def judge_steps(checked: Sequence[CheckedFile]) -> list[VerifiedStep]:
    """Mark corrupted steps, unmark valid ones, move the pointers, and show the result.

    Raises:
        CommitError: something is corrupted.
    """
    verdicts = verify.judge_steps(checked)
    bad = [verdict for verdict in verdicts if verdict.state == "corrupted"]
    show(verdicts)
    if bad:
        named = "; ".join(f"step {each.step} in {each.root}: {each.wrong}" for each in bad)
        raise CommitError(
            f"{len(bad)} of {len(verdicts)} steps are corrupted and not loaded any more: {named}. "
            "Restore the files from a copy and verify the step again, or remove it."
        )
    return verdicts


@task(name="load", persist_result=False)
def load_newest_checkpoints(root: str | None) -> None:
    """Load the newest checkpoint of a job, or of each that is known, and show what it took.

    Args:
        root: as the flow's.

    Raises:
        CommitError: one cannot be loaded; the others were, and are shown.
    """
    from trinity_sync.storage.verify_load import load_newest  # imports torch, which takes seconds

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
        description="How long a restart would wait for its newest checkpoint, on this node",
        table=rows,
    )
    if failures:
        raise CommitError("; ".join(failures))


def show(verdicts: Sequence[VerifiedStep]) -> None:
    """Put what came out into the run's page of the Prefect UI."""
    files = sum(verdict.files for verdict in verdicts)
    nbytes = sum(verdict.nbytes for verdict in verdicts)
    create_table_artifact(
        key="verified-steps",
        description=f"{files} files read again, {nbytes:,} bytes, in {len(verdicts)} steps",
        table=[
            {
                "root": verdict.root,
                "step": verdict.step,
                "state": verdict.state,
                "files": verdict.files,
                "bytes": f"{verdict.nbytes:,}",
                "GB/s": f"{verdict.nbytes / verdict.seconds / 1e9:.2f}" if verdict.seconds else "",
                "what is wrong": verdict.wrong,
            }
            for verdict in verdicts
        ],
    )
