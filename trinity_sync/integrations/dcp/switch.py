"""The switch for any caller of ``torch.distributed.checkpoint``: no line of the program changes.

::

    export TRINITY_SYNC_ROOT=/runs/saves
    torchrun --nproc-per-node=8 -m trinity_sync.integrations.dcp.switch train.py --steps 100

Importing this module before the program's own modules is the switch as well. `save` and
`async_save` into a folder next to the root are then steps of the root: staged in shared memory,
written and committed by the stack or the saver, and linked into the folder that the caller names,
where plain DCP finds its own files. `load` compares what it reads with the digests of the save.

A caller of ``save`` goes on to write, rename and remove files by what it returns, so it returns
when the checkpoint is committed and linked, as the future of ``async_save`` does. A call that DCP
would not write as its own files of these ranks remains DCP's: see `_find_folder`.
"""

import atexit
import copy
import logging
import os
import runpy
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import WriteResult

from trinity_sync import CheckpointCoordinator
from trinity_sync.errors import CommitError, ConfigError, RootInUseError, SaveError
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.integrations.dcp.writer import DcpSaver, StepWriter
from trinity_sync.integrations.import_hooks import Call, rebind, wrapper
from trinity_sync.storage.dcp_folder import (
    FOLDER_FILE,
    INDEX,
    RECORD,
    get_folder_name,
    link_step,
    read_record,
)

logger = logging.getLogger(__name__)


class _Saves:
    """The root of the program's saves, of which each call is a step, for one process group."""

    def __init__(self, root: Path, group: Any) -> None:
        self.group = group
        make = CheckpointCoordinator.of_process_group if group else CheckpointCoordinator
        self.coordinator = make(root)
        atexit.register(self.coordinator.close)
        self.planner = DefaultSavePlanner()
        self.saver = DcpSaver(self.coordinator, planner=lambda: copy.copy(self.planner))
        self.step = self.coordinator.latest_step() or 0
        self.coordinator.resumed_from(self.step)

    def make_writer(self, folder: Path, name: str, planner: Any) -> "_FolderWriter":
        """Return the writer of the next call; all ranks call it."""
        self.step += 1
        self.planner = planner or DefaultSavePlanner()
        if self.coordinator.rank == 0:
            with suppress(OSError):  # the save fails, and says why
                folder.mkdir(parents=True, exist_ok=True)
        return _FolderWriter(self.saver, self.step, folder, name)


class _FolderWriter(StepWriter):
    """Storage writer and stager of one call, which ends once its folder is a checkpoint."""

    def __init__(self, saver: DcpSaver, step: int, folder: Path, name: str) -> None:
        # what is linked needs no second name, so the root keeps the newest only
        super().__init__(saver, step, keep=1, files={FOLDER_FILE: os.fsencode(name)})
        self._folder = folder

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the index, and require that the commit has linked the files; on rank 0."""
        super().finish(metadata, results)
        root = self._saver.saves.root
        try:
            with acquire_commit_lock(root):  # the commit has linked them before it releases it
                link_step(root, self._step, self._saver.role)
            now = self._saver.saves.run, self._step
            if (linked := read_record(self._folder)) and (linked.run, linked.step) >= now:
                return
            reason = "the folder was removed meanwhile"
        except OSError as error:
            reason = f"{error.filename or self._folder}: {error.strerror}"
        raise SaveError(
            f"{self._folder} is no checkpoint, though its files are committed as step {self._step} "
            f"of {root}: {reason}. Repair that, and save again"
        )


class _FolderReader(FileSystemReader):
    """Storage reader of a folder that compares files with the digests of their save, if it has any.

    DCP raises an error of one rank's plan on all ranks.
    """

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        """Note whether DCP has saved to the folder since, whose own index has an id of its save."""
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self._is_ours = not (metadata.storage_meta and metadata.storage_meta.save_id)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Compare the files that this rank reads from with their digests.

        Raises:
            CommitError: a file has other content than its save.
        """
        folder = Path(self.path)
        if self._is_ours and (manifest := read_record(folder)):
            digests = {record.path: record.digest for record in manifest.files}
            names = {self.storage_data[item.storage_index].relative_path for item in plan.items}
            for name in sorted({INDEX, *names}):
                # through the page cache, from which DCP then reads
                if digest_cached_file(folder / name) != digests.get(name):
                    raise CommitError(
                        f"{folder / name} is corrupted, or other code has saved to its folder "
                        "since; load another checkpoint. If it has, remove "
                        f"{folder / RECORD}, and nothing is compared"
                    )
        return super().prepare_local_plan(plan)


_saves: _Saves | None = None
"""The saves of this process, made by the first call."""
_is_refused = False
"""Whether other processes of the program save to the root, so that these leave all calls to DCP."""
_PROCESS = os.getpid()


