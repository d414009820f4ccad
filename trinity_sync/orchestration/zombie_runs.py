"""Runs that Prefect shows as under way although nobody is at them any more.

A worker that is killed cannot say that its run is over, nor can one whose last call finds the
server away. Every worker looks for such runs of its own node, where it knows processes by pid and
start time: it gives them an end and has them begun again. A run of another node is left to that
node's workers.

Who has a run in hand is told by the message of the Pending state with which it was taken. That is
one call, which either happened or did not; the run's ``infrastructure_pid`` is set by a later one.
Whether a process of this node still executes it is told by the run's lock (`run_lock_if_free`), and
by nothing that the server says: a server that was away shows runs as crashed that go on.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterTags,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed

from trinity_sync.fs.process import process_lives
from trinity_sync.orchestration.orphaned_images import let_give_way
from trinity_sync.orchestration.prefect_queries import (
    UNDER_WAY,
    filter_pool,
    make_due_state,
    read_server_time,
)
from trinity_sync.snapshot.run_lock import run_lock_if_free

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Times that a run is begun before its crashes are left for a person to look at."""
TAKEN_BY = "Taken by "
"""Begins the message of the Pending state of a run that a worker has taken; the rest names the
process, as ``node/pid/start time``."""
TAG = "trinity-sync"
"""Of all deployments of prefect.yaml: a server's other flows may leave any number of tasks."""
LATE_S = 60.0
"""Seconds after a run's end in which its tasks' own reports may still come in: Prefect sends them
apart from it, and again every 30 s until the server has them."""


async def mend(client: PrefectClient, run: FlowRun, here: str, *, spool: Path) -> None:
    """Give a run that was seen under way its end, if it is lost, and have it begun again.

    Args:
        client: client of the Prefect server.
        run: the run.
        here: this process, as ``node/pid/start time``.
        spool: of this node.
    """
    with run_lock_if_free(spool, run.id) as free:
        if free:
            await _mend(client, run, here, spool)


async def _mend(client: PrefectClient, run: FlowRun, here: str, spool: Path) -> None:
    """As `mend`, under the run's lock: what is read here was not done by a process at work."""
    states = await client.read_flow_run_states(run.id)
    now = await client.read_flow_run(run.id)
    if now.state is None or now.state.type not in UNDER_WAY:
        return
    if now.state.id not in {state.id for state in states}:
        return  # it moved between the two questions, so somebody is at it
    owner = _owner(states)
    node, _, process = owner.partition("/")
    if owner != here and (node != here.partition("/")[0] or process_lives(process)):
        return
    why = "found no server when it ended" if owner == here else "died"
    if now.state.is_cancelling():
        end: State[None] = Cancelled(message=f"Cancelled; its process {owner} {why}.")
        let_give_way(spool, now.parameters, str(end.message))
    else:
        end = Crashed(message=f"Its process {owner} {why}.")
    logger.warning("flow run %s: %s", run.name, end.message)
    await _end_tasks(client, await _tasks_under_way(client, FlowRunFilter(id=_of([run.id]))), end)
    await client.set_flow_run_state(run.id, end, force=True)
    await _begin_again(client, run.id, here)


async def begin_again(client: PrefectClient, run_id: UUID, here: str, *, spool: Path) -> None:
    """Have a crashed run begun again, unless it still runs here or that was done too often.

    The server shows a run as crashed while it lives if it was away for long; such a run most often
    ends soon, as what it reports. On this node the run's lock tells. A run of another node is left
    alone for a minute.
    """
    with run_lock_if_free(spool, run_id) as free:
        if free:
            await _begin_again(client, run_id, here)


async def _begin_again(client: PrefectClient, run_id: UUID, here: str) -> None:
    states = await client.read_flow_run_states(run_id)
    run = await client.read_flow_run(run_id)
    if run.state is None or not run.state.is_crashed() or len(_takings(states)) >= ATTEMPTS:
        return
    if _owner(states).partition("/")[0] not in ("", here.partition("/")[0]):
        age = await read_server_time(client) - run.state.timestamp
        if age < timedelta(seconds=LATE_S):
            return
    logger.warning("%s crashed (%s) and is begun again", run.name, run.state.message)
    await client.set_flow_run_state(run_id, make_due_state(AwaitingRetry), force=True)


async def end_unheard_tasks(client: PrefectClient, pool: str, *, late_s: float = LATE_S) -> None:
    """Give the tasks of ended runs an end whose own reports were lost with a server."""
    before = datetime.now(timezone.utc) - timedelta(seconds=late_s)
    final = [StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED]
    ended = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=final)),
        end_time=FlowRunFilterEndTime(before_=before),  # type: ignore[arg-type]
    )
    tasks: dict[UUID, list[TaskRun]] = defaultdict(list)
    ours = DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG]))
    for task in await _tasks_under_way(client, ended, ours):
        if task.flow_run_id:
            tasks[task.flow_run_id].append(task)
    if not tasks:
        return
    for run in await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(id=_of(list(tasks))), work_pool_filter=filter_pool(pool)
    ):
        why = f"Its flow run is {run.state_name}; what it reported itself did not come in."
        if run.state_type == StateType.COMPLETED:
            end: State[None] = Completed(message=why)
        else:
            end = Cancelled(message=why) if run.state_name == "Cancelled" else Crashed(message=why)
        await _end_tasks(client, tasks[run.id], end)


async def _tasks_under_way(
    client: PrefectClient, runs: FlowRunFilter, deployments: DeploymentFilter | None = None
) -> list[TaskRun]:
    under_way = TaskRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING])
    return await client.read_task_runs(
        flow_run_filter=runs,
        deployment_filter=deployments,
        task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=under_way)),
    )


async def _end_tasks(client: PrefectClient, tasks: Sequence[TaskRun], end: State[None]) -> None:
    for task in tasks:
        state: State[None] = State(type=end.type, name=end.name, message=end.message)
        await client.set_task_run_state(task.id, state, force=True)


def _takings(states: Sequence[State]) -> list[State]:
    return [s for s in states if s.is_pending() and (s.message or "").startswith(TAKEN_BY)]


def _owner(states: Sequence[State]) -> str:
    """The process that took the run last, as ``node/pid/start time``; "" if nobody has."""
    taken = _takings(states)
    return str(taken[-1].message).removeprefix(TAKEN_BY) if taken else ""


def _of(run_ids: list[UUID]) -> FlowRunFilterId:
    return FlowRunFilterId(any_=run_ids)
