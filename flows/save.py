"""``save-step``: persist the images of a step on their nodes, then commit the step.

Images are persisted on the nodes whose shared memory holds them. The commit
task starts after the results of all nodes are known: a Prefect flow can be Completed although a
task died. What follows the commit (export, replication, pruning) can fail and be retried without
affecting the committed step.

On few nodes, each component of each node has a Prefect task, which the Prefect UI shows. On many,
so many task runs would cost the server more than anything else in the save. There, one Prefect task
serves a group of nodes: it runs in the worker, has one plain Ray task on each node persist all of
the node's components, and repeats alone what failed with an I/O error.
"""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Crashed, Failed
from ray.exceptions import RayError, RayTaskError

from flows.maintenance import request_replication
from tasks.on_ray import list_living_nodes, run_on_node
from tasks.save import (
    PERSIST_TASKS,
    PROGRESS_S,
    commit_step,
    create_failure_artifact,
    show_progress,
    upload,
)
from trinity_sync.errors import (
    HiddenSpoolError,
    RootAwayError,
    SaveError,
    SaveFailedError,
    TrinitySyncError,
)
from trinity_sync.orchestration import metrics, on_node
from trinity_sync.orchestration.on_node import Outcome, persist_node
from trinity_sync.orchestration.recovery.flow_runs import try_tell
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.orchestration.run_page import FailedTask, StepOutcome, make_failed_task
from trinity_sync.orchestration.step_events import emit_step_event
from trinity_sync.pipeline.save import (
    RETRY_DELAYS_S,
    Share,
    export_requested_models,
    free_slots,
    is_io_error,
    list_shares,
    mark_images_failed,
)
from trinity_sync.pipeline.several_nodes import await_commit
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.storage.job_settings import read_job_settings, read_required_remote
from trinity_sync.storage.placement import NodeShards, await_node_shards
from trinity_sync.storage.save import Persisted

MOST_SINGLE_NODES = 8
"""Nodes up to which each component of each node has a task run of its own."""
NODES_PER_GROUP = 64
BY_SAVER = (
    "Committed by the saver of the node: no flow run had begun it in time, or the stack does not "
    "see the trainer's /dev/shm."
)
_MOST_REASONS = 10
"""Errors that the state of a group's task run quotes; it names all nodes that failed."""


class NodeSave:
    """The shards of a save that one node holds, and what has become of them so far.

    Not a dataclass, because Prefect walks through dataclasses value by value in task arguments.
    """

    def __init__(self, shards: NodeShards) -> None:
        self.name = shards.node
        self.shards = shards
        self.persisted: list[Persisted] = []
        self.errors: dict[str, BaseException] = {}
        """By component, or what else was not persisted."""

    @property
    def failed(self) -> list[FailedTask]:
        """What was not persisted, for the page of the save."""
        return [make_failed_task(self.name, what, error) for what, error in self.errors.items()]

    def add_outcome(self, request: SaveRequest, share: Share, outcome: object) -> None:
        """Add the result of a share's task, or the error of the task or of Ray."""
        if isinstance(outcome, Persisted):
            self.persisted.append(outcome)
            return
        assert isinstance(outcome, BaseException)
        error = outcome
        if isinstance(outcome, RayError) and not isinstance(outcome, RayTaskError):
            why = f"or a process of it, died before they were written ({type(outcome).__name__})"
            error = self.make_lost_error(request, why)
            error.__cause__ = outcome
        self.errors[share.what] = error

    def make_lost_error(self, request: SaveRequest, why: str) -> SaveError:
        """Return the error of a node whose images cannot be reached."""
        return SaveError(
            f"{request.run_name} of {request.root} is not committed: node {self.name}, which holds "
            f"{self.shards}, {why}. If its memory is intact, start Ray there, by that name, and "
            "retry the flow run. Later saves are unaffected."
        )


