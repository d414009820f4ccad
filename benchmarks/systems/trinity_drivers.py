"""trinity_sync as it is used: the coordinator of every rank, and what commits its saves.

That is a flow run for each save on the local stack that the environment names, or the built-in
saver, a process that the first save starts.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psutil

from benchmarks.systems.trinity import Committed
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.integrations.verl.fsdp.state_dict import get_model_state_to_stage
from trinity_sync.settings import Settings
from trinity_sync.stack.local_stack import find

if TYPE_CHECKING:
    from benchmarks.training import Training


class Coordinated(Committed):
    """The coordinator with the settings of a subclass, which say what commits."""

    overlaps: ClassVar[bool] = False

    def __init__(self, training: "Training", folder: Path) -> None:
        super().__init__(training, folder)
        self._settings = self.make_settings()
        self._saves = CheckpointCoordinator.of_process_group(folder, settings=self._settings)
        self.spool = self._saves.spool

    def make_settings(self) -> Settings:
        """Return the settings of the coordinator; one slot is enough where every save is waited
        for."""
        raise NotImplementedError

    def save(self, step: int) -> None:
        """Stage, and submit the save in the background."""
        self._saves.save(step, self.training.state(get_model_state_to_stage), overlap=self.overlaps)

    def before_update(self) -> None:
        """Wait for an overlapped copy."""
        self._saves.wait_staged()

    def wait(self) -> None:
        """Wait until this process knows of the commit."""
        self._saves.wait_all(120)

    def discard(self, step: int) -> None:
        """Remove the step once its slots are free, which the next system would feel."""
        end = time.monotonic() + 30
        while self._saves.spool.tickets()[0] and time.monotonic() < end:
            time.sleep(0.05)
        super().discard(step)

    def close(self) -> None:
        """Release the slots."""
        self._saves.close()


class WithPrefect(Coordinated):
    """A flow run for each save."""

    name = "trinity_sync + Prefect"

    def make_settings(self) -> Settings:
        """See `Coordinated.make_settings`."""
        return Settings(slots=1, saver="stack")

    @classmethod
    def unavailable(cls) -> str:
        """Return why it cannot run where no stack was started for the case."""
        return "" if "PREFECT_API_URL" in os.environ else "no stack in this case"

    def daemons(self) -> Sequence[int]:
        """Return the processes of the stack (server, Ray and worker), on one rank only."""
        state = find(self._settings) if self.training.rank == 0 else None
        return [daemon.pid for daemon in state.daemons] if state else []


class WithSaver(Coordinated):
    """The saver, also where there is a stack; its spool is not that of the stack."""

    name = "trinity_sync + saver"

    def make_settings(self) -> Settings:
        """See `Coordinated.make_settings`."""
        shared = self.training.shared
        spool, home = shared / f"{self.folder.name}.spool", shared / f"{self.folder.name}.home"
        return Settings(slots=1, saver="built-in", spool=spool, home=home)

    def daemons(self) -> Sequence[int]:
        """Return the saver, on one rank only."""
        return list_savers(self._settings.spool) if self.training.rank == 0 else []


def list_savers(spool: Path) -> list[int]:
    """Return the processes of the savers of a spool."""
    words = ["trinity_sync.saver", str(spool)]
    processes = psutil.process_iter(["cmdline"])
    return [each.pid for each in processes if (each.info["cmdline"] or [])[2:4] == words]


class PrefectOverlapped(WithPrefect):
    """Staging during the next forward and backward pass."""

    name = "trinity_sync + Prefect, overlapped"
    overlaps = True


class PrefectRecycled(WithPrefect):
    """Writing over the files of the step that was removed last."""

    name = "trinity_sync + Prefect, recycled files"
    can_reuse_blocks = True


class SaverRecycled(WithSaver):
    """Writing over the files of the step that was removed last."""

    name = "trinity_sync + saver, recycled files"
    can_reuse_blocks = True
