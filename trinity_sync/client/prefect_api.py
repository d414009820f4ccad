"""What trainers, commands and the stack read from a Prefect server and write to it.

The server's clock rules: a state that is due now is sent without a time, which the server adds. A
time of this node would delay the run where the server's clock is behind.
"""

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from trinity_sync.client.prefect_connection import PrefectConnection
from trinity_sync.errors import PrefectApiError
from trinity_sync.layout import Kind
from trinity_sync.saves.save_request import SAVE_DEPLOYMENT
from trinity_sync.settings import Settings

T = TypeVar("T")
PAGE = 200
"""Maximum number of objects in one answer of the server."""
FAILED = ("FAILED", "CRASHED", "CANCELLED")
"""Types of the final states of a flow run that has not committed its step."""
FINAL = ("COMPLETED", *FAILED)
AT_LIMIT = "Deployment concurrency limit reached."  # of a run that a limit has cancelled
UNDER_WAY = ("RUNNING", "PENDING", "CANCELLING")
"""Types of the states of runs that a process executes, and of zombie runs."""


@dataclass(frozen=True)
class State:
    """A state of a flow run."""

    type: str = ""
    """Such as ``RUNNING``; empty if the run has none."""
    name: str = ""
    """Such as ``Running`` or ``Evicted``."""
    message: str = ""
    since: float = 0.0
    """Time by the server's clock, in seconds since the epoch."""
    id: str = ""


@dataclass(frozen=True)
class FlowRun:
    """A flow run."""

    id: uuid.UUID
    name: str
    state: State
    key: str = ""
    """Its idempotency key."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Its tags, such as ``step:5``, by what precedes the colon."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    started_at: float = 0.0
    """Seconds since the epoch; 0 if it has not started."""
    seconds: float = 0.0
    """Seconds that it took, or has taken so far."""
    attempts: int = 0
    """Number of times that it was started."""
    page: str = ""
    """URL of its page in the Prefect UI."""

    @property
    def is_save(self) -> bool:
        """Whether it is a save's, with step, run and kind; a copy by a user has no key."""
        numbers = all(self.tags.get(name, "").isdigit() for name in ("step", "run"))
        return numbers and bool(self.tags.get("kind") and self.key)

    @property
    def step(self) -> int:
        """Step that it saves."""
        return int(self.tags["step"])

    @property
    def run(self) -> int:
        """Number of the run of the job."""
        return int(self.tags["run"])

    @property
    def kind(self) -> Kind:
        """Kind that it saves."""
        return cast(Kind, self.tags["kind"])

    @property
    def save(self) -> tuple[int, int, Kind]:
        """Run, step and kind."""
        return self.run, self.step, self.kind


