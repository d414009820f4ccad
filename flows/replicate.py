"""``replicate-step``: copy a committed step to a remote."""

import logging
from pathlib import Path

from prefect import flow
from prefect.client.orchestration import get_client

from tasks.replicate import replicate_to_remote
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.orchestration.prefect_queries import request_run
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.storage.job_settings import read_job_settings

logger = logging.getLogger(__name__)

DEPLOYMENT = "replicate-step/replicate-step"


@flow(name="replicate-step", persist_result=False, retries=0)
async def replicate_step(root: str, step: int, url: str, keep_last: int = 0) -> None:
    """Copy one committed step to a remote.

    Args:
        root: Full path of the job's root folder, on a file system that all Ray nodes share.
        step: A committed step.
        url: URL of the job's folder in the remote, without credentials: those are in Ray's
            environment.
        keep_last: Number of newest steps to keep in the remote; 0 keeps all.
    """
    await replicate_to_remote(root, step, url, keep_last)


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
        async with get_client() as client:
            deployment = await client.read_deployment_by_name(DEPLOYMENT)
            fields = {
                "parameters": {"root": request.root, "step": request.step, "url": job.remote},
                "name": f"{Path(request.root).name}: replicate step {request.step}",
                "tags": request.tags,
                "idempotency_key": f"{request.key}/replicate",
            }
            await request_run(client, deployment.id, fields)
    except Exception as error:
        logger.warning("%s is committed; cannot request its copy: %r", request.run_name, error)
