"""``torch.distributed.checkpoint.async_save`` of torch 2.13, in a thread and in a process.

Both follow PyTorch's recipe and docstrings for frequent saves: one `DefaultStager` kept between
saves, so that staging goes into cached storages; ``enable_plan_caching``, so that a save of the
same structure makes no plan; one file a rank with two writer threads; ``sync_files``, DCP's
default. Pinned memory and non-blocking copies need CUDA. Staging is synchronous, or overlapped with
the next forward and backward pass (``use_async_staging``), in a thread that the trainer waits for
before its next update. The process gets its staged tensors through shared memory. States are passed
as raw state dicts, which spares DCP the walk over all parameter names that ``get_state_dict`` makes
at every save. As in torchtitan, DCP has a gloo group of its own, since its collectives run during
those of the training. DCP keeps one copy of what has the same name on all ranks, so each rank's
extra state is named by its rank.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)

from benchmarks.systems.base import System
from trinity_sync.fs.atomic import sync_folder

if TYPE_CHECKING:
    from benchmarks.training import State, Training

WRITERS = 2


class DcpThread(System):
    """``async_save`` that writes from a thread of the trainer."""

    name = "DCP async, thread"
    loads_in_place = True
    mode = AsyncCheckpointerType.THREAD
    overlaps: ClassVar[bool] = False

    def __init__(self, training: "Training", folder: Path) -> None:
        self.training, self.folder = training, folder
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.mode is AsyncCheckpointerType.PROCESS,
                use_async_staging=self.overlaps,
                use_non_blocking_copy=False,
            )
        )
        self._planner = DefaultSavePlanner(enable_plan_caching=True)
        self._group = dist.new_group(backend="gloo")
        self._staging: Future[Any] | None = None
        self._saving: Future[Any] | None = None
        self._path = folder

    def save(self, step: int) -> None:
        """Stage, and let DCP write; a save waits for the one before, whose storages it reuses."""
        self.wait()
        self._path = self.files(step)
        writer = FileSystemWriter(self._path, thread_count=WRITERS, sync_files=True)
        saving = async_save(
            collect_state(self.training),
            storage_writer=writer,
            process_group=self._group,
            planner=self._planner,
            async_checkpointer_type=self.mode,
            async_stager=self._stager,
        )
        if isinstance(saving, AsyncSaveResponse):
            self._staging, saving = saving.staging_completion, saving.upload_completion
        self._saving = saving

    def before_update(self) -> None:
        """Wait for the staging thread."""
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def wait(self) -> None:
        """Join DCP, and make the name of its last file durable as well."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None
            sync_folder(self._path)

    def load(self, step: int) -> None:
        """Load in place into the live tensors; other values through ``load_state_dict``."""
        state = collect_state(self.training)
        reader = FileSystemReader(self.files(step))
        load(state, storage_reader=reader, process_group=self._group)
        resume_from(self.training, state)

    def files(self, step: int) -> Path:
        """See `System.files`."""
        return self.folder / str(step)

    def close(self) -> None:
        """Drop the cached storages."""
        self.wait()
        self._stager.close()


class DcpProcess(DcpThread):
    """``async_save`` that writes from a process, which gets the staged tensors in shared memory."""

    name = "DCP async, process"
    mode = AsyncCheckpointerType.PROCESS


class DcpThreadOverlapped(DcpThread):
    """Staging during the next forward and backward pass."""

    name = "DCP async, thread, overlapped"
    overlaps = True


class DcpProcessOverlapped(DcpProcess):
    """Staging during the next forward and backward pass."""

    name = "DCP async, process, overlapped"
    overlaps = True


def collect_state(training: "Training") -> "State":
    """Return the live state, with the extra state by rank."""
    state = training.state()
    state[_name_extra(training)] = state.pop("extra_state")
    return state


def resume_from(training: "Training", state: "State") -> None:
    """Resume from a state of `collect_state` that was loaded into."""
    training.resume({**state, "extra_state": state[_name_extra(training)]}.items())


def _name_extra(training: "Training") -> str:
    return f"extra_state_{training.rank}"
