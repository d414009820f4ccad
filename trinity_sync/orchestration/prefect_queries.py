"""Queries and events of the stack at a Prefect server, with Prefect's own client.

Trainers use `client.prefect_api`. `request_run` creates every flow run. A save is requested by its
`SaveRequest.flow_run`, whose idempotency key gives all requesters the same run.

Scheduled states follow the server's clock. Prefect's client writes its own time into a state that
is due now: a server whose clock is behind delays the run, and a worker whose clock is behind does
not see it. The states made here have no time, and the server adds it.

Events about the steps of a job are for automations such as "no commit within 30 minutes". The
resource of an event is the job, ``trinity-sync.job.<job id>``. Prefect sends events from a thread;
an event that cannot be sent is dropped and never fails a save.
"""

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

import httpx
from prefect.client.orchestration import PrefectClient, SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.client.schemas.sorting import ArtifactSort, FlowRunSort
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)
from prefect.states import Scheduled

from trinity_sync.client.prefect_api import hide_password, read_local_stack
from trinity_sync.errors import PrefectApiError, RequestRefusedError, TrinitySyncError
from trinity_sync.layout import Kind
from trinity_sync.orchestration.quantities import make_artifact_key
from trinity_sync.orchestration.run_page import StepOutcome
from trinity_sync.settings import Settings
from trinity_sync.snapshot.job_identity import job_id

logger = logging.getLogger(__name__)

RETENTION = "retention"
VERIFIED = "verified"
"""Subjects of table artifacts, see `make_artifact_key`."""
PAGE = 200
"""Maximum number of flow runs in one response of the server."""
UNDER_WAY = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)
"""States of runs that a process executes, and of zombie runs."""


# The server


def find_server(settings: Settings) -> tuple[str | None, str]:
    """Return URL and password of the Prefect API for `open_client`.

    It is that of this process's environment or profile, or the local stack's. The password is that
    of the local stack; empty for another server, or if the environment has one.

    Raises:
        StackError: The state file of the local stack cannot be read, or is not this user's.
    """
    url = os.environ.get("PREFECT_API_URL") or PREFECT_API_URL.value()
    try:
        own_url, auth = read_local_stack(settings.home)
    except PrefectApiError:
        if not url:
            raise
        return url, ""
    if url and (url != own_url or PREFECT_API_AUTH_STRING.value()):
        return url, ""
    return own_url or None, auth


ANSWER_S = 10.0
"""Seconds that a command waits for an answer of the server: one that accepts may never answer."""


@contextmanager
def open_client(
    api_url: str | None = None, auth: str = "", *, answer_s: float | None = None
) -> Iterator[SyncPrefectClient]:
    """Open a client of a Prefect server, and turn errors within it into a `PrefectApiError`.

    URL and ``auth`` (``user:password``) are by default those of the environment. Each answer is
    awaited for ``answer_s`` without retries, by default as Prefect's settings say, which is
    minutes.

    Raises:
        PrefectApiError: No server is configured, it cannot be reached, or it refuses a call.
    """
    url = api_url or PREFECT_API_URL.value()
    if not url:
        raise PrefectApiError(
            "no Prefect server is known. Run trinity-sync up, or set PREFECT_API_URL."
        )
    try:
        settings: dict[Any, Any]
        settings = {PREFECT_API_URL: url, **({PREFECT_API_AUTH_STRING: auth} if auth else {})}
        if answer_s is not None:
            settings |= {PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: answer_s}
        with temporary_settings(settings), get_client(sync_client=True) as client:
            yield client
    except httpx.HTTPStatusError as error:
        raise PrefectApiError(
            f"Prefect server at {hide_password(url)} refused {error.request.method} "
            f"{error.request.url.path}: {error.response.status_code} {error.response.text[:300]}. "
            "Is it a Prefect 3 server, and is PREFECT_API_KEY or PREFECT_API_AUTH_STRING needed?",
            url=hide_password(url),
            status=error.response.status_code,
        ) from error
    except httpx.TransportError as error:
        raise PrefectApiError(
            f"Prefect server at {hide_password(url)} cannot be reached "
            f"({error or type(error).__name__}). Start it, or correct PREFECT_API_URL.",
            url=hide_password(url),
        ) from error
    except TrinitySyncError:
        raise
    except (httpx.InvalidURL, ValueError) as error:  # not a URL, or not an answer of the API
        raise PrefectApiError(
            f"{hide_password(url)} is not the API of a Prefect 3 server "
            f"({type(error).__name__}). Correct PREFECT_API_URL; it ends with /api.",
            url=hide_password(url),
        ) from error


# Its clock


def compute_clock_skew(date: str | None, before: float, after: float) -> float:
    """Return the seconds by which a server's clock is ahead of this node's; negative if behind.

    ``date`` is the ``Date`` header of a response, truncated to the second. A skew that the
    truncation or the transfer can explain counts as 0, and so does a missing header.
    """
    if not date:
        return 0.0
    theirs = parsedate_to_datetime(date).timestamp()
    return max(theirs - after, 0.0) + min(theirs + 1 - before, 0.0)


