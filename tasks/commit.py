"""Commit a save, and show in the Prefect UI how it went."""

import logging
from collections.abc import Sequence

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.runtime import flow_run

from tasks.on_ray import run_on_node
from tasks.persist import has_io_error
from tasks.weights import create_weights_artifact
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.orchestration.on_node import save
from trinity_sync.orchestration.quantities import make_artifact_key
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.save import Persisted

logger = logging.getLogger(__name__)


@task(
    name="commit",
    retries=2,
    retry_delay_seconds=2,
    retry_condition_fn=has_io_error,
    persist_result=False,
)
async def commit_step(
    request: SaveRequest,
    persisted: Sequence[Persisted],
    shards: NodeShards,
    started_at: float,
    persisted_at: float,
) -> bool:
    """Commit what the tasks of all nodes have persisted, then free the slots of a node.

    Return whether models of the step are to be exported. Arguments are those of
    `on_node.save.commit_step`.
    """
    run = str(flow_run.id)
    arguments = (request, persisted, shards, started_at, persisted_at, run)
    done = await run_on_node(shards.node, save.commit_step, *arguments)
    try:
        if done.page:
            key = make_artifact_key("save", request.root)
            await acreate_markdown_artifact(key=key, markdown=done.page, description=done.summary)
        await create_weights_artifact(request.root)
    except Exception as error:  # the server is away, and the step is committed nevertheless
        logger.warning("%s is committed; cannot create its artifacts: %r", request.run_name, error)
    return done.has_exports
