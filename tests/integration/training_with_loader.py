"""A training whose batches come from a DataLoader's workers, until the signal of a scheduler."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.integration.fsdp.commits import CommitsHere
from trinity_sync import CheckpointCoordinator, Settings

LAST = 8
"""Step after which the next batch has to be waited for."""


class Batches(Dataset[torch.Tensor]):
    """Numbers, of which the one after `LAST` is there once the other end of a FIFO is closed."""

    def __init__(self, fifo: Path) -> None:
        self._fifo = fifo

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == LAST + 1:
            self._fifo.read_text()
        return torch.tensor(index)


def train(options: argparse.Namespace) -> None:
    make: Any = StatefulDataLoader if options.stateful else DataLoader
    loader = make(
        Batches(options.fifo),
        num_workers=2,
        multiprocessing_context=options.method,
        persistent_workers=options.persistent,
    )
    batches = iter(loader) if options.loader_first else iter(())
    settings = Settings(spool=options.spool)
    with CheckpointCoordinator(options.root, settings=settings, trigger=CommitsHere()) as saves:
        saves.on_preemption(grace_s=60)
        batches = batches if options.loader_first else iter(loader)
        workers = [worker.pid for worker in batches._workers]
        weights = torch.zeros(1000)
        step = -1
        while not saves.any_preempted():
            print(step, *workers, flush=True)
            step = int(next(batches))
            weights.fill_(step)
            if step == LAST and options.loader_first:
                print(step, *workers, flush=True)
                for worker in workers:
                    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        state = {"model": {"w": weights}, "optim": {"m": -weights}}
        done = saves.emergency_save(step, state)
    print(json.dumps(asdict(done)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("root", "spool", "fifo"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--method", default="fork")
    for name in ("stateful", "persistent", "loader-first"):
        parser.add_argument(f"--{name}", action="store_true")
    train(parser.parse_args())
