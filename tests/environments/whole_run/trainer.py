"""A rank of the trainer: GRPO with FSDP2 on the rollouts that the queue has."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.environments.whole_run.rollout_queue import RolloutQueue
from tests.environments.whole_run.run import ROLES, SAVE_EVERY, TRAINERS, Run
from tests.environments.whole_run.task import SAMPLES, Rollout, compute_loss, create_model
from trinity_sync import CheckpointCoordinator

BATCH, KEEP = 8, 3
"""Prompts of an optimizer step; checkpoints that are kept."""
PAUSE_S = 0.01


def train(run: Run, rank: int) -> None:
    rendezvous = f"file://{run.own / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=TRAINERS)
    model, mesh = create_model(), init_device_mesh("cpu", (TRAINERS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saves = CheckpointCoordinator.of_process_group(run.root, roles=ROLES, run_key=run.key)
    if step := saves.latest_step() or 0:
        states = saves.load(step)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optim"])
    if rank == 0:
        run.note(resumed=step)
    share = slice(rank * SAMPLES // TRAINERS, (rank + 1) * SAMPLES // TRAINERS)
    saved = step
    with run.connect() as ask:
        queue = RolloutQueue(run)
        while True:
            received = [await_batch(queue, ask) if rank == 0 else None]
            dist.broadcast_object_list(received)
            ids, batch = received[0]
            if ids:
                step += 1
                compute_loss(model, batch, share).backward()
                optimizer.step()
                optimizer.zero_grad()
                saves.upload(step, model.state_dict)
                if rank == 0:
                    run.note(step=step, ids=ids)
                    queue.remove(ids)
                    ask("trained", (ids, step))
            if step - saved == SAVE_EVERY or (not ids and step > saved):
                pause_s = saves.cut(step)
                states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
                saves.save(step, states, keep=KEEP)
                saved = step
                if rank == 0:
                    run.note(saved=step, pause_s=pause_s)
            if not ids:
                break
    saves.wait_all()
    saves.close()


def await_batch(queue: RolloutQueue, ask: Callable[[str, Any], Any]) -> tuple[list[int], Rollout]:
    """Return the rollouts of a step and their prompts; none once all prompts are trained."""
    while True:
        is_over = ask("is over", None)  # before a look at the queue
        ids = queue.list_ready()[:BATCH]
        if len(ids) == BATCH or is_over:
            return (ids, queue.get(ids)) if ids else ([], {})
        time.sleep(PAUSE_S)
