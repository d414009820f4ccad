"""What the tests ask the Prefect server."""

import ssl
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterIdempotencyKey,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.states import AwaitingRetry

from tests.support.waiting import until
from trinity_sync.layout import Kind
from trinity_sync.saves.save_request import SAVE_DEPLOYMENT, SaveRequest
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.storage.runs import find_newest_run

TRUSTS_NONE = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For plain HTTP; one of the system's authorities takes 40 ms of a core, at each look."""

PAUSE_S = 0.3
"""Between two looks at what stays: each takes server and test 20 ms of a core."""


def key_of(root: Path, step: int, kind: Kind = "checkpoint") -> str:
    """By which Prefect knows the flow run of a save of the newest run."""
    run = find_newest_run(root)
    fields = {"run": run.number, "run_key": run.key, "identity": read_identity(root)}
    return SaveRequest(root=str(root), step=step, kind=kind, **fields).key


def kind_of(task: TaskRun) -> str:
    """Return the task's name, such as "persist-model", without its node and its number."""
    name, _, node = task.name.partition(" @ ")
    return name if node else name.rpartition("-")[0] or name


class Api:
    """The server of the session's stack."""

    @property
    def client(self) -> SyncPrefectClient:
        return get_client(sync_client=True, httpx_settings={"verify": TRUSTS_NONE})

    def run_of(self, key: str) -> FlowRun:
        """The one flow run of a save."""
        (run,) = self.runs_of(key)
        return run

    def runs_of(self, key: str) -> list[FlowRun]:
        """As `run_of`, where none may exist yet."""
        wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
        with self.client as client:
            return client.read_flow_runs(flow_run_filter=wanted)

    def tasks_of(self, run: FlowRun) -> list[TaskRun]:
        with self.client as client:
            return client.read_task_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
            )

    def ended_tasks(self, run: FlowRun, *kinds: str) -> list[TaskRun]:
        """Return the run's task runs, once those of these kinds and all others have ended.

        A server takes the states of task runs from events, which may come after the flow's end.
        """

        def find() -> list[TaskRun]:
            tasks = self.tasks_of(run)
            ended = [task for task in tasks if task.state and task.state.is_final()]
            complete = Counter(map(kind_of, ended)) >= Counter(kinds)
            return ended if complete and len(ended) == len(tasks) else []

        what = f"the end of the tasks {', '.join(kinds)} of {run.name}"
        return until(find, what, pause=PAUSE_S)

    def artifacts_of(self, run: FlowRun) -> list[Any]:
        with self.client as client:
            return client.read_artifacts(
                artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
            )

    def logs_of(self, run: FlowRun) -> list[str]:
        """The messages in the log of a run, which arrive later than they are logged."""
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id]))
        with self.client as client:
            return [each.message for each in client.read_logs(wanted)]

    def events_of(self, resource: str) -> dict[str, int]:
        """Names of the events about a resource, with the step of each."""
        wanted = {"filter": {"any_resource": {"id": [resource]}}}
        with self.client as client:
            answer = client.request("POST", "/events/filter", json=wanted).json()
        return {event["event"]: event["payload"]["step"] for event in answer["events"]}

    def start(self, parameters: dict[str, Any], name: str = SAVE_DEPLOYMENT) -> UUID:
        """A run of a deployment with any parameters, as a person would start it in the UI."""
        with self.client as client:
            deployment = client.read_deployment_by_name(name)
            return client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id

    def set_states(self, run_id: UUID, *states: State, force: bool = True) -> None:
        """Set states of a flow run one after the other, as its worker or, without force, the UI."""
        with self.client as client:
            for state in states:
                client.set_flow_run_state(run_id, state.model_copy(), force=force)

    def press_retry(self, run: FlowRun) -> None:
        """What the UI's Retry button does."""
        self.set_states(run.id, AwaitingRetry())

    def ended(self, run_id: UUID, timeout: float = 250) -> FlowRun:
        """The run once it has ended."""
        what = f"the end of run {run_id}"
        return until(lambda: self.final(run_id), what, timeout, pause=PAUSE_S)

    def final(self, run_id: UUID) -> FlowRun | None:
        """The run if it has ended."""
        with self.client as client:
            run = client.read_flow_run(run_id)
        return run if run.state and run.state.is_final() else None
