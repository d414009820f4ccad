"""Recorded batches, one file for each step, to repeat a run on exactly the same data."""

from dataclasses import asdict
from pathlib import Path

import torch

from grpo_copy.task import Batch


class Recording:
    """Batches that were trained on, by step.

    Args:
        folder: folder of the files, created if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, batch: Batch) -> None:
        """Write the batch of a step; a resumed run overwrites the steps that it repeats.

        Args:
            step: training step.
            batch: its batch.
        """
        torch.save(asdict(batch), self._file(step))

    def read(self, step: int) -> Batch:
        """Read the batch of a step."""
        return Batch(**torch.load(self._file(step)))

    def _file(self, step: int) -> Path:
        return self._folder / f"step_{step}.pt"
