"""Batches on disk, one file a step, so that a run can be repeated on exactly the same data."""

from dataclasses import asdict
from pathlib import Path

import torch

from grpo_copy.task import Batch


class Recording:
    """The batches that were trained on, by step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, batch: Batch) -> None:
        """Keep the batch of a step; a resumed run replaces the steps that it does again."""
        torch.save(asdict(batch), self._file(step))

    def read(self, step: int) -> Batch:
        """The batch of a step that was written."""
        return Batch(**torch.load(self._file(step)))

    def _file(self, step: int) -> Path:
        return self._folder / f"step_{step}.pt"
