"""A rollout worker, which has no state: prompts in, rollouts out, with the newest weights."""

import asyncio
import time

import torch

from tests.environments.whole_run.run import Run
from tests.environments.whole_run.task import create_model, roll_out
from trinity_sync import WeightReader

PAUSE_S = 0.05


def work(run: Run, number: int) -> None:
    run.ask("controller")
    model = create_model().eval()
    torch.seed()
    with run.connect() as ask, WeightReader(root=run.root, name=f"rollout-{number}") as reader:
        rollouts = {}
        while True:
            ids, rollouts = ask("rolled out", rollouts), {}
            if not ids:
                time.sleep(PAUSE_S)
                continue
            if asyncio.run(reader.wait_newer(timeout_s=0)):
                reader.load_into(model)
            rollouts = roll_out(model, ids)
