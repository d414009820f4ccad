"""``replicate-step``: copy a committed step into a store, on Ray."""

import asyncio
import logging

from prefect import flow
from prefect.client.orchestration import get_client
from prefect_ray.context import remote_options

from flows.on_ray import NodeRayTaskRunner, gather_results
from tasks.replicate import replicate_step as send
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.orchestration.prefect_queries import request_run
from trinity_sync.remote.remote_root import refuse_credentials
from trinity_sync.storage.required_remote import required_remote_of

logger = logging.getLogger(__name__)

DEPLOYMENT = "replicate-step/replicate-step"


@flow(name="replicate-step", task_runner=NodeRayTaskRunner(), persist_result=False, retries=0)
async def replicate_step(root: str, step: int, url: str, keep_last: int = 0) -> None:
    """Copy one step.

    Args:
        root: the job's root folder, absolute; on a file system that all Ray nodes see.
        step: a committed one.
        url: the job's folder in the store, without credentials: those are in Ray's environment.
        keep_last: so many of the newest steps stay in the store; 0 keeps all.
    """
    with remote_options(num_cpus=0, max_retries=0):
        await gather_results([send.submit(root, step, url, keep_last)])


async def request_copy(request: SaveRequest, url: str) -> None:
    """Create a flow run that copies a committed checkpoint to the remote, unless a save does that.

    The save is committed whatever becomes of this: a server that refuses is logged.

    Args:
        request: of the save.
        url: of the job's folder in the remote; empty for none.
    """
    if not url or request.kind != "checkpoint":
        return
    try:
        if await asyncio.to_thread(required_remote_of, request.root):
            return  # the save itself sends it
        refuse_credentials(url)  # parameters are shown to everybody
        async with get_client() as client:
            deployment = await client.read_deployment_by_name(DEPLOYMENT)
            fields = {
                "parameters": {"root": request.root, "step": request.step, "url": url},
                "name": f"replicate step {request.step}",
                "tags": request.tags,
                "idempotency_key": f"{request.key}/replicate",
            }
            await request_run(client, deployment.id, fields)
    except Exception as error:
        logger.warning("%s is committed; its copy cannot be requested: %r", request.run_name, error)
