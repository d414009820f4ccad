"""trinity_sync's data path: staging in each rank, persist and commit in a separate process.

That process stands for the warm Ray worker of the full stack (see ``trinity_drivers``), so these
are the costs to the trainer and the disk without those of orchestration. The variants differ in one
thing each, and have one slot, which is enough where every save is waited for.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.systems.base import System
from benchmarks.writing import write_out
from trinity_sync.client.state_saver import StateSaver
from trinity_sync.integrations.verl.fsdp.state_dict import get_model_state_to_stage
from trinity_sync.layout import shard_file, step_folder
from trinity_sync.snapshot.identity import Origin, SaveId
from trinity_sync.snapshot.spool import JobSpool, open_job_spool
from trinity_sync.snapshot.stager import Stager, estimate_nbytes
from trinity_sync.storage.block_reuse import remove_folder
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.placement import NodeShards
from trinity_sync.storage.restore import fill_states, load_shards, load_states

if TYPE_CHECKING:
    from benchmarks.training import Training

COMPONENTS = ("model", "optim", "extra_state")
ROLES = ("actor",)


class Committed(System):
    """Steps of a job in ``folder``, loaded as the checkpoint manager loads them."""

    spool: JobSpool
    can_reuse_blocks: ClassVar[bool] = False
    """Whether the files of a step that is removed are kept to be written over."""
    restores_from_memory = True

    def __init__(self, training: "Training", folder: Path) -> None:
        self.training, self.folder = training, folder

    def load(self, step: int) -> None:
        """Load from disk."""
        self._load(step, None)

    def load_from_memory(self, step: int) -> None:
        """Load from the slots, as after the death of a trainer whose node survives."""
        self._load(step, self.spool)

    def _load(self, step: int, spool: JobSpool | None) -> None:
        rank, ranks = self.training.rank, self.training.size.ranks
        files = [f"{ROLES[0]}/{shard_file(name, ranks, rank)}" for name in COMPONENTS]
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
        """Remove the step; its files may be reused for the next one."""
        nbytes = 2 * self.training.size.nbytes
        remove_folder(self.folder, self.files(step), keep=nbytes if self.can_reuse_blocks else 0)


class Trinity(Committed):
    """Staging, persist and commit; no flow, no task, no HTTP."""

    name = "trinity_sync"
    at_once = 2
    overlaps: ClassVar[bool] = False

    def __init__(self, training: "Training", folder: Path) -> None:
        super().__init__(training, folder)
        self.spool = open_job_spool(training.shared / "spool", folder)
        self._stager = Stager(self.spool, slots=self.at_once)
        self._states = StateSaver(self._stager, lambda origin, _: self._write(origin.step))
        self._writer: ProcessPoolExecutor | None = None
        if training.rank == 0:
            context = multiprocessing.get_context("spawn")
            self._writer = ProcessPoolExecutor(1, mp_context=context)
        self._saving: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Stage; rank 0 has the step written as soon as its images are sealed."""
        root, rank, ranks = str(self.folder), self.training.rank, self.training.size.ranks
        origin = Origin(root, 1, "", step, "checkpoint", ROLES, ROLES[0], rank, ranks)
        self._states.save(
            origin, self.training.state(get_model_state_to_stage), overlap=self.overlaps
        )

    def before_update(self) -> None:
        """Wait for an overlapped copy."""
        self._states.wait_staged()

    def _write(self, step: int) -> None:
        if self._writer:
            save = SaveId(str(self.folder), 1, "", step, "checkpoint", ROLES)
            ranks = {ROLES[0]: tuple(range(self.training.size.ranks))}
            share = NodeShards("here", str(self.spool.folder), ranks)
            self._saving = self._writer.submit(write_out, share, save, COMPONENTS)

    def wait(self) -> None:
        """Wait for the commit."""
        if self._saving:
            self._saving.result()
            self._saving = None

    def close(self) -> None:
        """End the writer and remove the slots."""
        if self._writer:
            self._writer.shutdown()
        self._states.close()


class Prewarmed(Trinity):
    """Told of model and optimizer before the training, or resumed."""

    name = "trinity_sync, prewarmed"

    def __init__(self, training: "Training", folder: Path) -> None:
        super().__init__(training, folder)
        sources = {"model": training.model, "optim": training.optimizer}
        sizes = [
            (ROLES[0], name, training.rank, estimate_nbytes(source))
            for name, source in sources.items()
        ]
        self._stager.memory.map_slots(lambda: sizes)


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
        filled = fill_states(self.folder, role=ROLES[0], live=live, **own)
        rest = load_states(self.folder, step, ROLES[0], only=["extra_state"], **own)
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
