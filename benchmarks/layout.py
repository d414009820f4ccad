"""What staging costs by the number of tensors: before the first byte, and of many small ones."""

import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.measure import Samples
from benchmarks.training import Size, Training
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.integrations.verl.fsdp.state_dict import get_model_state_to_stage
from trinity_sync.settings import Settings
from trinity_sync.snapshot.image import Layout, lay_out

SMALL = 1024
"""Elements of a small tensor: 4 KiB."""
WARM_UP = 3


def fixed_cost(size: Size, runs: int, _folder: Path, shared: Path) -> Samples:
    """Return the seconds to lay a state out on a rank, for the first time and unchanged."""
    training = Training(size, shared)
    samples: Samples = defaultdict(list)
    for _ in range(runs):
        known: dict[str, Layout] = {}
        for metric in ("layout, first", "layout, unchanged"):
            states = training.state(get_model_state_to_stage)
            start = time.perf_counter()
            known = {name: lay_out(state, known.get(name))[0] for name, state in states.items()}
            samples["trinity_sync", metric].append(time.perf_counter() - start)
    return samples


def small_tensors(tensors: int, runs: int, folder: Path, shared: Path) -> Samples:
    """Return the stall of a save of small tensors, next to copies of the same and DCP's stager."""
    live = {str(number): torch.full((SMALL,), float(number)) for number in range(tensors)}
    copies = [torch.ones_like(tensor) for tensor in live.values()]
    whole, copy = torch.ones(tensors * SMALL), torch.ones(tensors * SMALL)
    pinned = {"use_pinned_memory": False, "use_non_blocking_copy": False}
    stager = DefaultStager(
        StagingOptions(use_async_staging=False, use_shared_memory=False, **pinned)
    )
    settings = Settings(spool=shared / "spool", home=shared / "home", saver="built-in")
    samples: Samples = defaultdict(list)

    def copy_each() -> None:
        for target, source in zip(copies, live.values(), strict=True):
            target.copy_(source)

    with CheckpointCoordinator(folder / "ckpts", settings=settings) as saves:
        for step in range(1, WARM_UP + runs + 1):
            for tensor in live.values():
                tensor.add_(1)
            for name, work in (
                ("trinity_sync", lambda: saves.save(step, {"model": live})),  # noqa: B023
                ("copy_ of each", copy_each),
                ("warm memcpy", lambda: copy.copy_(whole)),
                ("DCP's stager", lambda: stager.stage({"model": live})),
            ):
                start, cpu = time.perf_counter(), time.process_time()
                work()
                if step > WARM_UP:
                    samples[name, "stall"].append(time.perf_counter() - start)
                    samples[name, "cpu"].append(time.process_time() - cpu)
                saves.wait_all(120)
    stager.close()
    return samples
