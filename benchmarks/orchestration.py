"""From the API call to the first task and to Completed, for saves of next to no bytes."""

import time
from datetime import datetime
from pathlib import Path

import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterIdempotencyKey,
)

from benchmarks.measure import Samples
from trinity_sync.client.coordinator import CheckpointCoordinator

NAME = "trinity_sync + Prefect"
WARM_UP = 3
TASKS = 5
"""Tasks of a save: one for each component, and the commit."""


def orchestration(runs: int, folder: Path, shared: Path) -> Samples:
    """Save one step after the other, five tasks each, on the stack that the environment names."""
    del shared  # the stack has a spool
    metadata = folder / "metadata"
    metadata.mkdir()
    (metadata / "config.json").write_text("{}")
    weight = torch.zeros(100)
    states = {name: {"w": weight} for name in ("model", "optim", "extra_state")}
    samples: Samples = {(NAME, name): [] for name in ("first task", "completed", "committed")}
    with (
        CheckpointCoordinator(folder / "ckpts") as saves,
        get_client(sync_client=True) as client,
    ):
        for step in range(1, WARM_UP + runs + 1):
            saves.save(step, states, metadata=metadata)
            saves.wait_all(60)
            key = list(saves.commit_seconds)[-1]
            run_filter = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key]))
            run = client.read_flow_runs(flow_run_filter=run_filter)[0]
            while run.end_time is None:
                time.sleep(0.05)
                run = client.read_flow_run(run.id)
            begun: list[datetime] = []
            while len(begun) < TASKS:  # task runs reach the API through events, a second later
                time.sleep(0.1)
                tasks = client.read_task_runs(
                    flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
                )
                begun = [task.start_time for task in tasks if task.start_time]
            assert run.created  # by the server
            began = run.created.timestamp()
            first = min(begun)
            if step > WARM_UP:
                samples[NAME, "first task"].append(first.timestamp() - began)
                samples[NAME, "completed"].append(run.end_time.timestamp() - began)
                samples[NAME, "committed"].append(saves.commit_seconds[key])
    return samples