async def persist_images(request: SaveRequest, nodes: Sequence[NodeSave]) -> None:
    """Persist every component on every node in parallel, and add the results to ``nodes``.

    The first node is that of rank 0.

    Raises:
        SaveError: A node is not in the Ray cluster, or died before its images were persisted.
        Exception: The first error of the first node that failed, once all nodes have ended.
    """
    alive = list_living_nodes()
    for node in nodes:
        if node.name not in alive:
            raise node.make_lost_error(request, "is not in this Ray cluster")
    shares = {
        node: list_shares(request, node.shards, commits=number == 0)
        for number, node in enumerate(nodes)
    }
    if len(nodes) <= MOST_SINGLE_NODES:
        await _persist_one_by_one(request, shares)
    else:
        await _persist_in_groups(request, shares)
    for node in nodes:
        for error in node.errors.values():
            raise error


async def _persist_one_by_one(
    request: SaveRequest, nodes: Mapping[NodeSave, Sequence[Share]]
) -> None:
    owners: list[tuple[NodeSave, Share]] = []
    persisting: list[Awaitable[Persisted]] = []
    for node, shares in nodes.items():
        for share in shares:
            run = PERSIST_TASKS[share.component]
            if len(nodes) > 1:  # otherwise all nodes' tasks have the same name in the UI
                run = run.with_options(task_run_name=f"{run.name} @ {node.name}")
            persisting.append(run(request, share, node.shards))
            owners.append((node, share))
    outcomes = await asyncio.gather(*persisting, return_exceptions=True)
    for (node, share), outcome in zip(owners, outcomes, strict=True):
        node.add_outcome(request, share, outcome)


async def _persist_in_groups(
    request: SaveRequest, nodes: Mapping[NodeSave, Sequence[Share]]
) -> None:
    everyone, persisting = list(nodes), []
    for first in range(0, len(nodes), NODES_PER_GROUP):
        members = everyone[first : first + NODES_PER_GROUP]
        group = NodeGroup(request, {node: nodes[node] for node in members})
        named = persist_group.with_options(task_run_name=f"{persist_group.name} @ {group}")
        persisting.append(named(group))
    for outcome in await asyncio.gather(*persisting, return_exceptions=True):
        if isinstance(outcome, BaseException) and not any(node.errors for node in nodes):
            raise outcome  # an error of Prefect's


class NodeGroup:
    """The nodes that one task run serves. Not a dataclass, as `NodeSave`."""

    def __init__(
        self,
        request: SaveRequest,
        nodes: Mapping[NodeSave, Sequence[Share]],
    ) -> None:
        self.request, self.nodes = request, nodes

    def __str__(self) -> str:
        names = [node.name for node in self.nodes]
        return " .. ".join(dict.fromkeys((names[0], names[-1])))

    async def persist(self, node: NodeSave) -> None:
        """Persist the shares of one node, and repeat those that failed with an I/O error."""
        logger, shares, delays_s = get_run_logger(), self.nodes[node], [*RETRY_DELAYS_S]
        while shares:
            again: dict[Share, Exception] = {}
            for share, outcome in zip(shares, await self._attempt(node, shares), strict=True):
                error = outcome.get_error()
                if error and delays_s and is_io_error(error):
                    again[share] = error
                    continue
                node.add_outcome(self.request, share, error or outcome.unwrap())
                if error:
                    seen = node.errors[share.what]
                    why = seen if isinstance(seen, TrinitySyncError) else outcome.traceback or seen
                    logger.error("node %s, %s: %s", node.name, share.what, why)
            if again:
                what, (first, *_) = ", ".join(share.what for share in again), again.values()
                pause_s = delays_s.pop(0)
                logger.warning("node %s: repeating %s in %g s: %s", node.name, what, pause_s, first)
                await asyncio.sleep(pause_s)
            shares = [*again]

    async def _attempt(
        self, node: NodeSave, shares: Sequence[Share]
    ) -> Sequence[Outcome[Persisted]]:
        try:
            arguments = self.request, tuple(shares), node.shards
            return await run_on_node(node.name, self.request.root, persist_node, *arguments)
        except Exception as error:  # of Ray: the node or its process died
            return [Outcome(error=error)] * len(shares)


