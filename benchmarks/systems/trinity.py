"""trinity_sync: its data path alone, and with Prefect and Ray.

`Trinity` is the stager in each rank, and persist and commit in one process outside the trainer, as
a warm Ray worker is; what a save costs the trainer and the disk, without orchestration. `Prefect`
is the real thing: the coordinator of each rank, and a flow run on an embedded stack. Both load as
veRL does, from the files that veRL would have written.

A variant is a subclass with another ``name`` and other arguments; add it to ``SYSTEMS``.
"""

import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch.distributed as dist

from benchmarks.systems.base import System
from benchmarks.systems.torch_save import load_files
from benchmarks.training import Training
from trinity_sync.layout import shard_file, step_folder
from trinity_sync.snapshot.spool import JobSpool, open_job_spool
from trinity_sync.snapshot.stager import Origin, Stager
from trinity_sync.storage.commit import commit, release_slots
from trinity_sync.storage.persist import Save, WriteOptions, persist

COMPONENTS = ("model", "optim", "extra_state")
ROLES = ("actor",)


class _Trinity(System):
    """What both have in common: the layout of the files, and how they are loaded."""

    def __init__(self, training: Training, folder: Path) -> None:
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


class Trinity(_Trinity):
    """Stager, persist and commit; no flow, no task, no HTTP."""

    name = "trinity_sync"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self.spool = open_job_spool(training.shared / "spool", folder)
        self.stager = Stager(self.spool)
        self._writer: ProcessPoolExecutor | None = None
        if training.rank == 0:
            context = multiprocessing.get_context("spawn")
            self._writer = ProcessPoolExecutor(1, mp_context=context)
            self._writer.submit(os.getpid).result()
        self._saving: Future[None] | None = None

    def save(self, step: int) -> None:
        """Stage; rank 0 has the step written."""
        ranks = range(self.training.size.ranks)
        root, size, rank = str(self.folder), len(ranks), self.training.rank
        origin = Origin(
            root, 1, "", step, "checkpoint", ROLES[0], ROLES, rank, size, tuple(ranks)
        )
        self.stager.stage(origin, self.training.state())
        if self._writer:
            save = Save(root, 1, step, "checkpoint", ROLES)
            self._saving = self._writer.submit(_write_out, self.spool, save)

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


class Prefect(_Trinity):
    """The coordinator of every rank, on the embedded stack that the environment names."""

    name = "trinity_sync + Prefect"

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        from trinity_sync.coordinator import CheckpointCoordinator

        self._saves = CheckpointCoordinator.of_process_group(folder)

    @classmethod
    def unavailable(cls) -> str:
        """Where no stack was started for the case."""
        return "" if "PREFECT_API_URL" in os.environ else "no stack in this case"

    def save(self, step: int) -> None:
        """Stage, and ask Prefect for the flow run in the background."""
        self._saves.save(step, self.training.state())

    def wait(self) -> None:
        """Until this process knows of the commit."""
        self._saves.wait_all(120)

    def close(self) -> None:
        """Give the slots back."""
        self._saves.close()
        dist.barrier()


def _write_out(spool: JobSpool, save: Save) -> None:
    """What the flow's tasks do: the components in parallel, then the commit."""
    write = partial(persist, spool, save, options=WriteOptions())
    with ThreadPoolExecutor(len(COMPONENTS)) as tasks:
        written = [file for files in tasks.map(write, COMPONENTS) for file in files]
    commit(save, written)
    release_slots(spool, save, written)
