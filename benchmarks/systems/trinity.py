"""trinity_sync's data path: the stager in each rank, persist and commit in a process beside them.

That process stands for the warm Ray worker of the real thing (see ``trinity_prefect``), so these
are the costs to the trainer and the disk without those of orchestration.

A variant is a subclass with another ``name`` and what differs; add it to ``SYSTEMS``.
"""

import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.systems.base import System
from benchmarks.systems.torch_save import load_files
from trinity_sync.layout import shard_file, step_folder
from trinity_sync.snapshot.spool import JobSpool, open_job_spool
from trinity_sync.snapshot.stager import Origin, Stager
from trinity_sync.storage.commit import commit, release_slots
from trinity_sync.storage.persist import Save, WriteOptions, persist

if TYPE_CHECKING:
    from benchmarks.training import Training

COMPONENTS = ("model", "optim", "extra_state")
ROLES = ("actor",)


class Shards(System):
    """The layout of trinity_sync's files, which is veRL's, and veRL's way to load them."""

    def __init__(self, training: "Training", folder: Path) -> None:
        self.training, self.folder = training, folder

    def load(self, step: int) -> None:
        """As veRL's manager does."""
        self.training.resume(load_files(self, step))

    def files(self, step: int) -> Path:
        """The step's folder."""
        return step_folder(self.folder, step)

    def file(self, step: int, component: str) -> Path:
        """This rank's shard of a component."""
        shard = shard_file(component, self.training.size.ranks, self.training.rank)
        return self.files(step) / ROLES[0] / shard


class Trinity(Shards):
    """Stager, persist and commit; no flow, no task, no HTTP."""

    name = "trinity_sync"

    def __init__(self, training: "Training", folder: Path) -> None:
        super().__init__(training, folder)
        self.spool = open_job_spool(training.shared / "spool", folder)
        self.stager = Stager(self.spool)
        self._writer: ProcessPoolExecutor | None = None
        if training.rank == 0:
            context = multiprocessing.get_context("spawn")
            self._writer = ProcessPoolExecutor(1, mp_context=context)
        self._saving: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Stage; rank 0 has the step written."""
        ranks = tuple(range(self.training.size.ranks))
        root, rank = str(self.folder), self.training.rank
        origin = Origin(root, 1, "", step, "checkpoint", ROLES[0], ROLES, rank, len(ranks), ranks)
        self.stager.stage(origin, self.training.state())
        if self._writer:
            save = Save(root, 1, step, "checkpoint", ROLES)
            self._saving = self._writer.submit(write_out, self.spool, save)

    def wait(self) -> None:
        """Until the commit."""
        if self._saving:
            self._saving.result()
            self._saving = None

    def close(self) -> None:
        """End the writer and remove the slots."""
        if self._writer:
            self._writer.shutdown()
        self.stager.close()


def write_out(spool: JobSpool, save: Save) -> None:
    """What the flow's tasks do: the components in parallel, then the commit."""
    write = partial(persist, spool, save, options=WriteOptions())
    with ThreadPoolExecutor(len(COMPONENTS)) as tasks:
        written = [file for files in tasks.map(write, COMPONENTS) for file in files]
    commit(save, written)
    release_slots(spool, save, written)
