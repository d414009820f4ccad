"""What a benchmarked system is: one that saves a training's state and brings it back."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from benchmarks.training import Training


class System(Protocol):
    """One way to save, on one rank; all ranks make one and call it at the same steps.

    Args:
        training: whose state is saved, and loaded into.
        folder: an empty one of its own, on the disk that is measured.
    """

    name: ClassVar[str]
    snapshots: ClassVar[bool] = True
    """Whether training may go on between `save` and `wait` without changing what is written."""
    loads_in_place: ClassVar[bool] = False
    """Whether it loads into the tensors of an optimizer that has stepped before."""
    at_once: ClassVar[int] = 1
    """Saves that may be under way without one waiting for the other."""
    restores_from_memory: ClassVar[bool] = False
    """Whether the node's memory brings the last save back to a trainer that is started again."""

    def __init__(self, training: "Training", folder: Path) -> None: ...

    @classmethod
    def unavailable(cls) -> str:
        """Why it cannot run here; empty where it can."""
        return ""

    def save(self, step: int) -> None:
        """Save the live state; returns when a trainer would go on to its next step."""

    def before_update(self) -> None:
        """What a trainer waits for ahead of its next ``optimizer.step()``."""

    def wait(self) -> None:
        """Return once all that was saved is durable."""

    def load(self, step: int) -> None:
        """Bring a saved state back into the live model, optimizer and schedule."""

    def load_from_memory(self, step: int) -> None:
        """As `load`, where `restores_from_memory`."""

    def files(self, step: int) -> Path:
        """Folder of what was saved at ``step``."""

    def discard(self, step: int) -> None:
        """Remove what was saved, as retention would; called on rank 0."""
        shutil.rmtree(self.files(step))

    def daemons(self) -> Sequence[int]:
        """Processes that work for it without descending from a rank."""
        return ()

    def close(self) -> None:
        """End helper processes and give shared memory back."""


def sync_files(folder: Path) -> None:
    """Make all files below ``folder`` and their names durable: for those that leave it out."""
    for path in (folder, *folder.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
