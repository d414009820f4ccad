"""trinity_sync as it is used: the coordinator of every rank, and what commits its saves.

That is the saver, a process that the first save starts, or a flow run for each save on the local
stack that the environment names. The variants differ in one thing each. They have one slot, which
is enough where every save is waited for, but for `Trinity` itself.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psutil

from benchmarks.systems.base import System
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.integrations.verl.fsdp.state_dict import get_model_state_to_stage
from trinity_sync.layout import shard_file, step_folder
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.stack.state_file import read_state
from trinity_sync.storage.block_reuse import remove_folder
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.restore import fill_states, load_shards, load_states

if TYPE_CHECKING:
    from benchmarks.training import Training

COMPONENTS = ("model", "optim", "extra_state")
ROLE = "actor"


class Trinity(System):
    """The saver, also where there is a stack; its spool is not that of the stack."""

    name = "trinity_sync"
    at_once = 2
    restores_from_memory = True
    overlaps: ClassVar[bool] = False
    can_reuse_blocks: ClassVar[bool] = False
    """Whether the files of a step that is removed are kept to be written over."""

    def __init__(self, training: "Training", folder: Path) -> None:
        self.training, self.folder = training, folder
        self._settings = self.make_settings()
        self._saves = CheckpointCoordinator.of_process_group(folder, settings=self._settings)

    def make_settings(self) -> Settings:
        """Return the settings of the coordinator."""
        shared = self.training.shared
        spool, home = shared / f"{self.folder.name}.spool", shared / f"{self.folder.name}.home"
        return Settings(slots=self.at_once, saver="built-in", spool=spool, home=home)

    def save(self, step: int) -> None:
        """Stage, and submit the save in the background."""
        self._saves.save(step, self.training.state(get_model_state_to_stage), overlap=self.overlaps)

    def before_update(self) -> None:
        """Wait for an overlapped copy."""
        self._saves.wait_staged()

    def wait(self) -> None:
        """Wait until this process knows of the commit."""
        self._saves.wait_all(120)

    def load(self, step: int) -> None:
        """Load from disk."""
        self._load(step, None)

    def load_from_memory(self, step: int) -> None:
        """Load from the slots, as after the death of a trainer whose node survives."""
        self._load(step, self._saves.spool)

    def _load(self, step: int, spool: JobSpool | None) -> None:
        rank, ranks = self.training.rank, self.training.size.ranks
        files = [f"{ROLE}/{shard_file(name, ranks, rank)}" for name in COMPONENTS]
        shards = load_shards(self.folder, step, files, spool=spool, borrow=files[:1])
        expected = "disk" if spool is None else "spool"

        def states() -> Iterator[tuple[str, Any]]:
            for component, shard in zip(COMPONENTS, shards, strict=True):
                assert shard.source == expected, f"{component} came from the {shard.source}"
                yield component, shard.state

        with closing(shards):
            self.training.resume(states())

    def files(self, step: int) -> Path:
        """See `System.files`."""
        return step_folder(self.folder, step)

    def discard(self, step: int) -> None:
        """Remove the step once its slots are free, which the next system would feel."""
        end = time.monotonic() + 30
        while self._saves.spool.tickets()[0] and time.monotonic() < end:
            time.sleep(0.05)
        nbytes = 2 * self.training.size.nbytes
        remove_folder(self.folder, self.files(step), keep=nbytes if self.can_reuse_blocks else 0)

    def daemons(self) -> Sequence[int]:
        """Return the saver, on one rank only."""
        return list_savers(self._settings.spool) if self.training.rank == 0 else []

    def close(self) -> None:
        """Release the slots."""
        self._saves.close()


def list_savers(spool: Path) -> list[int]:
    """Return the processes of the savers of a spool."""
    words = ["trinity_sync.saver", str(spool)]
    processes = psutil.process_iter(["cmdline"])
    return [each.pid for each in processes if (each.info["cmdline"] or [])[2:4] == words]


class Prewarmed(Trinity):
    """Told of model and optimizer before the training, or resumed."""

    name = "trinity_sync, prewarmed"

    def __init__(self, training: "Training", folder: Path) -> None:
        super().__init__(training, folder)
        self._saves.prewarm({"model": training.model, "optim": training.optimizer})


class InPlace(Trinity):
    """Loading into the tensors of a model and an optimizer that have stepped before."""

    name = "trinity_sync, in place"
    loads_in_place = True

    def _load(self, step: int, spool: JobSpool | None) -> None:
        manifest = require_committed(self.folder, step, paths=())
        own: Any = {
            "rank": self.training.rank,
            "world_size": self.training.size.ranks,
            "spool": spool,
            "manifest": manifest,
        }
        live = self.training.state()
        del live["extra_state"]
        filled = fill_states(self.folder, role=ROLE, live=live, **own)
        rest = load_states(self.folder, step, ROLE, only=["extra_state"], **own)
        self.training.resume({"optim": filled["optim"], **rest}.items())


class Overlapped(Trinity):
    """Staging during the next forward and backward pass."""

    name = "trinity_sync, overlapped"
    at_once = 1
    overlaps = True


class Recycled(Trinity):
    """Writing over the files of the step that was removed last."""

    name = "trinity_sync, recycled files"
    at_once = 1
    can_reuse_blocks = True


class WithPrefect(Trinity):
    """A flow run for each save."""

    name = "trinity_sync + Prefect"
    at_once = 1

    def make_settings(self) -> Settings:
        """See `Trinity.make_settings`."""
        return Settings(slots=1, saver="stack")

    @classmethod
    def unavailable(cls) -> str:
        """Return why it cannot run where no stack was started for the case."""
        return "" if "PREFECT_API_URL" in os.environ else "no stack in this case"

    def daemons(self) -> Sequence[int]:
        """Return the processes of the stack (server, Ray and worker), on one rank only."""
        state = read_state(self._settings.home) if self.training.rank == 0 else None
        return [daemon.pid for daemon in state.daemons] if state else []


class PrefectOverlapped(WithPrefect):
    """Staging during the next forward and backward pass."""

    name = "trinity_sync + Prefect, overlapped"
    overlaps = True


class PrefectRecycled(WithPrefect):
    """Writing over the files of the step that was removed last."""

    name = "trinity_sync + Prefect, recycled files"
    can_reuse_blocks = True