class PrefectApi(PrefectConnection):
    """The API of a Prefect server; arguments as of `PrefectConnection`.

    Every coroutine raises `PrefectApiError` if the server does not answer as it should; the message
    says what to do.
    """

    async def read_version(self) -> str:
        """Return the version of the server."""
        return await self.call("/admin/version", str)

    # -------------------------------------------------------------- flow runs

    async def require_deployment(self, name: str = SAVE_DEPLOYMENT) -> str:
        """Require that the server accepts the password and has a deployment; return its id."""
        if name not in self._deployments:
            path = f"/deployments/name/{name}"
            self._deployments[name] = await self.call(path, lambda it: str(uuid.UUID(it["id"])))
        return self._deployments[name]

    async def create_flow_run(
        self, fields: Mapping[str, Any], deployment: str = SAVE_DEPLOYMENT
    ) -> FlowRun:
        """Create a flow run that is due now, or return the one that has its idempotency key.

        ``fields`` are those of `SaveRequest.flow_run`.

        Raises:
            RequestRefusedError: the server will never accept the request.
        """
        try:
            found = await self.require_deployment(deployment)
            body = {**fields, "state": {"type": "SCHEDULED"}}
            return await self.call(f"/deployments/{found}/create_flow_run", self._decode_run, body)
        except PrefectApiError:
            self._deployments.clear()  # it may have been deployed again, with another id
            raise

    async def read_flow_run(self, run: uuid.UUID) -> FlowRun:
        """Read a flow run."""
        return await self.call(f"/flow_runs/{run}", self._decode_run)

    async def read_states(self, run: uuid.UUID) -> list[State]:
        """Read the states that a flow run has had, the oldest first."""
        path = f"/flow_run_states/?flow_run_id={run}"
        return await self.call(path, lambda found: [_decode_state(each) for each in found])

    async def read_job_runs(self, job: str, *, step: int | None = None) -> list[FlowRun]:
        """Read at most `PAGE` flow runs of a job or a step, the newest first."""
        of_step = [] if step is None else [f"step:{step}"]
        newest_first = {"sort": "EXPECTED_START_TIME_DESC"}  # a server may have a lower limit
        return await self._filter_runs({"tags": {"all_": [f"job:{job}", *of_step]}}, newest_first)

    async def read_saves(self, job: str, *, step: int | None = None) -> list[FlowRun]:
        """Read the newest flow runs of a job's saves, each of the last attempt."""
        return find_last_attempts(await self.read_job_runs(job, step=step))

    async def read_pool_runs(
        self,
        pool: str,
        *states: str,
        deployment: str | None = None,
        ids: Sequence[str] | None = None,
        ended_after: float | None = None,
    ) -> list[FlowRun]:
        """Read all runs of a work pool that are in one of some states.

        They are also of one deployment, if it is named, among ``ids``, if these are given, and have
        ended after a time by this node's clock, in seconds since the epoch.
        """
        others: dict[str, Any] = {"work_pools": {"name": {"any_": [pool]}}}
        if deployment:
            others["deployments"] = {"name": {"any_": [deployment]}}
        more: dict[str, Any] = {}
        if ended_after is not None:
            after = datetime.fromtimestamp(ended_after + self.clock_skew, UTC)
            more["end_time"] = {"after_": after.isoformat()}
        found: list[FlowRun] = []
        while page := await self._filter_runs(
            {
                **more,
                "state": _of_types(*states),
                "id": {"any_": ids, "not_any_": [str(run.id) for run in found]},
            },
            others,
        ):
            found += page
        return found

    async def count_waiting_runs(self, pool: str) -> int:
        """Return how many runs of a work pool are due and not yet acquired by a worker."""
        now = datetime.now(UTC).isoformat()  # schedules create their runs hours ahead
        due = {"state": _of_types("SCHEDULED"), "expected_start_time": {"before_": now}}
        body = {"flow_runs": due, "work_pools": {"name": {"any_": [pool]}}}
        return await self.call("/flow_runs/count", int, body)

    async def set_state(self, run: uuid.UUID, state: State) -> None:
        """Set the state of a flow run, whatever its state is."""
        await self.call(f"/flow_runs/{run}/set_state", bool, _encode_state(state))

    async def retry_flow_run(self, run: uuid.UUID) -> None:
        """Schedule an ended flow run again, as the Retry button of the Prefect UI does."""
        await self.set_state(run, State("SCHEDULED", "AwaitingRetry"))

    async def _filter_runs(
        self, wanted: Mapping[str, Any], others: Mapping[str, Any] | None = None
    ) -> list[FlowRun]:
        return await self.call(
            "/flow_runs/filter",
            lambda found: [self._decode_run(each) for each in found],
            {"flow_runs": wanted, **(others or {})},
        )

    def _decode_run(self, run: Mapping[str, Any]) -> FlowRun:
        return FlowRun(
            id=uuid.UUID(run["id"]),
            name=str(run.get("name") or ""),
            state=_decode_state(run.get("state")),
            key=str(run.get("idempotency_key") or ""),
            tags=dict(str(tag).partition(":")[::2] for tag in run.get("tags") or ()),
            parameters=run.get("parameters") or {},
            started_at=_decode_time(run.get("start_time")),
            seconds=float(run.get("estimated_run_time") or 0.0),
            attempts=int(run.get("run_count") or 0),
            page=self.get_page(run["id"]),
        )

    def get_page(self, run: uuid.UUID | str) -> str:
        """Return the URL of a flow run's page in the Prefect UI."""
        return f"{self.find_server().ui_url}/runs/flow-run/{run}"

    # -------------------------------------------------------------- task runs

    async def read_unfinished_tasks(self, runs: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the unfinished task runs of flow runs by filters, by the flow run's id."""
        found: dict[str, list[str]] = {}
        unfinished = {"task_runs": {"state": _of_types("RUNNING", "PENDING")}}
        for task in await self.call("/task_runs/filter", list, {**runs, **unfinished}):
            found.setdefault(str(task["flow_run_id"]), []).append(str(task["id"]))
        return found

    async def end_tasks(self, tasks: Sequence[str], end: State) -> None:
        """Set the final state of task runs."""
        for task in tasks:
            await self.call(f"/task_runs/{task}/set_state", bool, _encode_state(end))

    # -------------------------------------------------------------- the work pool, artifacts

    async def read_work_pool(self, pool: str) -> dict[str, Any] | None:
        """Read a work pool, as the server describes it; None if there is none."""
        try:
            return await self.call(f"/work_pools/{pool}", dict)
        except PrefectApiError as error:
            if error.status != 404:
                raise
            return None

    async def list_paused(self, pool: str) -> list[str]:
        """Return what is paused of a work pool that exists, also by a limit of 0 runs."""
        found = [("work pool", await self.call(f"/work_pools/{pool}", dict))]
        queues = await self.call(f"/work_pools/{pool}/queues/filter", list, {})
        found += [("work queue", each) for each in queues]
        for name, each in (await self.read_deployments(pool)).items():
            limit = each.get("global_concurrency_limit") or {"active": False}
            is_paused = limit["active"] and limit["limit"] == 0  # else only its schedule may be
            found.append(("deployment", {"name": name, "is_paused": is_paused}))
        return [
            f"{what} {each['name']}"
            for what, each in found
            if each["is_paused"] or each.get("concurrency_limit") == 0
        ]

    async def read_deployments(self, pool: str) -> dict[str, dict[str, Any]]:
        """Return the deployments of a work pool, as the server describes them, by name."""
        wanted = {"work_pools": {"name": {"any_": [pool]}}}
        return await self.call(
            "/deployments/filter", lambda found: {str(it["name"]): it for it in found}, wanted
        )

    async def read_workers(self, pool: str) -> set[str]:
        """Return the names of the online workers of a work pool."""
        if await self.read_work_pool(pool) is None:
            return set()
        return await self.call(
            f"/work_pools/{pool}/workers/filter",
            lambda found: {str(it["name"]) for it in found if it["status"] == "ONLINE"},
            {},
        )

    async def read_table(self, key: str) -> tuple[float, list[dict[str, Any]]] | None:
        """Return creation time (since the epoch) and rows of the newest table artifact of a key."""
        wanted = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC", "limit": 1}
        for artifact in await self.call("/artifacts/filter", list, wanted):
            data = artifact["data"]
            rows = json.loads(data) if isinstance(data, str) else data
            if isinstance(rows, list):
                return _decode_time(artifact["created"]), rows
        return None


def ask_server(
    settings: Settings,
    ask: Callable[[PrefectApi], Awaitable[T]],
    api_url: str | None = None,
    *,
    answer_s: float | None = None,
) -> T:
    """Run ``ask`` with a client of its own, and wait; the arguments are those of `PrefectApi`.

    Raises:
        PrefectApiError: The server does not answer as it should.
    """

    async def run() -> T:
        async with PrefectApi(settings, api_url, answer_s=answer_s) as api:
            return await ask(api)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    with ThreadPoolExecutor(1, "ask-server") as thread:
        return thread.submit(asyncio.run, run()).result()


def _of_types(*types: str) -> dict[str, Any]:
    return {"type": {"any_": list(types)}}


def find_last_attempts(runs: Iterable[FlowRun]) -> list[FlowRun]:
    """Return the flow runs of saves; of one that was submitted again, that of the last attempt."""
    found: dict[tuple[object, ...], FlowRun] = {}
    saves = [run for run in runs if run.is_save]
    for run in sorted(saves, key=lambda run: -int(run.tags.get("attempt", 1))):
        found.setdefault((*run.save, run.name), run)  # which has the roles
    return list(found.values())


def strip_preamble(message: str) -> str:
    """Return the message of a state without what Prefect writes before that of an exception."""
    return re.sub(r"^(Flow|Task) run encountered an exception: (\w+: )?", "", message)


def _decode_state(state: Mapping[str, Any] | None) -> State:
    if not state:
        return State()
    return State(
        type=str(state["type"]),
        name=str(state.get("name") or ""),
        message=strip_preamble(str(state.get("message") or "")),
        since=_decode_time(state["timestamp"]),
        id=str(state.get("id") or ""),
    )


def _encode_state(state: State) -> dict[str, Any]:
    """Return the body of a request that sets a state, whatever the state is now."""
    wanted = {"type": state.type, "name": state.name, "message": state.message or None}
    return {"state": wanted, "force": True}


def _decode_time(text: str | None) -> float:
    """Return a time of the server's in seconds since the epoch; 0 if it has none."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else 0.0
