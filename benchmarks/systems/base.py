"""Base of the benchmarked systems, which save a training's state and load it."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from benchmarks.training import Training


class System(Protocol):
    """One way to save, on one rank; all ranks make one and call it at the same steps.

    The ``training`` is saved and loaded into; ``folder`` is empty and on the disk that is measured.
    """

    name: ClassVar[str]
    snapshots: ClassVar[bool] = True
    """Whether training may go on between `save` and `wait` without changing what is written."""
    loads_in_place: ClassVar[bool] = False
    """Whether it loads into the tensors of an optimizer that has stepped before."""
    at_once: ClassVar[int] = 1
    """Saves that may be in flight without one waiting for the other."""
    restores_from_memory: ClassVar[bool] = False
    """Whether the node's memory restores the last save to a restarted trainer."""

    def __init__(self, training: "Training", folder: Path) -> None: ...

    @classmethod
    def unavailable(cls) -> str:
        """Return why it cannot run here; empty where it can."""
        return ""

    def save(self, step: int) -> None:
        """Save the live state; return when a trainer would go on to its next step."""

    def before_update(self) -> None:
        """Wait for what a trainer needs before its next ``optimizer.step()``."""

    def wait(self) -> None:
        """Return once all saves are durable."""

    def load(self, step: int) -> None:
        """Load a saved state into the live model, optimizer and schedule."""

    def load_from_memory(self, step: int) -> None:
        """As `load`, where `restores_from_memory`."""

    def files(self, step: int) -> Path:
        """Return the folder of the save at ``step``."""

    def discard(self, step: int) -> None:
        """Remove a save, as retention would; called on rank 0."""
        shutil.rmtree(self.files(step))

    def daemons(self) -> Sequence[int]:
        """Return processes that work for it and do not descend from a rank."""
        return ()

    def close(self) -> None:
        """End helper processes and release shared memory."""


def sync_files(folder: Path) -> None:
    """Make all files below ``folder`` and their names durable, for systems that do not."""
    for path in (folder, *folder.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
