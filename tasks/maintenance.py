"""Tasks that prune, copy, verify, export and repair, and show in the Prefect UI what they did."""

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from tasks.on_ray import run_here, run_on_node
from tasks.save import create_weights_artifact
from trinity_sync.client.prefect_api import ask_server
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import CommitError, ConfigError, RemoteError
from trinity_sync.orchestration import on_node
from trinity_sync.orchestration.job_registry import select_roots
from trinity_sync.orchestration.quantities import (
    RETENTION,
    VERIFIED,
    format_bytes,
    format_rate,
    make_artifact_key,
)
from trinity_sync.orchestration.recovery.reconcile import GRACE_S, reconcile
from trinity_sync.orchestration.step_events import emit_step_event
from trinity_sync.retention.planner import RemovalPlan
from trinity_sync.settings import Settings
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.storage.gc import Finding
from trinity_sync.storage.verify import CheckedFile, ChosenFile, VerifiedStep, judge_steps


@task(name="prune", persist_result=False)
async def prune(
    root: str | None, keep: str, keep_weights: str, dry_run: bool, now: datetime | None = None
) -> None:
    """Remove the steps that no policy keeps, root by root.

    Raises:
        ConfigError: A policy is invalid, or a root could not be pruned; the others were.
    """
    found = await run_here(on_node.prune, root, keep, keep_weights, dry_run, now)
    for each, plan in found.items():
        if isinstance(plan, RemovalPlan):
            await create_retention_artifact(each, plan, dry_run=dry_run)
    if failures := [f"{each}: {why}" for each, why in found.items() if isinstance(why, str)]:
        raise ConfigError("\n".join(failures))


@task(name="prune", persist_result=False)
async def prune_after_commit(request: SaveRequest, node: str) -> None:
    """Remove all checkpoints but the newest ``request.keep`` and what the job's policy keeps."""
    await run_on_node(node, on_node.prune_after_commit, request)


async def create_retention_artifact(root: Path, plan: RemovalPlan, *, dry_run: bool) -> None:
    """Show in the Prefect UI what became of every step of a job."""
    removed = "would be removed" if dry_run else "removed"
    await acreate_table_artifact(
        key=make_artifact_key(RETENTION, root),
        description=f"{len(plan.removed)} steps of `{root}` {removed}, {format_bytes(plan.nbytes)}",
        table=[
            {
                "step": step.step,
                "run": step.run,
                "kinds": ", ".join(step.kinds),
                "size": format_bytes(step.nbytes),
                "state": "kept" if why else removed,
                "why": why,
            }
            for step, why in plan.steps
        ]
        + [{"step": f"quarantine {name}", "state": removed} for name in plan.quarantine],
    )


async def _is_remote_error(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Return whether the remote failed, which may be transient; a corrupted step stays so."""
    try:
        await state.aresult()
    except Exception as error:
        return isinstance(error, RemoteError)
    return False


@task(
    name="replicate",
    retries=3,
    retry_delay_seconds=[10, 60, 300],
    retry_condition_fn=_is_remote_error,
    persist_result=False,
)
async def replicate_to_remote(root: str, step: int, url: str) -> None:
    """Upload a step to a remote, from any node."""
    done, plan = await run_on_node(None, on_node.replicate_to_remote, root, step, url)
    await acreate_markdown_artifact(
        key=make_artifact_key("replicated", root),
        markdown=f"Step {step} of `{root}` is at `{done.url}`: {done.uploaded} files, "
        f"{format_bytes(done.nbytes)} sent in {done.seconds:.1f} s.\n\n"
        + "\n".join(
            f"- step {each.step}: {f'kept: {why}' if why else 'removed from the remote'}"
            for each, why in plan.steps
        ),
    )


@task(
    name="upload-to-required-remote",
    retries=3,
    retry_delay_seconds=[10, 60, 300],
    retry_condition_fn=_is_remote_error,
    persist_result=False,
)
async def upload_to_required_remote(root: str, step: int, url: str, node: str) -> None:
    """Upload a committed step to the required remote of its root."""
    await run_on_node(node, on_node.upload_to_required_remote, root, step, url)


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
        await _create_load_artifact(
            each,
            {
                "step": str(done.step),
                "result": "loaded, digests compared",
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


@task(name="export-requested-models", persist_result=False)
async def export_requested_models(request: SaveRequest, node: str) -> None:
    """Export the models that the trainer requested with a committed save."""
    await run_on_node(node, on_node.export_requested_models, request)


@task(name="export-model", persist_result=False)
async def export_model(
    root: str, step: int, role: str, dtype: str, max_shard_gb: float, to: str | None
) -> None:
    """Write one role's model of a committed step as a Hugging Face folder."""
    done = await run_here(on_node.export_model, root, step, role, dtype, max_shard_gb, to)
    await acreate_markdown_artifact(
        key=make_artifact_key("exported-model", root),
        description=f"{role} of step {step} in `{root}`",
        markdown=f"`{done.folder}`: {format_bytes(done.nbytes)}\n\n"
        + "\n".join(f"- `{name}`" for name in done.files),
    )


@task(name="repair", persist_result=False)
async def repair(root: str | None, grace_s: float = GRACE_S) -> None:
    """Repair what crashes left on this node, and show what was repaired and what was left."""
    roots, found = await run_here(repair_on_node, root, grace_s)
    await create_findings_artifacts(found, Settings())
    for each in roots:
        await create_weights_artifact(each)


def repair_on_node(root: str | None, grace_s: float) -> tuple[list[Path], list[Finding]]:
    """Repair jobs in a process of Ray, and return them and what was found."""
    settings = Settings()
    roots = select_roots(root, settings)
    return roots, ask_server(settings, lambda api: reconcile(settings, roots, api, grace_s=grace_s))


async def create_findings_artifacts(found: Sequence[Finding], settings: Settings) -> None:
    """Show the findings in the Prefect UI: those of each job, and those of the node's spool."""
    own = f"reconciled-node-{re.sub(r'[^a-z0-9]+', '-', settings.node.lower())}"
    groups: dict[str, list[Finding]] = {}
    for finding in found:
        where = Path(finding.where)
        is_root = where.is_absolute() and settings.spool not in where.parents
        key = make_artifact_key("reconciled", finding.where) if is_root else own
        groups.setdefault(key, []).append(finding)
    for key, findings in groups.items():
        repaired = sum(finding.state == "repaired" for finding in findings)
        await acreate_table_artifact(
            key=key,
            description=f"{repaired} repaired, {len(findings) - repaired} left",
            table=[
                {
                    "state": finding.state,
                    "what": finding.what,
                    "why": finding.why,
                    "where": finding.where,
                }
                for finding in findings
            ],
        )
