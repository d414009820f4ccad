"""The tasks of a verification: choose files, read them in parallel, judge what was found."""

import time
from collections.abc import Sequence
from datetime import date

from prefect import task
from prefect.artifacts import create_table_artifact

from trinity_sync.errors import CommitError
from trinity_sync.orchestration.job_registry import roots_of
from trinity_sync.settings import Settings
from trinity_sync.storage.verify import Checked, Chosen, Verdict, check, choose, judge


@task(name="choose", persist_result=False)
def choose_files(
    root: str | None, step: int | None, newest: int, sample_gb: float, seed: int | None
) -> list[Chosen]:
    """Choose what to read: of one job, or a share of each that is known."""
    roots = roots_of(root, Settings())
    return [
        file
        for each in roots
        for file in choose(
            each,
            step=step,
            newest=newest,
            sample_bytes=int(sample_gb * 1e9 / len(roots)),
            seed=date.today().toordinal() if seed is None else seed,
        )
    ]


@task(name="read", persist_result=False)
def read_files(files: Sequence[Chosen]) -> list[Checked]:
    """Read files and compare them with their manifests."""
    return check(files, nice=Settings().nice, clock=time.perf_counter)


@task(name="judge", persist_result=False)
def judge_steps(checked: Sequence[Checked]) -> list[Verdict]:
    """Mark and remove_mark steps, move pointers, and show it all.

    Raises:
        CommitError: something is corrupted.
    """
    verdicts = judge(checked)
    bad = [verdict for verdict in verdicts if verdict.state == "corrupted"]
    show(verdicts)
    if bad:
        named = "; ".join(f"step {each.step} in {each.root}: {each.wrong}" for each in bad)
        raise CommitError(
            f"{len(bad)} of {len(verdicts)} steps are corrupted and not loaded any more: {named}. "
            "Restore the files from a copy and verify the step again, or remove it."
        )
    return verdicts


def show(verdicts: Sequence[Verdict]) -> None:
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
