"""``save-step``: model, optimizer, extras and metadata in parallel on Ray, then the commit.

The flow's completion is the gate that Trinity's CheckpointMonitor used to be: every part's result
is asked for before the commit begins. There is one task a component and node, on the node whose
memory holds the images. What comes after the commit (the way to the store in which steps count, the
export of models that the trainer asked for, the removal of older steps) may fail and be retried
without touching it.
"""

import asyncio
import time
from collections.abc import Sequence

from prefect import flow, get_run_logger
from prefect.futures import PrefectFuture
from prefect_ray.context import remote_options
from ray.exceptions import RayError

from flows.on_ray import (
    NodeRayTaskRunner,
    gather_outcomes,
    gather_results,
    list_living_nodes,
    pin_to_node,
)
from flows.replicate import request_copy
from tasks.commit import commit_step, free_slots, note_failure
from tasks.export import export_requested
from tasks.persist import PERSIST
from tasks.prune import prune_after_commit
from tasks.replicate import send_step
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import SaveError
from trinity_sync.orchestration import metrics  # a flow is pickled with its globals
from trinity_sync.settings import Settings
from trinity_sync.storage.placement import NodeShards, await_node_shards
from trinity_sync.storage.required_remote import required_remote_of
from trinity_sync.storage.save import Persisted


@flow(name="save-step", task_runner=NodeRayTaskRunner(), persist_result=False, retries=0)
async def save_step(request: SaveRequest) -> None:
    """Write one step's images and commit them; then export models, if that was asked for.

    Args:
        request: the step; on which nodes its images wait is in the job's root.
    """
    began, counts = time.perf_counter(), False
    settings, shares, parts = Settings(), list[NodeShards](), list[list[Persisted]]()
    try:
        shares = await asyncio.to_thread(
            await_node_shards, request.save, gather_s=settings.gather_s
        )
        parts, failure = await _persist(request, shares)
        if failure:
            raise failure
        persisted = time.perf_counter()
        home = pin_to_node(shares[0].node)
        with remote_options(**home):
            everything = [part for of_node in parts for part in of_node]
            (exports,) = await gather_results([commit_step.submit(request, everything, shares[0])])
        took = persisted - began, time.perf_counter() - persisted
        await _free_slots(request, parts[1:], shares[1:])
        await _send(request, home)
        counts = True
        metrics.METRICS.committed(request, everything, *took)
        try:
            if exports:  # the step counts already, whatever becomes of them
                with remote_options(**home):
                    await gather_results([export_requested.submit(request)])
        finally:
            await request_copy(request, settings.remote_of(request.root))
    except Exception as error:
        if not counts:
            metrics.METRICS.failed(request)
        await _note_failure(request, shares, parts, str(error))
        raise
    if request.keep:
        await _prune(request, shares[0].node)


async def _persist(
    request: SaveRequest, shares: Sequence[NodeShards]
) -> tuple[list[list[Persisted]], BaseException | None]:
    """What the tasks have made, by node, and why some have made nothing.

    Raises:
        SaveError: a node is gone, and with it what was to be written there.
    """
    alive = list_living_nodes()
    for share in shares:
        if share.node not in alive:
            raise _lost(request, share, "is not, or no more, in this Ray cluster")
    futures: list[PrefectFuture[Persisted]] = []
    where: list[int] = []
    for number, share in enumerate(shares):
        components = [c for c in request.components if c != "metadata" or share.has_rank_0]
        with remote_options(**pin_to_node(share.node, alive)):
            for turn, component in enumerate(components or [None] * (number > 0)):
                functions = number > 0 and turn == 0  # the commit waits for those of its own node
                futures.append(PERSIST[component].submit(request, component, share, functions))
                where.append(number)
    parts: list[list[Persisted]] = [[] for _ in shares]
    failures: list[BaseException] = []
    for number, result in zip(where, await gather_outcomes(futures), strict=True):
        if isinstance(result, RayError):
            why = f"or a process of it, died before they were written ({type(result).__name__})"
            failures.append(_lost(request, shares[number], why))
            failures[-1].__cause__ = result
        elif isinstance(result, BaseException):
            failures.append(result)
        else:
            parts[number].append(result)
    return parts, next(iter(failures), None)


def _lost(request: SaveRequest, share: NodeShards, why: str) -> SaveError:
    return SaveError(
        f"{request.run_name} of {request.root} is not committed: node {share.node}, which holds "
        f"{share}, {why}. If it has kept its memory, start Ray there, by that name, and retry the "
        "flow run; the next save goes on without this one."
    )


async def _free_slots(
    request: SaveRequest, parts: Sequence[Sequence[Persisted]], shares: Sequence[NodeShards]
) -> None:
    """Free the slots of the other nodes; one that cannot be reached does not undo the commit."""
    futures = []
    alive = list_living_nodes() if shares else {}
    for share, of_node in zip(shares, parts, strict=True):
        if share.node in alive:
            with remote_options(**pin_to_node(share.node, alive)):
                futures.append(free_slots.submit(request, of_node, share))
    for result in await gather_outcomes(futures):
        if isinstance(result, BaseException):
            get_run_logger().error("%s keeps slots for a while: %s", request.run_name, result)


async def _send(request: SaveRequest, home: dict[str, object]) -> None:
    """Send a checkpoint to the required remote of the root: until then it does not count."""
    if request.kind == "checkpoint" and (
        url := await asyncio.to_thread(required_remote_of, request.root)
    ):
        with remote_options(**home):
            await gather_results([send_step.submit(request.root, request.step, url)])


async def _prune(request: SaveRequest, node: str) -> None:
    """Remove older checkpoints; where that fails, the save is committed all the same."""
    try:
        with remote_options(**pin_to_node(node)):
            await gather_results([prune_after_commit.submit(request)])
    except Exception as error:
        get_run_logger().error(
            "%s is committed; older steps cannot be removed: %s. The next save, or trinity-sync "
            "prune, tries again.",
            request.run_name,
            error,
        )


async def _note_failure(
    request: SaveRequest,
    shares: Sequence[NodeShards],
    parts: Sequence[Sequence[Persisted]],
    reason: str,
) -> None:
    """Note it on each node that is alive; what failed is raised, whatever comes of this."""
    try:
        futures = []
        alive = list_living_nodes()
        for share, of_node in zip(shares, parts or [()] * len(shares), strict=True):
            if share.node in alive:
                with remote_options(**pin_to_node(share.node, alive)):
                    futures.append(note_failure.submit(request, of_node, share, reason))
        ended = await gather_outcomes(futures)
    except Exception as error:
        ended = [error]
    for each in ended:
        if isinstance(each, BaseException):
            get_run_logger().error("the failure cannot be noted everywhere: %s", each)
