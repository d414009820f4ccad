"""A trainer of one rank that is killed by SIGKILL in the middle of a publication.

``python -m tests.environments.verl.publishing ROOT STEP``: versions before STEP are published.
The process dies when the bytes of STEP are in shared memory and not published yet.
"""

import asyncio
import os
import signal
import sys
from typing import Any

import torch

from trinity_sync.integrations.verl.checkpoint_engine import TrinitySyncCheckpointEngine
from trinity_sync.snapshot import stager


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """Some weights that differ at each step in every tensor."""
    random = torch.Generator().manual_seed(step)
    return {
        "embed.weight": torch.randn(64, 32, generator=random).bfloat16(),
        "norm.weight": torch.randn(32, generator=random).bfloat16(),
        "gate.weight": torch.randn(8, 32, generator=random),
        "scale": torch.tensor(float(step)),
        "nothing": torch.empty(0, 4),
    }


def main(root: str, last: int) -> None:
    engine = TrinitySyncCheckpointEngine(is_master=True, root=root)
    copy = stager.fill

    def fill_and_die(*arguments: Any, **named: Any) -> None:
        copy(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(1, last + 1):
        if step == last:
            stager.fill = fill_and_die
        asyncio.run(engine.send_weights(iter(weights_of(step).items()), step))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