async def measure_clock_skew(client: PrefectClient) -> float:
    """Return the seconds by which the server's clock is ahead of this node's."""
    before = time.time()
    answer = await client.request("GET", "/admin/version")
    return compute_clock_skew(answer.headers.get("date"), before, time.time())


async def read_server_time(client: PrefectClient) -> datetime:
    """Return the time by the server's clock, to a second."""
    return datetime.now(timezone.utc) + timedelta(seconds=await measure_clock_skew(client))


def make_due_state(scheduled: Callable[[], State[Any]] = Scheduled) -> State[Any]:
    """Return a scheduled state that is due now by the server's clock."""
    state = scheduled()
    state.state_details.scheduled_time = None
    return state


# Flow runs


async def request_run(
    client: PrefectClient, deployment_id: UUID, fields: Mapping[str, Any]
) -> FlowRun:
    """Create a flow run that is due now, or return the one that has its idempotency key.

    ``fields`` are those of the run, such as ``parameters``; `SaveRequest.flow_run` for a save.

    Raises:
        RequestRefusedError: The server will never accept the request, as after an upgrade of one
            side only.
        httpx.HTTPStatusError: The server does not accept it now.
    """
    try:
        return await client.create_flow_run_from_deployment(
            deployment_id, state=make_due_state(), **fields
        )
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if status not in (409, 422):
            raise
        raise RequestRefusedError(
            f"the Prefect server refuses its flow run: {error.response.text}; run: trinity-sync "
            "deploy",
            url=str(client.api_url),
            status=status,
        ) from error


async def read_pool_runs(
    client: PrefectClient, pool: str, *states: StateType, deployment: str | None = None
) -> list[FlowRun]:
    """Read all runs of a work pool, or of one deployment, that are in one of some states."""
    named = DeploymentFilter(name=DeploymentFilterName(any_=[deployment])) if deployment else None
    found: list[FlowRun] = []
    while page := await client.read_flow_runs(  # a response has some hundreds at most
        flow_run_filter=FlowRunFilter(
            state=filter_states(*states), id=FlowRunFilterId(not_any_=[run.id for run in found])
        ),
        deployment_filter=named,
        work_pool_filter=filter_pool(pool),
    ):
        found += page
    return found


async def read_due_runs(
    client: PrefectClient, pool: str, before: datetime
) -> list[WorkerFlowRunResponse]:
    """Read all runs of a work pool that are due, of all queues that are not paused.

    A response for the whole pool has `PAGE` runs at most, those of the queue with the highest
    priority first. So many may wait of a single job.
    """
    found: dict[UUID, WorkerFlowRunResponse] = {}
    for queue in await client.read_work_queues(work_pool_name=pool):
        wanted = {"work_queue_names": [queue.name], "scheduled_before": str(before)}
        while True:
            response = await client.request(
                "POST",
                "/work_pools/{name}/get_scheduled_flow_runs",
                path_params={"name": pool},
                json=wanted,
            )
            page = WorkerFlowRunResponse.model_validate_list(response.json())
            new = {each.flow_run.id: each for each in page if each.flow_run.id not in found}
            found |= new
            if len(page) < PAGE or not new:
                break
            wanted["scheduled_after"] = str(page[-1].flow_run.next_scheduled_start_time)
    return list(found.values())


def count_waiting_runs(client: SyncPrefectClient, pool: str) -> int:
    """Return how many runs of a work pool are due and not yet acquired by a worker."""
    return client.count_flow_runs(
        flow_run_filter=FlowRunFilter(
            state=filter_states(StateType.SCHEDULED),
            # schedules create their runs hours ahead
            expected_start_time=FlowRunFilterExpectedStartTime(before_=datetime.now(timezone.utc)),  # type: ignore[arg-type]
        ),
        work_pool_filter=filter_pool(pool),
    )


def read_heartbeats(client: SyncPrefectClient, pool: str) -> dict[str, datetime | None]:
    """Return the time of the last heartbeat of each online worker of a work pool, by its name."""
    try:
        workers = client.read_workers_for_work_pool(pool)
    except ObjectNotFound:
        return {}
    return {
        worker.name: worker.last_heartbeat_time
        for worker in workers
        if worker.status.value == "ONLINE"
    }


def filter_states(*states: StateType) -> FlowRunFilterState:
    """Return a filter for runs in one of some states."""
    return FlowRunFilterState(type=FlowRunFilterStateType(any_=list(states)))


def filter_pool(pool: str) -> WorkPoolFilter:
    """Return a filter for one work pool."""
    return WorkPoolFilter(name=WorkPoolFilterName(any_=[pool]))


# The history of a job


