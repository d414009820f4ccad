"""Verify committed steps: choose files, read them in parallel, mark corrupted steps; or load."""

from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import acreate_table_artifact

from tasks.on_ray import run_here
from trinity_sync.errors import CommitError
from trinity_sync.orchestration.on_node import verify as on_node
from trinity_sync.orchestration.prefect_queries import VERIFIED
from trinity_sync.orchestration.quantities import format_bytes, format_rate, make_artifact_key
from trinity_sync.orchestration.step_events import emit_step_event
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.storage.verify import CheckedFile, ChosenFile, VerifiedStep, judge_steps


@task(name="choose-files", persist_result=False)
async def choose_files(
    root: str | None, step: int | None, newest: int, sample_percent: float, seed: int | None
) -> list[ChosenFile]:
    """Choose the files to read, of one job or of all known jobs."""
    return await run_here(on_node.choose_files, root, step, newest, sample_percent, seed)


@task(name="read-files", persist_result=False)
async def read_files(files: Sequence[ChosenFile]) -> list[CheckedFile]:
    """Read files and compare their digests with the manifests."""
    return await run_here(on_node.read_files, files)


@task(name="mark-steps", persist_result=False)
async def mark_steps(checked: Sequence[CheckedFile]) -> None:
    """Mark corrupted steps, unmark valid ones, update the latest pointers, and show the result.

    Raises:
        CommitError: A step is corrupted.
    """
    verified = await run_here(judge_steps, checked)
    for each in verified:
        if each.state == "corrupted":
            job = await run_here(job_id, each.root)
            emit_step_event("corrupted", each.root, each.step, job=job, message=each.wrong)
    await create_verification_artifacts(verified)
    if corrupted := [each for each in verified if each.state == "corrupted"]:
        reasons = "; ".join(f"step {each.step} in {each.root}: {each.wrong}" for each in corrupted)
        raise CommitError(
            f"{len(corrupted)} of {len(verified)} steps are corrupted and no longer loaded: "
            f"{reasons}. Restore the files from a copy and verify the step again, or remove it."
        )


@task(name="load-checkpoints", persist_result=False)
async def load_newest_checkpoints(root: str | None) -> None:
    """Load the newest checkpoint of a job, or of all known jobs, and show how long it took.

    Raises:
        CommitError: A checkpoint cannot be loaded; the others were loaded and are shown.
    """
    failures = []
    for each, done in await run_here(on_node.load_newest_checkpoints, root):
        if isinstance(done, str):
            failures.append(done)
            await _create_load_artifact(each, {"step": "", "result": done})
            continue
        result = "loaded, digests compared" if done.checked else "loaded"
        await _create_load_artifact(
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


async def _create_load_artifact(root: Path, row: dict[str, str]) -> None:
    await acreate_table_artifact(
        key=make_artifact_key("loaded", root),
        description=f"Time to load the newest checkpoint of `{root}` on this node, as a restart "
        "does",
        table=[row],
    )


async def create_verification_artifacts(steps: Sequence[VerifiedStep]) -> None:
    """Show the verified steps of each job in the Prefect UI."""
    by_root: dict[str, list[VerifiedStep]] = {}
    for step in steps:
        by_root.setdefault(step.root, []).append(step)
    for root, verified in by_root.items():
        files = sum(step.files for step in verified)
        nbytes = sum(step.nbytes for step in verified)
        await acreate_table_artifact(
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
