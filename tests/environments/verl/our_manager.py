"""A pytest plugin: veRL's own tests find trinity_sync's manager where veRL's would be.

They expect the files of a save when the call returns, in a folder of any name. So the save is
waited for here, and the folder becomes a name of the committed step; the rest is what users get.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import verl.utils.checkpoint.fsdp_checkpoint_manager as theirs

import trinity_sync.integrations.verl.switch  # noqa: F401, the switch
from tests.integration.fsdp.commits import CommitsHere
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.integrations.verl.fsdp.manager import TrainerCheckpointManager
from trinity_sync.layout import step_folder
from trinity_sync.settings import Settings

SPOOL = tempfile.TemporaryDirectory(prefix="trinity_sync-test-", dir="/dev/shm")


class AtOnce(TrainerCheckpointManager):
    """Saves below ``<local_path>.job`` and waits for the commit."""

    def save_checkpoint(self, local_path: str, global_step: int = 0, **other: Any) -> None:
        root = Path(f"{local_path}.job")
        settings = Settings(spool=SPOOL.name)
        self._coordinator = CheckpointCoordinator(root, settings=settings, trigger=CommitsHere())
        role = step_folder(root, global_step) / "actor"
        super().save_checkpoint(str(role), global_step=global_step, **other)
        self.wait_on_save_thread()
        self._coordinator.close()
        Path(local_path).symlink_to(role)

    def load_checkpoint(self, local_path: str, *other: Any, **others: Any) -> None:
        super().load_checkpoint(str(Path(local_path).resolve()), *other, **others)


theirs.FSDPCheckpointManager = AtOnce


@pytest.fixture(autouse=True, scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group, which our loads talk over."""
    rendezvous = tmp_path_factory.mktemp("rank") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    SPOOL.cleanup()
