"""PyPI ``torch-checkpointing`` 0.1.1, Meta's successor to DCP's asynchronous saves.

Its documentation asks CPU-only users to turn pinned memory and non-blocking copies off, which is
the default where there is no CUDA. Staging goes into its shared-memory pool, synchronously or, its
default, overlapped with the next forward and backward pass; its ``lock()`` is what the trainer then
takes before its next update. Two files are written at a time. ``use_direct_io=False``: its direct
I/O hands unaligned buffers to the kernel and fails with EINVAL here. The files are fsynced by the
callback that its writer process runs before a save's folder gets its name, and that name after it.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_writer import CallbackArgs, CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.systems.base import System, sync_files
from trinity_sync.fs.atomic import sync_folder

if TYPE_CHECKING:
    from benchmarks.training import Training

WRITERS = 2


class TorchCheckpointing(System):
    """Its `CheckpointManager`, asynchronous, on CPU."""

    name = "torch-checkpointing"
    overlaps: ClassVar[bool] = False

    def __init__(self, training: "Training", folder: Path) -> None:
        self.training, self.folder = training, folder
        staging = CheckpointStagerConfig(use_shared_memory=True, use_async_staging=self.overlaps)
        writing = CheckpointWriterConfig(file_write_max_threads=WRITERS)
        self._manager = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging, writer_config=writing),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            pre_finalize_callback=_sync_written,
            finalize_callback=_sync_name,
        ).build()
        self._saving: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Stage into shared memory; its process writes."""
        self._saving = self._manager.save(str(self.files(step)), self.training.state())

    def before_update(self) -> None:
        """Wait for the staging thread."""
        with self._manager.lock():
            pass

    def wait(self) -> None:
        """Wait for its process's write."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def load(self, step: int) -> None:
        """Load in place into the live tensors; other values through ``load_state_dict``."""
        loaded = self._manager.load(str(self.files(step)), into=self.training.state(), strict=True)
        self.training.resume(dict(loaded).items())

    def files(self, step: int) -> Path:
        """See `System.files`."""
        return self.folder / str(step)

    def close(self) -> None:
        """End its process."""
        self._manager.close()


class TorchCheckpointingOverlapped(TorchCheckpointing):
    """Staging during the next forward and backward pass."""

    name = "torch-checkpointing, overlapped"
    overlaps = True


def _sync_written(written: CallbackArgs) -> None:
    sync_files(Path(written.path))


def _sync_name(named: CallbackArgs) -> None:
    sync_folder(Path(named.path).parent)
