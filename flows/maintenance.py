"""Flows that prune, copy, verify and repair the steps of jobs.

They show in the Prefect UI what they did.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_table_artifact
from prefect.runtime import flow_run

from tasks.on_ray import run_here
from tasks.save import replicate
from trinity_sync.client.prefect_api import PrefectApi
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.layout import name_job
from trinity_sync.orchestration import on_node
from trinity_sync.orchestration.quantities import (
    RETENTION,
    VERIFIED,
    format_bytes,
    format_rate,
    make_artifact_key,
)
from trinity_sync.orchestration.recovery.reconcile import GRACE_S
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.orchestration.step_events import emit_step_event
from trinity_sync.retention.removal import RemovalPlan
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings, read_settings
from trinity_sync.snapshot.identity import job_id
from trinity_sync.storage.gc import Finding
from trinity_sync.storage.verify import VerifiedStep

logger = logging.getLogger(__name__)


def name_run() -> str:
    """Return the name of the flow run that begins: its jobs, what it does, and of which step."""
    given = flow_run.parameters
    jobs = name_job(Path(given["root"])) if given.get("root") else "all jobs"
    step = "" if given.get("step") is None else f" step {given['step']}"
    return f"{jobs}: {flow_run.flow_name.removesuffix('-step')}{step}"


_OPTIONS: Any = {"flow_run_name": name_run, "persist_result": False, "retries": 0}


@flow(name="retention", **_OPTIONS)
async def retention(
    root: str | None = None,
    keep: str = "",
    keep_weights: str = "",
    dry_run: bool = False,
    keep_model: str = "",
) -> None:
    """Remove every step that no policy, pin, lease or latest pointer keeps.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed a step on
            this node.
        keep: Policy for checkpoints, such as last=3,every=100,hourly=24,best=2:reward:max; empty
            for each job's own, which keeps all unless it is set.
        keep_weights: Policy for steps that hold weights only; empty for each job's own, which
            keeps the last 2 unless it is set.
        dry_run: Show what would be removed, and remove nothing.
        keep_model: Policy for checkpoints of which only the weights stay; empty for each job's own,
            which reduces none unless it is set.

    Raises:
        ConfigError: A policy is invalid, or a root could not be pruned; the others were.
    """
    given = {"keep": keep, "keep_model": keep_model, "keep_weights": keep_weights}
    found = await run_here(root, on_node.prune, root, given, dry_run)
    for each, plan in found.items():
        if isinstance(plan, RemovalPlan):
            await _create_retention_artifact(each, plan, dry_run=dry_run)
    if failures := [f"{each}: {why}" for each, why in found.items() if isinstance(why, str)]:
        raise ConfigError("\n".join(failures))


async def _create_retention_artifact(root: Path, plan: RemovalPlan, *, dry_run: bool) -> None:
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
                "state": status,
                "why": why,
            }
            for step, status, why in plan.describe(dry_run=dry_run)
        ]
        + [{"step": f"quarantine {name}", "state": removed} for name in plan.quarantine],
    )


DEPLOYMENT = "replicate-step/replicate-step"


@flow(name="replicate-step", **_OPTIONS)
async def replicate_step(root: str, step: int, url: str) -> None:
    """Copy one committed step to a remote, and remove what remote_keep does not keep there.

    Args:
        root: Full path of the job's root folder, on a file system that all Ray nodes share.
        step: A committed step.
        url: URL of the job's folder in the remote, without credentials: those are in Ray's
            environment.
    """
    await replicate(root, step, url)


async def request_replication(request: SaveRequest, url: str) -> None:
    """Create a flow run that copies a committed checkpoint to the job's remote."""
    fields = {
        "parameters": {"root": request.root, "step": request.step, "url": url},
        "name": f"{name_job(Path(request.root))}: replicate step {request.step}",
        "tags": request.tags[:3],  # without a kind: lists of saves leave it out
        "idempotency_key": f"{request.key}/replicate",
    }
    async with PrefectApi(read_settings()[0]) as api:
        await api.create_flow_run(fields, DEPLOYMENT)


@flow(name="verify", **_OPTIONS)
async def verify(
    root: str | None = None,
    step: int | None = None,
    newest: int = 1,
    sample_percent: float = 0.0,
) -> None:
    """Read files of committed steps and compare their digests with the manifests.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed a step on
            this node.
        step: Step to read in addition to the newest ones.
        newest: Number of newest steps to read, per job.
        sample_percent: Approximate percentage of the bytes of all steps that are read as well.
            Consecutive days read different files.

    Raises:
        CommitError: A step is corrupted, as any with a torn manifest.
    """
    verified = await run_here(root, on_node.verify, root, step, newest, sample_percent)
    corrupted = [each for each in verified if each.state == "corrupted"]
    for each in corrupted:
        job = await run_in_thread(job_id, each.root)
        emit_step_event("corrupted", each.root, each.step, job=job, message=each.wrong)
    await _create_verification_artifacts(verified)
    if corrupted:
        reasons = "; ".join(f"step {each.step} in {each.root}: {each.wrong}" for each in corrupted)
        raise CommitError(
            f"{len(corrupted)} of {len(verified)} steps are corrupted and no longer loaded: "
            f"{reasons}. Restore the files from a copy and verify the step again, or remove it."
        )


async def _create_verification_artifacts(steps: Sequence[VerifiedStep]) -> None:
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


@flow(name="reconcile", **_OPTIONS)
async def reconcile(root: str | None = None, grace_s: float = GRACE_S) -> None:
    """Repair what crashes left: latest pointers, temporary files, slots.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed a step on
            this node.
        grace_s: Minimum age in seconds of a file or slot that is removed as unused.
    """
    found = await run_here(root, on_node.repair, root, grace_s)
    await _create_findings_artifacts(found, read_settings()[0])


async def _create_findings_artifacts(found: Sequence[Finding], settings: Settings) -> None:
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
                {name: getattr(finding, name) for name in ("state", "what", "why", "where")}
                for finding in findings
            ],
        )
