"""The checkpoint manager that FSDP engines make in the workers of veRL's trainers."""

from trinity_sync.fsdp.manager import FSDPCheckpointManager
from trinity_sync.integrations.verl.positions import CommitsPositions


class TrainerCheckpointManager(CommitsPositions, FSDPCheckpointManager):  # type: ignore[misc]
    """Manager of veRL's FSDP engine, which commits the dataloaders' positions with each step."""
