"""Flows that prune, copy, verify, export and repair the steps of jobs."""

import logging
from datetime import datetime
from pathlib import Path

from prefect import flow

from tasks.maintenance import (
    choose_files,
    export_model,
    load_newest_checkpoints,
    mark_steps,
    prune,
    read_files,
    repair,
    replicate_to_remote,
)
from tasks.on_ray import gather_results
from trinity_sync.client.prefect_api import PrefectApi
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.orchestration.recovery.reconcile import GRACE_S
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.settings import Settings
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.verify import split_evenly

logger = logging.getLogger(__name__)


@flow(name="retention", persist_result=False, retries=0)
async def retention(
    root: str | None = None,
    keep: str = "",
    keep_weights: str = "",
    dry_run: bool = False,
    now: datetime | None = None,
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
        now: Current time for the policies, to preview a later date with dry_run; empty for the
            present.
    """
    await prune(root, keep, keep_weights, dry_run, now)


DEPLOYMENT = "replicate-step/replicate-step"


@flow(name="replicate-step", persist_result=False, retries=0)
async def replicate_step(root: str, step: int, url: str) -> None:
    """Copy one committed step to a remote, and remove what remote_keep does not keep there.

    Args:
        root: Full path of the job's root folder, on a file system that all Ray nodes share.
        step: A committed step.
        url: URL of the job's folder in the remote, without credentials: those are in Ray's
            environment.
    """
    await replicate_to_remote(root, step, url)


async def request_replication(request: SaveRequest) -> None:
    """Create a flow run that copies a committed checkpoint to the job's remote, if it has one.

    A root with a required remote needs none, because the save itself uploads the step. A failure is
    logged and does not affect the save.
    """
    if request.kind != "checkpoint":
        return
    try:
        job = await run_in_thread(read_job_settings, request.root)
        if not job.remote or job.remote_required:
            return
        fields = {
            "parameters": {"root": request.root, "step": request.step, "url": job.remote},
            "name": f"{Path(request.root).name}: replicate step {request.step}",
            "tags": request.tags,
            "idempotency_key": f"{request.key}/replicate",
        }
        async with PrefectApi(Settings()) as api:
            await api.create_flow_run(fields, DEPLOYMENT)
    except Exception as error:
        logger.warning("%s is committed; cannot request its copy: %r", request.run_name, error)


READERS = 4
"""Number of parallel tasks that read files."""


@flow(name="verify", persist_result=False, retries=0)
async def verify(
    root: str | None = None,
    step: int | None = None,
    newest: int = 1,
    sample_percent: float = 0.0,
    seed: int | None = None,
    load: bool = False,
) -> None:
    """Read files of committed steps and compare their digests with the manifests.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed a step on
            this node.
        step: Step to read in addition to the newest ones.
        newest: Number of newest steps to read, per job.
        sample_percent: Approximate percentage of the bytes of all steps that are read as well.
            Consecutive days read different files.
        seed: Which sample to read; empty for the number of the day.
        load: Load the newest checkpoint of each job as a restart would, with the shards of all
            ranks, and measure it, instead of reading files.
    """
    if load:
        await load_newest_checkpoints(root)
        return
    files = await choose_files(root, step, newest, sample_percent, seed)
    reads = [read_files(batch) for batch in split_evenly(files, READERS)]
    await mark_steps([file for batch in await gather_results(reads) for file in batch])


@flow(name="export", persist_result=False, retries=0)
async def export(
    root: str,
    step: int,
    role: str = "actor",
    dtype: str = "keep",
    max_shard_gb: float = 5.0,
    to: str | None = None,
) -> None:
    """Write the model of a committed step as a folder that ``from_pretrained`` loads.

    An export that was interrupted continues with the files that are missing.

    Args:
        root: Full path of the job's root folder.
        step: A committed step.
        role: Role whose model is exported.
        dtype: Data type of the exported weights: keep, bf16, fp16 or fp32. Any other than keep
            needs ``to``.
        max_shard_gb: Maximum size of a safetensors file in GB.
        to: Full path of a new folder; empty for the step's own folder, next to its configuration
            and tokenizer.
    """
    await export_model(root, step, role, dtype, max_shard_gb, to)


@flow(name="reconcile", persist_result=False, retries=0)
async def reconcile(root: str | None = None, grace_s: float = GRACE_S) -> None:
    """Repair what crashes left: flow runs, images, latest pointers, temporary files, slots.

    Args:
        root: Full path of the job's root folder; empty for every job that has committed a step on
            this node.
        grace_s: Minimum age in seconds of a file or slot that is removed as unused.
    """
    await repair(root, grace_s)
