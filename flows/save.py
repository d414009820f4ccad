"""``save-step``: persist the images of a step on their nodes, then commit the step.

Images are persisted on the nodes whose shared memory holds them, see `flows.persist`. The commit
task starts after the results of all nodes are known: a Prefect flow can be Completed although a
task died. What follows the commit (export, replication, pruning) can fail and be retried without
affecting the committed step.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Failed

from flows.persist import NodeSave, persist_images
from flows.replicate import request_replication
from tasks.commit import commit_step
from tasks.export import export_requested_models
from tasks.failure import create_failure_artifact
from tasks.on_ray import list_living_nodes, run_on_node
from tasks.prune import prune_after_commit
from tasks.replicate import upload_to_required_remote
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.orchestration import metrics
from trinity_sync.orchestration.on_node import save as on_node
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.orchestration.run_page import StepOutcome
from trinity_sync.orchestration.step_events import emit_step_event
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.placement import await_node_shards
from trinity_sync.storage.required_remote import read_required_remote


@flow(name="save-step", persist_result=False, retries=0)
async def save_step(request: SaveRequest) -> State[Any] | None:
    """Persist and commit one step, then export, replicate and prune as requested.

    Args:
        request: The save. The placement files in the root name the nodes that hold its images.

    Returns:
        A Failed state with a name of its own for a save that was superseded or evicted; None for a
        committed save.
    """
    started_at = time.time()
    nodes: list[NodeSave] = []
    try:
        nodes = await find_nodes(request)
        await persist_images(request, nodes)
        persisted = [result for node in nodes for result in node.persisted]
        persisted_at = time.time()
        has_exports = await commit_step(
            request, persisted, nodes[0].shards, started_at, persisted_at
        )
        committed_at = time.time()
        await free_remaining_slots(request, nodes[1:])
        await upload_if_required(request, nodes[0])
    except Exception as error:
        outcome = metrics.get_outcome(error)
        metrics.METRICS.count_failed_save(request, outcome)
        report_step(outcome, request, message=str(error))
        remaining = await mark_failed(request, nodes, str(error))
        failed = [each for node in nodes for each in node.failed]
        await create_failure_artifact(request, outcome, str(error), failed, remaining)
        if outcome == "failed":
            raise
        get_run_logger().error("%s", error)
        return Failed(name=outcome.capitalize(), message=str(error))
    metrics.METRICS.count_committed_save(
        request,
        persisted,
        started_at=started_at,
        persisted_at=persisted_at,
        committed_at=committed_at,
    )
    report_step("committed", request, seconds=committed_at - started_at)
    try:
        if has_exports:
            await export_requested_models(request, nodes[0].name)
    finally:  # the copy includes the exported models, which are files of the step
        await request_replication(request)
    if request.keep:
        await prune(request, nodes[0])
    return None


def report_step(outcome: StepOutcome, request: SaveRequest, **payload: Any) -> None:
    """Send the event of a save, see `emit_step_event`."""
    emit_step_event(
        outcome,
        request.root,
        request.step,
        job=request.job,
        run=request.run,
        kind=request.kind,
        **payload,
    )


async def find_nodes(request: SaveRequest) -> list[NodeSave]:
    """Return the nodes that hold images of the save, starting with the node of rank 0."""
    job = await run_in_thread(read_job_settings, request.root)
    limit_s = job.rank_timeout_s
    shards = await run_in_thread(await_node_shards, request.save, rank_timeout_s=limit_s)
    return [NodeSave(each) for each in shards]


async def free_remaining_slots(request: SaveRequest, nodes: Sequence[NodeSave]) -> None:
    """Free the slots of a committed save on the nodes that did not run the commit task.

    A node that cannot be reached keeps its slots until a worker there frees them, or later saves
    evict them.
    """
    alive = list_living_nodes() if nodes else {}
    running = [
        run_on_node(node.name, on_node.free_slots, request, tuple(node.persisted), node.shards)
        for node in nodes
        if node.name in alive
    ]
    for outcome in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(outcome, BaseException):
            get_run_logger().error(
                "%s is committed; cannot free its slots on another node until a worker there does, "
                "or later saves evict them: %s",
                request.run_name,
                outcome,
            )


async def upload_if_required(request: SaveRequest, node: NodeSave) -> None:
    """Upload a checkpoint to the required remote of the root, without which it does not count."""
    if request.kind != "checkpoint":
        return
    if url := await run_in_thread(read_required_remote, request.root):
        await upload_to_required_remote(request.root, request.step, url, node.name)


async def prune(request: SaveRequest, node: NodeSave) -> None:
    """Remove older checkpoints; a failure is logged and does not affect the save."""
    try:
        await prune_after_commit(request, node.name)
    except Exception as error:
        get_run_logger().error(
            "%s is committed; cannot remove older steps, the next save or trinity-sync prune will "
            "retry: %s",
            request.run_name,
            error,
        )


async def mark_failed(
    request: SaveRequest, nodes: Sequence[NodeSave], reason: str
) -> dict[str, int]:
    """Mark the images of a failed save on every living node; never raises.

    ``nodes`` is empty if the placement is unknown. Return the number of the save's images that are
    still in memory, by living node.
    """
    try:
        alive = list_living_nodes()
        living = [node for node in nodes if node.name in alive]
        running = [
            run_on_node(
                node.name,
                on_node.mark_images_failed,
                request,
                tuple(node.persisted),
                node.shards,
                reason,
            )
            for node in living
        ]
        outcomes: list[int | BaseException] = await asyncio.gather(*running, return_exceptions=True)
    except Exception as error:
        living, outcomes = [], [error]
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            get_run_logger().error(
                "%s failed; cannot mark its images as failed on every node: %s",
                request.run_name,
                outcome,
            )
    marked = zip(living, outcomes, strict=False)
    return {node.name: outcome for node, outcome in marked if isinstance(outcome, int)}