@task(name="persist", persist_result=False)
async def persist_group(group: NodeGroup) -> None:
    """Persist the images of a group of nodes, on all of them in parallel.

    Raises:
        SaveError: Nodes failed; it names them.
    """
    await asyncio.gather(*map(group.persist, group.nodes))
    failed = [each for node in group.nodes for each in node.failed]
    if failed:
        names = dict.fromkeys(each.node for each in failed)
        reasons = [f"{each.node}, {each.what}: {each.reason}" for each in failed[:_MOST_REASONS]]
        raise SaveError(
            f"{len(names)} of {len(group.nodes)} nodes failed: {', '.join(names)}\n"
            + "\n".join(reasons)
        )


@flow(name="save-step", persist_result=False, retries=0)
async def save_step(request: SaveRequest) -> State[Any] | None:
    """Persist and commit one step, then export, replicate and prune as requested.

    Args:
        request: The save. The placement files in the root name the nodes that hold its images.

    Returns:
        A state with a name of its own: Failed for a save that was superseded or evicted, Crashed
        for one that waits; None for a committed save, or Completed if the saver has committed it.
    """
    started_at = time.time()
    nodes: list[NodeSave] = []
    hidden: HiddenSpoolError | None = None
    try:
        nodes = await find_nodes(request)
        try:
            writing = asyncio.ensure_future(persist_images(request, nodes))
            # nodes of a large job are about equally far
            shown = [node.shards for node in nodes[:MOST_SINGLE_NODES]]
            showing = asyncio.create_task(show_progress(request, shown, writing))
            await writing
        except HiddenSpoolError as error:
            hidden = error
            await leave_to_saver(request, nodes, error)
        persisted = [result for node in nodes for result in node.persisted]
        persisted_at = time.time()
        done = await commit_step(request, persisted, nodes[0].shards, started_at, persisted_at)
        committed_at = time.time()
        await asyncio.wait([showing], timeout=PROGRESS_S)  # it has ended, if the server answers
        showing.cancel()
        await free_remaining_slots(request, nodes[1:])
        await upload_if_required(request, nodes[0])
    except RootAwayError as error:
        return Crashed(name="Waiting for its root", message=str(error))
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
    metrics.METRICS.count_committed_save(request, done)
    report_step("committed", request, seconds=committed_at - started_at)
    if done.alarms:
        report_step("unhealthy", request, problems=[*done.alarms])
    try:
        if done.has_exports:
            await run_on_node(nodes[0].name, request.root, export_requested_models, request)
    finally:  # the copy includes the exported models, which are files of the step
        await request_replication(request)
        if done.keep or request.kind != "checkpoint":
            await prune(request, nodes[0])
    return Completed(message=str(hidden or BY_SAVER)) if done.by_saver else None


async def leave_to_saver(
    request: SaveRequest, nodes: Sequence[NodeSave], why: HiddenSpoolError
) -> None:
    """Tell the trainer that the saver has to commit a save, and wait until it has.

    Raises:
        SaveFailedError: The saver could not commit it.
        HiddenSpoolError: It has not begun within ``rank_timeout_s`` of the job.
    """
    get_run_logger().error("%s", why)
    await try_tell(request, "hidden", str(why), url="", start=flow_run.run_count)
    job = await run_in_thread(read_job_settings, request.root)
    shards = [node.shards for node in nodes]
    try:
        await run_in_thread(await_commit, request, shards, rank_timeout_s=job.rank_timeout_s / 2)
    except SaveFailedError:
        raise
    except SaveError as error:
        raise why from error


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
        run_on_node(
            node.name, request.root, free_slots, request, tuple(node.persisted), node.shards
        )
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
        await upload(request.root, request.step, url, node.name)


async def prune(request: SaveRequest, node: NodeSave) -> None:
    """Remove older steps; a failure is logged and does not affect the save."""
    try:
        await run_on_node(node.name, request.root, on_node.prune_after_commit, request)
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
                request.root,
                mark_images_failed,
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
