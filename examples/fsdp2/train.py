"""Train a sharded model with FSDP2 (`fully_shard`), and resume each rank's shards.

    torchrun --nproc-per-node 2 train.py     # kill it at any time and run it again
    trinity-sync show ckpts 50

Each rank saves its own shards, and nothing is gathered. A step is committed once all ranks have
submitted it. It resumes on the number of ranks that saved it; the documentation page on resharding
has the other cases. On GPUs, use a mesh of "cuda".
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trinity_sync import CheckpointCoordinator

STEPS, SAVE_EVERY = 150, 25

mesh = init_device_mesh("cpu", (2,))  # also creates the process group
rank = dist.get_rank()
torch.manual_seed(0)  # all ranks build the same model
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)  # and draws batches of its own

with CheckpointCoordinator.of_process_group("ckpts") as saves:  # all ranks call it
    done = saves.latest_step() or 0  # the same on all ranks
    if done:
        state = saves.load(done)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        torch.set_rng_state(state["extra_state"]["rng"])
        print(f"rank {rank}: resumed from step {done}")

    for step in range(done + 1, STEPS + 1):
        inputs = torch.randn(256, 512)
        loss = (model(inputs) - inputs).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVE_EVERY == 0:
            extra = {"rng": torch.get_rng_state()}
            states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            saves.save(step, {**states, "extra_state": extra})
            print(f"rank {rank}: step {step}, loss {loss:.4f}")

dist.destroy_process_group()
