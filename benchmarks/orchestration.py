"""From the API call to the first task and to Completed, for saves of next to no bytes."""

import time
from pathlib import Path

import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterIdempotencyKey,
)
from prefect.settings import PREFECT_API_URL, temporary_settings

from benchmarks.measure import Record, record
from trinity_sync.coordinator import CheckpointCoordinator
from trinity_sync.orchestration.stack import running
from trinity_sync.settings import Settings


def orchestration(folder: Path, settings: Settings, runs: int) -> list[Record]:
    """On an embedded stack of its own: one save after the other, four parallel tasks each."""
    metadata = folder / "metadata"
    metadata.mkdir()
    (metadata / "config.json").write_text("{}")
    weight = torch.zeros(100)
    states = {name: {"w": weight} for name in ("model", "optim", "extra_state")}
    samples: dict[str, list[float]] = {"first task running": [], "completed": [], "committed": []}
    with (
        running(settings) as stack,
        temporary_settings({PREFECT_API_URL: stack.api_url}),
        CheckpointCoordinator(folder / "ckpts", settings=settings) as saves,
        get_client(sync_client=True) as client,
    ):
        for step in range(1, runs + 4):
            saves.save(step, states, metadata=metadata)
            saves.wait_all(60)
            key = list(saves.commit_seconds)[-1]
            run_filter = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
            run = client.read_flow_runs(flow_run_filter=run_filter)[0]
            while run.end_time is None:
                time.sleep(0.05)
                run = client.read_flow_run(run.id)
            time.sleep(0.5)  # task runs reach the API through events, a little later
            tasks = client.read_task_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
            )
            began = run.created.timestamp()
            first = min(task.start_time for task in tasks if task.start_time)
            if step > 3:
                samples["first task running"].append(first.timestamp() - began)
                samples["completed"].append(run.end_time.timestamp() - began)
                samples["committed"].append(saves.commit_seconds[key])
    return [
        record("orchestration", "trinity_sync", 0, 3, metric, seconds)
        for metric, seconds in samples.items()
    ]
