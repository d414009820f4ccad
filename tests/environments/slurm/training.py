"""A training of the README's shape that a job of Slurm runs: ``root stop [restarts]``.

It saves each step, prints a digest of each state that it saves or resumes from, and pauses after
the step ``stop``, which each restart of the job doubles, until it is killed. With ``0``, it trains
until it is told to end.
"""

import hashlib
import signal
import sys
import time

import torch

from trinity_sync import CheckpointCoordinator


def digest(states: dict[str, object]) -> str:
    found = hashlib.sha256()
    for value in torch.utils._pytree.tree_leaves(states):
        text = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        found.update(text)
    return found.hexdigest()[:16]


def main(root: str, stop: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointCoordinator(root) as saves:
        saves.on_preemption(signal.SIGUSR1, grace_s=20)
        done = saves.latest_step() or 0
        if done:
            state = saves.load(done)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optim"])
            print("resumed", done, digest(state), flush=True)
        step = done
        while True:
            step += 1
            torch.manual_seed(step)
            model(torch.randn(8, 64)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            if saves.any_preempted():
                result = saves.emergency_save(step, states)
                print("ended", step, digest(states), *sorted(result.committed), flush=True)
                return
            if stop:
                saves.save(step, states)
                print("saved", step, digest(states), flush=True)
            while step == stop:
                time.sleep(1)
            time.sleep(0 if stop else 0.1)


if __name__ == "__main__":
    restarts = int(sys.argv[3]) if sys.argv[3:] else 0
    if restarts:
        print("started", flush=True)
    main(sys.argv[1], int(sys.argv[2]) << restarts)
