"""``save-step``: persist the images of a step on their nodes, then commit the step.

Images are persisted on the nodes whose shared memory holds them. The commit
task starts after the results of all nodes are known: a Prefect flow can be Completed although a
task died. The order of all parts, and of what follows the commit, is that of `pipeline.save`.

On few nodes, each component of each node has a Prefect task, which the Prefect UI shows. On many,
so many task runs would cost the server more than anything else in the save. There, one Prefect task
serves a group of nodes: it runs in the worker, has one plain Ray task on each node persist all of
the node's components, and repeat alone what failed with an I/O error.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from prefect import flow, get_run_logger, task
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Completed, Crashed, Failed

from flows.maintenance import request_replication
from tasks.on_ray import list_living_nodes, run_on_node
from tasks.save import (
    PERSIST_TASKS,
    commit_step,
    create_failure_artifact,
    upload,
)
from trinity_sync.client.prefect_api import PrefectApi
from trinity_sync.errors import (
    PrefectApiError,
    RootAwayError,
    SaveError,
    SaveFailedError,
    StackError,
    TrinitySyncError,
    describe_error,
    is_of_stack,
)
from trinity_sync.orchestration import metrics, on_node, run_page
from trinity_sync.orchestration.on_node import Outcome, persist_node
from trinity_sync.orchestration.prefect_compat import FlowRunContext
from trinity_sync.orchestration.recovery.flow_runs import WAITING, describe_end, try_tell
from trinity_sync.orchestration.root_threads import run_in_thread
from trinity_sync.orchestration.run_page import FailedTask, StepOutcome, make_failed_task
from trinity_sync.orchestration.step_events import emit_step_event
from trinity_sync.pipeline.save import (
    COMMIT,
    NODES,
    PERSIST,
    Driver,
    Part,
    Share,
    drive,
    export_requested_models,
    free_slots,
    list_shares,
    mark_images_failed,
)
from trinity_sync.pipeline.several_nodes import await_commit
from trinity_sync.saves.journal import Journal, SaveState
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import read_settings
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.uncommitted import Persisted

T = TypeVar("T")

MOST_SINGLE_NODES = 8
"""Nodes up to which each component of each node has a task run of its own."""
NODES_PER_GROUP = 64
BY_SAVER = "Committed by the saver of the node: no flow run had begun it in time."
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
        if isinstance(outcome, StackError):
            lost = self.make_lost_error(request, f"has not written them: {outcome}")
            lost.__cause__, outcome = outcome, lost
        self.errors[share.what] = outcome

    def make_lost_error(self, request: SaveRequest, why: str) -> StackError:
        """Return the error of a node whose images cannot be reached."""
        return StackError(
            f"{request.run_name} of {request.root} is not committed: node {self.name}, which holds "
            f"{self.shards}, {why}. If its memory is intact, start Ray there, by that name, and "
            "retry the flow run. Later saves are unaffected."
        )


async def persist_images(request: SaveRequest, nodes: Sequence[NodeSave]) -> None:
    """Persist every component on every node in parallel, and add the results to ``nodes``.

    The first node is that of rank 0.

    Raises:
        StackError: A node is not in the Ray cluster, or died before its images were persisted.
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

    def __init__(self, request: SaveRequest, nodes: Mapping[NodeSave, Sequence[Share]]) -> None:
        self.request, self.nodes = request, nodes

    def __str__(self) -> str:
        names = [node.name for node in self.nodes]
        return " .. ".join(dict.fromkeys((names[0], names[-1])))

    async def persist(self, node: NodeSave) -> None:
        """Persist the shares of one node, which repeats those that fail with an I/O error."""
        request, shares = self.request, tuple(self.nodes[node])
        outcomes: list[Outcome[Persisted]]
        try:
            arguments = request, shares, node.shards
            outcomes = await run_on_node(node.name, request.root, persist_node, *arguments)
        except Exception as error:  # of Ray: the node or its process died
            outcomes = [Outcome(error=error)] * len(shares)
        for share, outcome in zip(shares, outcomes, strict=True):
            failed = outcome.get_error()
            node.add_outcome(request, share, failed or outcome.unwrap())
            if failed:
                seen = node.errors[share.what]
                why = seen if isinstance(seen, TrinitySyncError) else outcome.traceback or seen
                get_run_logger().error("node %s, %s: %s", node.name, share.what, why)


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


