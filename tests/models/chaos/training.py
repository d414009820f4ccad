"""A real training, tiny and exact: two gloo ranks, whose state at a step is the same in every run.

So a reader of a step can tell whether it is that of one instant, to the last bit. Run as a rank,
it resumes from the newest commit, submits one step after another, notes what it does as lines of
JSON, and ends when the file ``stop`` appears.
"""

import faulthandler
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import (
    SaveFailedError,
    SaveTimeoutError,
    SpoolFullError,
    SupersededError,
)
from trinity_sync.storage.runs import list_runs

RANKS = 2
WIDTH = 192
SAVE_EVERY = 3
WAIT_EVERY = 9
KEEP = 6
STEP_S = 0.3


class Model:
    """Weights and Adam; `gradients` of a step and rank, and the `update` by their mean."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.net = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)

    def gradients(self, step: int, rank: int) -> torch.Tensor:
        """All in one flat tensor."""
        batch = torch.Generator().manual_seed(1000 * step + rank)
        self.net.zero_grad()
        self.net(torch.randn(8, WIDTH, generator=batch)).square().mean().backward()
        return torch.cat([weight.grad.flatten() for weight in self.net.parameters()])

    def update(self, total: torch.Tensor) -> None:
        at = 0
        for weight in self.net.parameters():
            weight.grad = (total[at : at + weight.numel()] / RANKS).view_as(weight)
            at += weight.numel()
        self.optimizer.step()

    def states(self, step: int, rank: int) -> dict[str, Any]:
        return {
            "model": self.net.state_dict(),
            "optim": self.optimizer.state_dict(),
            "extra_state": {"step": step, "rank": rank},
        }

    def load(self, states: dict[str, Any]) -> None:
        self.net.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optim"])


def digest(states: dict[str, Any]) -> str:
    """Of all weights and optimizer states."""
    found = xxhash.xxh3_128()
    for weight in states["model"].values():
        found.update(weight.numpy().tobytes())
    for each in states["optim"]["state"].values():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            found.update(each[name].numpy().tobytes())
    return found.hexdigest()


class Expected:
    """What the state at each step must be: the same training, in this process, without faults.

    It computes with one thread, as the ranks do: with two, some CPUs sum in another order.
    """

    def __init__(self) -> None:
        self._model, self._digests = Model(), [""]

    def __getitem__(self, step: int) -> str:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            while len(self._digests) <= step:
                at = len(self._digests)
                self._model.update(sum(self._model.gradients(at, rank) for rank in range(RANKS)))
                self._digests.append(digest(self._model.states(at, 0)))
        finally:
            torch.set_num_threads(threads)
        return self._digests[step]


class Notes:
    """Lines of what a process did, for other processes; `time.monotonic` is the same in all."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def __call__(self, what: str, **more: Any) -> None:
        self._file.write(json.dumps({"at": time.monotonic(), "what": what, **more}) + "\n")


def train(root: str, rank: int, rendezvous: str, notes: Notes, stop: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    key = Path(rendezvous).name
    saves = CheckpointCoordinator.of_process_group(root, run_key=key, job={"rank_timeout_s": 15})
    step, model = saves.latest_step() or 0, Model()
    if step:
        model.load(saves.load(step))
    notes("began", step=step)
    run, waiting = 0, list[int]()
    while True:
        total = torch.tensor(float(stop.exists()))
        dist.all_reduce(total)
        if total:
            break
        step += 1
        gradients = model.gradients(step, rank)
        dist.all_reduce(gradients)
        model.update(gradients)
        if step % SAVE_EVERY == 0:
            notes("staging", step=step)
            try:
                saves.save(step, model.states(step, rank), keep=KEEP)
            except SupersededError as error:
                notes("failed", steps=[step], why=str(error))
            else:
                run = run or next(
                    each.number for each in list_runs(root) if each.key.startswith(f"{key}.")
                )
                notes("submitted", step=step, run=run)
                waiting.append(step)
        if step % WAIT_EVERY == 0:
            waiting = await_saves(saves, waiting, notes, timeout=60.0)
        time.sleep(STEP_S)
    await_saves(saves, waiting, notes, timeout=120.0)
    saves.close()
    notes("ended")


def await_saves(
    saves: CheckpointCoordinator, waiting: list[int], notes: Notes, timeout: float
) -> list[int]:
    """Wait for the submitted saves and note their outcomes; returns those still in flight."""
    try:
        saves.wait_all(timeout)
    except SaveTimeoutError as error:
        notes("late", steps=waiting, why=str(error))
        return waiting
    except SaveFailedError as error:
        failed = [step for step in waiting if f"step {step} " in str(error).replace(":", " ")]
        notes("failed", steps=failed or waiting, why=str(error))
        waiting = [step for step in waiting if failed and step not in failed]
    notes("committed", steps=waiting)
    return []


def main() -> None:
    root, rank, rendezvous, notes, stop = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # shows where it hangs
    note = Notes(Path(notes))
    try:
        train(root, int(rank), rendezvous, note, Path(stop))
    except SpoolFullError as error:
        note("refused", why=str(error))
        raise


if __name__ == "__main__":
    main()
