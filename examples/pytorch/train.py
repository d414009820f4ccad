"""Train in one process, and resume bit-equal after a kill.

    python train.py          # about 10 seconds; kill it at any time and run it again
    trinity-sync ls ckpts

A second start prints the step that it resumes from. Loss and weights at the end are the same as
without a kill, because `extra_state` has the schedule and the state of the random numbers.
"""

import torch

from trinity_sync import CheckpointCoordinator

STEPS, SAVE_EVERY = 300, 50

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

with CheckpointCoordinator("ckpts") as saves:
    done = saves.latest_step() or 0  # waits for saves of a killed run
    if done:
        state = saves.load(done)  # from shared memory if it is still there, otherwise from disk
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        scheduler.load_state_dict(state["extra_state"]["scheduler"])
        torch.set_rng_state(state["extra_state"]["rng"])
        print(f"resumed from step {done}")

    for step in range(done + 1, STEPS + 1):
        inputs = torch.randn(1024, 512)
        loss = (model(inputs) - inputs).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % SAVE_EVERY == 0:
            extra = {"scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()}
            states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            saved = saves.save(step, {**states, "extra_state": extra})
            print(f"step {step}: loss {loss:.4f}, stall {1000 * saved.stall_s:.1f} ms")

print("every save is committed")  # the end of the block waited for them
