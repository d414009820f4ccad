"""``torch.save`` with its defaults: a file for each component and rank, fsynced in turn.

Without its checksums (``set_crc32_options(False)``) it takes about a fifth less. ``torch.load``
reads whole files: with ``mmap=True`` it was as fast or slower from a cold disk.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.systems.base import System

if TYPE_CHECKING:
    from benchmarks.training import Training


class TorchSave(System):
    """One blocking ``torch.save`` and ``fsync`` a component."""

    name = "torch.save"

    def __init__(self, training: "Training", folder: Path) -> None:
        self.training, self.folder = training, folder

    def save(self, step: int) -> None:
        """Write and fsync all three."""
        self.files(step).mkdir(parents=True, exist_ok=True)
        for component, state in self.training.state().items():
            save_and_sync(state, self.file(step, component))

    def load(self, step: int) -> None:
        """Load the files as veRL does."""
        self.training.resume(load_files(self, step).items())

    def files(self, step: int) -> Path:
        """See `System.files`."""
        return self.folder / str(step)

    def file(self, step: int, component: str) -> Path:
        """Return the path of this rank's file of a component."""
        return self.files(step) / f"{component}_{self.training.rank}.pt"


def load_files(system: Any, step: int) -> dict[str, Any]:
    """Return what ``torch.save`` wrote of each component."""
    components = ("model", "optim", "extra_state")
    return {name: torch.load(system.file(step, name), weights_only=False) for name in components}


def save_and_sync(state: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
