"""What staging costs before the first byte is copied: it depends on the tensors, not on bytes."""

import time
from collections import defaultdict
from pathlib import Path

from benchmarks.measure import Samples
from benchmarks.training import Size, Training
from trinity_sync.integrations.verl.fsdp.state_dict import get_model_state_to_stage
from trinity_sync.snapshot.image import Layout, lay_out


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