class FlowDriver(Driver):
    """Has Prefect tasks, and Ray processes of the nodes, do the parts of a save."""

    done: on_node.Committed | None = None

    def __init__(self, request: SaveRequest) -> None:
        super().__init__(request)
        self._started_at = time.time()
        self._nodes: list[NodeSave] = []
        """The nodes that hold images of the save, starting with that of rank 0."""
        self.left = ""
        """Why the saver has to commit the save."""

    @property
    def _run(self) -> FlowRun | None:
        """The flow run of the save; None in one that a user has made of its parameters."""
        run = context.flow_run if (context := FlowRunContext.get()) else None
        return run if run and run.idempotency_key == self.request.key else None

    def log_error(self, text: str) -> None:  # noqa: D102
        get_run_logger().error("%s", text)

    async def do(self, part: Part) -> None:
        """Do a part; leave a save that the stack cannot do to the saver, and wait for its commit.

        Raises:
            SaveFailedError: The saver could not.
            Exception: The stack's error, if the saver writes nothing for ``rank_timeout_s``.
        """
        try:
            await super().do(part)
        except Exception as error:
            run = self._run
            if part not in (PERSIST, COMMIT) or not is_of_stack(error) or run is None:
                raise
            journal = Journal.of(self.request)
            with suppress(OSError):
                await run_in_thread(journal.read)
            why = journal.explain_given_up(self.request.key)
            if why and run.run_count == 1:  # before this run began it; what is retried is left
                raise SaveFailedError(why) from error
            self.left = self.left or describe_error(error)
            self.log_error(self.left)
            await self.tell("left", self.left)
            wait = partial(await_commit, rank_timeout_s=self._limit_s / 2)
            try:
                await run_in_thread(wait, self.request, [node.shards for node in self._nodes])
            except SaveFailedError:
                raise
            except SaveError as late:
                raise error from late

    async def tell(self, state: SaveState, why: str) -> None:
        """Write into the journal how the run ends, which a server may not take or may have lost."""
        if run := self._run:
            url = ""
            with suppress(PrefectApiError):  # no server is named any longer
                url = PrefectApi(read_settings()[0]).get_page(run.id)
            await try_tell(self.request, state, why, url=url, start=run.run_count)

    async def _find_nodes(self) -> None:
        nodes = await run_in_thread(NODES.repeat, self._await_nodes, self.request.run_name)
        self._nodes = [NodeSave(each) for each in nodes]

    async def _persist(self) -> None:
        await persist_images(self.request, self._nodes)

    async def _commit(self) -> None:
        persisted = [result for node in self._nodes for result in node.persisted]
        times = self._started_at, time.time()
        self.done = await commit_step(self.request, persisted, self._nodes[0].shards, *times)
        self.follows, self._committed_at = self.done.follows, time.time()

    async def _release_nodes(self) -> None:
        raise_first(await self._on_nodes(self._nodes[1:], free_slots))

    async def _upload(self) -> None:
        where = self.request.root, self.request.step, self.follows.required_remote
        await upload(*where, self._nodes[0].name)

    async def _mark_failed(self) -> None:
        """Mark the images on every living node, and show what has failed."""
        request, error = self.request, self.failure
        assert error
        outcomes: list[tuple[str, int | BaseException]]
        outcome = run_page.get_outcome(error)
        metrics.METRICS.count_save(request, outcome, "saver" if self.left else "flow")
        self._report(outcome, message=str(error))
        try:
            nodes = self._nodes if self._run else ()  # a user's run ends no save
            outcomes = await self._on_nodes(nodes, mark_images_failed, str(error))
        except Exception as unreachable:
            outcomes = [("", unreachable)]
        failed = [each for node in self._nodes for each in node.failed]
        remaining = {name: each for name, each in outcomes if isinstance(each, int)}
        await create_failure_artifact(request, outcome, str(error), failed, remaining)
        raise_first(outcomes)

    async def _tell_commit(self) -> None:
        if self.done is None:
            metrics.METRICS.count_save(self.request, "committed", "saver")
            return self._report("committed", seconds=time.time() - self._started_at)
        metrics.METRICS.count_committed_save(self.request, self.done)
        self._report("committed", seconds=self._committed_at - self._started_at)
        if self.done.alarms:
            self._report("unhealthy", problems=[*self.done.alarms])

    async def _export(self) -> None:
        await self._on_first_node(export_requested_models)

    async def _copy(self) -> None:
        await request_replication(self.request, self.follows.remote)

    async def _prune(self) -> None:
        await self._on_first_node(on_node.prune_after_commit)

    async def _on_first_node(self, function: Callable[[SaveRequest], None]) -> None:
        await run_on_node(self._nodes[0].name, self.request.root, function, self.request)

    async def _on_nodes(
        self, nodes: Sequence[NodeSave], function: Callable[..., T], *others: object
    ) -> list[tuple[str, T | BaseException]]:
        """Call a function on the living ones of some nodes; return their names with the results."""
        alive = list_living_nodes() if nodes else {}
        living = [node for node in nodes if node.name in alive]
        running = []
        for node in living:
            arguments = self.request, tuple(node.persisted), node.shards.spool, *others
            running.append(run_on_node(node.name, self.request.root, function, *arguments))
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        return [(node.name, each) for node, each in zip(living, outcomes, strict=True)]

    def _report(self, outcome: StepOutcome, **payload: Any) -> None:
        """Send the event of a save, see `emit_step_event`."""
        save = self.request
        payload |= {"job": save.job, "run": save.run, "kind": save.kind}
        emit_step_event(outcome, save.root, save.step, **payload)


def raise_first(outcomes: Sequence[tuple[str, object]]) -> None:
    """Raise the first error of what was done on several nodes."""
    for _, outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


@flow(name="save-step", persist_result=False, retries=0)
async def save_step(request: SaveRequest) -> State[Any] | None:
    """Persist and commit one step, then export, replicate and prune as requested.

    Args:
        request: The save. The placement files in the root name the nodes that hold its images.

    Returns:
        A state with a name of its own: Failed for a save that was superseded or evicted, Crashed
        for one that waits; None for a committed save, or Completed if the saver has committed it or
        its step was committed and is gone.
    """
    driver = FlowDriver(request)
    try:
        await drive(driver)
    except RootAwayError as error:
        return Crashed(name=WAITING, message=str(error))
    except Exception as error:
        outcome = run_page.get_outcome(error)
        await driver.tell("failed", describe_end(outcome.capitalize(), str(error)))
        if outcome == "failed":
            raise
        driver.log_error(str(error))
        return Failed(name=outcome.capitalize(), message=str(error))
    by_saver = driver.done is None or driver.done.by_saver
    message = (driver.removed or driver.left or BY_SAVER) if by_saver else ""
    await driver.tell("completed", message)
    return Completed(message=message) if by_saver else None
