"""Train two replicas with DistributedDataParallel, and resume in the middle of an epoch.

    torchrun --nproc-per-node 2 train.py     # kill it at any time and run it again
    trinity-sync show ckpts 50

Rank 0 saves the replica, each rank its own `extra_state`. A step is committed once all ranks have
submitted it, so a kill between two ranks leaves no half step. On GPUs, pass "nccl" to
`init_process_group` and move model and batches to the rank's device.
"""

from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trinity_sync import CheckpointCoordinator

EPOCHS, SAVE_EVERY = 4, 25

dist.init_process_group("gloo")
rank = dist.get_rank()
data = TensorDataset(torch.rand(25_600, 256, generator=torch.Generator().manual_seed(0)))
sampler = DistributedSampler(data, seed=0)
# a generator of its own; otherwise each epoch draws from the rank's random numbers
loader = DataLoader(data, batch_size=256, sampler=sampler, generator=torch.Generator())

torch.manual_seed(rank)
network = torch.nn.Sequential(
    torch.nn.Linear(256, 512), torch.nn.Dropout(), torch.nn.Linear(512, 256)
)
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters())

with CheckpointCoordinator.of_process_group("ckpts") as saves:  # all ranks call it
    step, first_epoch, batch = 0, 0, 0
    if newest := saves.latest_step():  # the same on all ranks
        state = saves.load(newest)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        torch.set_rng_state(state["extra_state"]["rng"])
        step = newest
        first_epoch, batch = state["extra_state"]["epoch"], state["extra_state"]["batch"]
        print(f"rank {rank}: resumed from step {step}")

    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for (inputs,) in islice(loader, batch, None):  # skips what this epoch has seen
            loss = (model(inputs) - inputs).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step, batch = step + 1, batch + 1
            if step % SAVE_EVERY == 0:
                extra = {"rng": torch.get_rng_state(), "epoch": epoch, "batch": batch}
                states = {"model": network.state_dict(), "optim": optimizer.state_dict()}
                saves.save(step, {**states, "extra_state": extra}, replicated=("model", "optim"))
                print(f"rank {rank}: step {step}, loss {loss:.4f}")
        batch = 0

dist.destroy_process_group()
