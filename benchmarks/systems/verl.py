"""veRL's own ``FSDPCheckpointManager``, as its engine builds it.

It blocks until all ranks have written model, optimizer and extra state (veRL's default
``save_contents``) and, on rank 0, the Hugging Face config. veRL does not fsync; its files are
fsynced here before `save` returns.
"""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.systems.base import System, sync_files

if TYPE_CHECKING:
    from benchmarks.training import Training


class Verl(System):
    """veRL's manager with fsync."""

    name = "veRL"

    def __init__(self, training: "Training", folder: Path) -> None:
        sys.path.insert(0, str(Path(__file__).parents[2] / "examples/demo"))
        from grpo_copy.cpu_platform import use_cpu  # type: ignore[import-not-found]

        use_cpu()
        from verl.utils.checkpoint import fsdp_checkpoint_manager

        fsdp_checkpoint_manager.logger.setLevel(logging.WARNING)
        self.folder = folder
        self._manager = fsdp_checkpoint_manager.FSDPCheckpointManager(
            training.model, training.optimizer, training.schedule
        )

    def save(self, step: int) -> None:
        """Write and fsync."""
        self._manager.save_checkpoint(str(self.files(step)), global_step=step)
        sync_files(self.files(step))

    def load(self, step: int) -> None:
        """Load as veRL does."""
        self._manager.load_checkpoint(str(self.files(step)))

    def files(self, step: int) -> Path:
        """Return a folder in the layout of veRL's trainer."""
        return self.folder / f"global_step_{step}" / "actor"