@dataclass(frozen=True)
class FlowRunSummary:
    """A flow run of a job."""

    name: str
    state: str
    """Name of its state, such as ``Completed``, ``Failed``, ``Superseded`` or ``Evicted``."""
    started_at: float
    """Seconds since the epoch; 0 if it has not started."""
    tasks: Set[str]
    """Names of its task runs, see `get_task_name`."""
    tags: dict[str, str]
    """``step``, ``run``, ``kind``."""
    failed: bool
    """Whether it failed, crashed or was cancelled."""
    message: str
    url: str
    ended: bool = True
    since: float = 0.0
    """When it entered its state, in seconds since the epoch."""

    @property
    def is_save(self) -> bool:
        """Whether it is a run of ``save-step``."""
        return "kind" in self.tags


@dataclass(frozen=True)
class ArtifactTable:
    """The newest table artifact of a key."""

    created_at: float
    """Seconds since the epoch."""
    rows: list[dict[str, Any]]


def read_job_runs(client: SyncPrefectClient, root: str | Path) -> list[FlowRunSummary]:
    """Read the newest flow runs of a job, at most `PAGE`, newest first."""
    tags = FlowRunFilterTags(all_=[f"job:{job_id(root)}"])
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(tags=tags),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=PAGE,
    )
    tasks = _read_tasks(client, runs)
    base = str(client.api_url).removesuffix("/").removesuffix("/api")
    return [_summarize_run(run, tasks[run.id], base) for run in runs]


def read_table(client: SyncPrefectClient, what: str, root: str | Path) -> ArtifactTable | None:
    """Read the newest table artifact about a job, such as that of `RETENTION`, or None."""
    key = make_artifact_key(what, Path(root).resolve())
    artifacts = client.read_artifacts(
        artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])),
        sort=ArtifactSort.CREATED_DESC,
        limit=1,
    )
    for artifact in artifacts:
        rows = json.loads(artifact.data) if isinstance(artifact.data, str) else artifact.data
        if isinstance(rows, list):
            created = artifact.created.timestamp() if artifact.created else 0.0
            return ArtifactTable(created, rows)
    return None


def _read_tasks(client: SyncPrefectClient, runs: list[FlowRun]) -> dict[UUID | None, set[str]]:
    found: dict[UUID | None, set[str]] = defaultdict(set)
    batch = 20  # runs in a request, so that their task runs fit into one response
    for start in range(0, len(runs), batch):
        ids = FlowRunFilterId(any_=[run.id for run in runs[start : start + batch]])
        answer = client.read_task_runs(flow_run_filter=FlowRunFilter(id=ids), limit=PAGE)
        for task in answer:
            found[task.flow_run_id].add(get_task_name(task))
    return found


def _summarize_run(run: FlowRun, tasks: Set[str], base: str) -> FlowRunSummary:
    state = run.state
    return FlowRunSummary(
        name=run.name,
        state=state.name or "" if state else "",
        started_at=run.start_time.timestamp() if run.start_time else 0.0,
        tasks=tasks,
        tags=dict(tag.partition(":")[::2] for tag in run.tags),
        failed=bool(state and (state.is_failed() or state.is_crashed() or state.is_cancelled())),
        message=(state.message or "") if state else "",
        url=f"{base}/runs/flow-run/{run.id}",
        ended=bool(state and state.is_final()),
        since=state.timestamp.timestamp() if state else 0.0,
    )


def get_task_name(task: TaskRun) -> str:
    """Return the name of a task run without its node and its number, such as ``persist-model``."""
    name, _, node = task.name.partition(" @ ")
    return name if node else name.rpartition("-")[0] or name


PREFIX = "trinity_sync.step."
JOB_RESOURCE = "trinity-sync.job."


def emit_step_event(
    outcome: StepOutcome,
    root: str | Path,
    step: int,
    *,
    job: str,
    run: int | None = None,
    kind: Kind | None = None,
    **payload: Any,
) -> None:
    """Send the event ``trinity_sync.step.<outcome>``; never raises.

    None is sent for weights that were evicted: newer weights supersede them, so nothing is lost.
    ``root`` is a real path; ``run`` is None if it is unknown, ``kind`` for the whole step. JSON can
    represent the values of ``payload``.
    """
    if not PREFECT_API_URL.value():  # Prefect would start a server of its own
        return
    if outcome == "evicted" and kind != "checkpoint":
        return
    # the worker that sees an eviction and the flow run that fails for it report it once
    name = f"trinity-sync/{job}/{run}/{step}/{kind}"
    event_id = uuid5(NAMESPACE_URL, name) if outcome == "evicted" else uuid4()
    try:
        emit_event(
            event=PREFIX + outcome,
            resource={
                "prefect.resource.id": JOB_RESOURCE + job,
                "prefect.resource.name": job,
                "trinity-sync.root": str(root),
            },
            payload={"step": step, "run": run, "kind": kind, **payload},
            id=event_id,
        )
    except Exception as error:
        logger.warning("cannot send the event that step %d is %s: %r", step, outcome, error)