def _find_folder(
    checkpoint_id: Any = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    async_stager: Any = None,
    async_checkpointer_type: Any = None,
    **others: Any,
) -> tuple[Path, str] | None:
    """Return the folder of a call and its name in a step; None if the call remains DCP's.

    It does if the folder is not below the root's parent, the writer, planner or stager is one of
    the caller's own, not all ranks save, or another thread calls, as DCP's own thread does. So do
    calls with other options, which DCP refuses or a later release of it has, and all calls of a
    forked child, and of a second group of processes with the same root.
    """
    given: Any = checkpoint_id or getattr(storage_writer, "path", None)
    if not _is_folder(given):
        return None
    reasons = {
        "a planner of another class": planner and type(planner) is not DefaultSavePlanner,
        "another storage_writer": storage_writer and not _writes_plain_files(storage_writer),
        "an async_stager": async_stager,
        "a process_group of some ranks": process_group
        and dist.get_world_size(process_group) != dist.get_world_size(),
        "no_dist": no_dist,
        "use_collectives=False": not use_collectives,
        "another thread": threading.current_thread() is not threading.main_thread(),
        **dict.fromkeys(others, True),
    }
    why = ", ".join(reason for reason, is_given in reasons.items() if is_given)
    folder = Path(given).absolute()
    name = get_folder_name(_ROOT, folder)
    if name and not why:
        return folder, name
    _tell_once(f"with {why}" if name else f"to {folder}, which is not next to {_ROOT}")
    return None


def _writes_plain_files(writer: Any) -> bool:
    """Return whether a storage writer writes what it would with its default options."""
    return (
        type(writer) is FileSystemWriter
        and writer.overwrite
        and not writer.transforms.extensions
        and writer.serialization_format is SerializationFormat.TORCH_SAVE
    )


@cache
def _tell_once(what: str) -> None:
    logger.warning("DCP itself saves what is saved %s", what)


def _get_root() -> Path:
    if not (root := os.environ.get("TRINITY_SYNC_ROOT")):
        raise ConfigError(
            "TRINITY_SYNC_ROOT is not set; set it to a folder next to that in which the program "
            "has its checkpoints, such as /runs/saves for /runs/out/step_100"
        )
    return Path(root).absolute()


def _make_writer(options: dict[str, Any]) -> _FolderWriter | None:
    """Return the writer of a call with these arguments; None if the call remains DCP's."""
    global _saves, _is_refused
    found = _find_folder(**options)
    if not found or _is_refused or os.getpid() != _PROCESS:
        return None
    group = dist.group.WORLD if dist.is_initialized() else None
    if _saves and _saves.group is not group:  # the program has made another
        _saves.coordinator.close()
        _saves = None
    try:
        _saves = _saves or _Saves(_ROOT, group)
    except RootInUseError as error:  # on all ranks
        logger.warning("what this process saves is saved by DCP: %s", error)
        _is_refused = True
        return None
    folder, name = found
    return _saves.make_writer(folder, name, options.get("planner"))


@wrapper
def _wrap_save(save: Call, state_dict: Any, *positional: Any, **options: Any) -> Any:
    writer = None if positional else _make_writer(options)
    if writer is None:
        return save(state_dict, *positional, **options)
    writer.stage(state_dict)
    return save({}, storage_writer=writer, process_group=options.get("process_group"))


@wrapper
def _wrap_async_save(save: Call, state_dict: Any, **options: Any) -> Any:
    if not (writer := _make_writer(options)):
        return save(state_dict, **options)
    return save(  # in DCP's thread, which only waits
        state_dict,
        storage_writer=writer,
        async_stager=writer,
        process_group=options.get("process_group"),
    )


@wrapper
def _wrap_load(load: Call, state_dict: Any, *positional: Any, **options: Any) -> Any:
    reader = options.get("storage_reader")
    given: Any = options.get("checkpoint_id") or getattr(reader, "path", None)
    if (reader is None or type(reader) is FileSystemReader) and _is_folder(given):
        ours = _FolderReader(given)
        ours.transforms = getattr(reader, "transforms", ours.transforms)
        options |= {"storage_reader": ours, "checkpoint_id": None}
    return load(state_dict, *positional, **options)


def _create_stream(self: FileSystem, path: Path, mode: str) -> Any:
    """Open a file as DCP does, but write into none that has another name, which may be a step's."""
    if mode == "wb" and (file := Path(path)).is_file() and file.stat().st_nlink > 1:
        file.unlink()
    return _create_stream_of_dcp(self, path, mode)


def _is_folder(checkpoint_id: Any) -> bool:
    """Return whether DCP reads a checkpoint from a folder, and not from a URL."""
    return isinstance(checkpoint_id, (str, os.PathLike)) and "://" not in str(checkpoint_id)


_ROOT = _get_root()
for _module, _name, _wrap in (
    (state_dict_saver, "save", _wrap_save),
    (state_dict_saver, "async_save", _wrap_async_save),
    (state_dict_loader, "load", _wrap_load),
):
    rebind(_module, _name, _wrap(getattr(_module, _name)), within=["torch.distributed"])
_create_stream_of_dcp = FileSystem.create_stream
FileSystem.create_stream = _create_stream  # type: ignore[method-assign,assignment]

if __name__ == "__main__":
    if len(sys.argv) == 1:
        raise SystemExit("usage: python -m trinity_sync.integrations.dcp.switch [-m] PROGRAM ...")
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
