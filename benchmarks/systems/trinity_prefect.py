"""trinity_sync as it is used: the coordinator of every rank, and a flow run for each save."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from benchmarks.systems.trinity import Committed
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.integrations.verl.fsdp.state_dict import get_model_state_to_stage
from trinity_sync.settings import Settings
from trinity_sync.stack.embedded import find

if TYPE_CHECKING:
    from benchmarks.training import Training


class TrinityPrefect(Committed):
    """The coordinator on the embedded stack that the environment names."""

    name = "trinity_sync + Prefect"

    overlaps: ClassVar[bool] = False

    def __init__(self, training: "Training", folder: Path) -> None:
        super().__init__(training, folder)
        settings = Settings(slots=1)
        self._saves = CheckpointCoordinator.of_process_group(folder, settings=settings)
        self.spool = self._saves.spool

    @classmethod
    def unavailable(cls) -> str:
        """Return why it cannot run where no stack was started for the case."""
        return "" if "PREFECT_API_URL" in os.environ else "no stack in this case"

    def daemons(self) -> Sequence[int]:
        """Return the processes of the stack (server, Ray and worker), on one rank only."""
        state = find(Settings()) if self.training.rank == 0 else None
        return [daemon.pid for daemon in state.daemons] if state else []

    def save(self, step: int) -> None:
        """Stage, and request the flow run in the background."""
        self._saves.save(step, self.training.state(get_model_state_to_stage), overlap=self.overlaps)

    def before_update(self) -> None:
        """Wait for an overlapped copy."""
        self._saves.wait_staged()

    def wait(self) -> None:
        """Wait until this process knows of the commit."""
        self._saves.wait_all(120)

    def discard(self, step: int) -> None:
        """Remove the step once the flow has freed its slots, which the next system would feel."""
        end = time.monotonic() + 30
        while self._saves.spool.tickets()[0] and time.monotonic() < end:
            time.sleep(0.05)
        super().discard(step)

    def close(self) -> None:
        """Release the slots."""
        self._saves.close()


class PrefectOverlapped(TrinityPrefect):
    """Staging during the next forward and backward pass."""

    name = "trinity_sync + Prefect, overlapped"
    overlaps = True


class PrefectRecycled(TrinityPrefect):
    """Writing over the files of the step that was removed last."""

    name = "trinity_sync + Prefect, recycled files"
    can_reuse_blocks = True
