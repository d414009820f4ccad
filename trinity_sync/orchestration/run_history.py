"""What a Prefect server remembers of a job: its flow runs, their tasks, and retention's table."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.client.schemas.sorting import ArtifactSort, FlowRunSort

from trinity_sync.layout import job_id

PAGE = 200
"""What the server gives in one answer at most."""


@dataclass(frozen=True)
class RunFacts:
    """One flow run of a job."""

    name: str
    state: str
    began: float
    """Seconds since the epoch; 0 where it has not begun."""
    seconds: float
    tasks: dict[str, float]
    """Seconds of each task, the longest of its name."""
    tags: dict[str, str]
    """``step``, ``run``, ``kind``."""
    failed: bool
    message: str
    url: str


def runs_of(client: SyncPrefectClient, root: str | Path) -> list[RunFacts]:
    """The newest flow runs of the job at ``root``, as many as one answer has, newest first."""
    tags = FlowRunFilterTags(all_=[f"job:{job_id(root)}"])
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(tags=tags),
        sort=FlowRunSort.START_TIME_DESC,
        limit=PAGE,
    )
    tasks = _tasks_of(client, runs)
    base = str(client.api_url).removesuffix("/").removesuffix("/api")
    return [_facts(run, tasks.get(str(run.id), []), base) for run in runs]


def retention_of(client: SyncPrefectClient, root: str | Path) -> list[dict[str, Any]]:
    """What retention last decided about each step of the job; empty where it is not known."""
    artifacts = client.read_artifacts(
        artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["retention"])),
        sort=ArtifactSort.CREATED_DESC,
        limit=50,
    )
    for artifact in artifacts:
        rows = json.loads(artifact.data) if isinstance(artifact.data, str) else artifact.data
        if isinstance(rows, list):
            mine = [row for row in rows if row.get("root") == str(Path(root).resolve())]
            if mine:
                return mine
    return []


def _tasks_of(client: SyncPrefectClient, runs: list[FlowRun]) -> dict[str, list[TaskRun]]:
    found: dict[str, list[TaskRun]] = {}
    some = 20  # runs a question, so that their tasks fit into one answer
    for start in range(0, len(runs), some):
        ids = FlowRunFilterId(any_=[run.id for run in runs[start : start + some]])
        answer = client.read_task_runs(flow_run_filter=FlowRunFilter(id=ids), limit=PAGE)
        for task in answer:
            found.setdefault(str(task.flow_run_id), []).append(task)
    return found


def _facts(run: FlowRun, tasks: list[TaskRun], base: str) -> RunFacts:
    seconds: dict[str, float] = {}
    for task in tasks:
        name = task.name.rpartition("-")[0] or task.name
        took = task.total_run_time.total_seconds()
        seconds[name] = max(took, seconds.get(name, 0.0))
    state = run.state
    return RunFacts(
        name=run.name,
        state=state.name or "" if state else "",
        began=run.start_time.timestamp() if run.start_time else 0.0,
        seconds=run.total_run_time.total_seconds(),
        tasks=dict(sorted(seconds.items())),
        tags=dict(tag.partition(":")[::2] for tag in run.tags),
        failed=bool(state and (state.is_failed() or state.is_crashed() or state.is_cancelled())),
        message=(state.message or "") if state else "",
        url=f"{base}/runs/flow-run/{run.id}",
    )
