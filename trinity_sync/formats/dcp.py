"""Conversion of committed steps to checkpoints of PyTorch DCP.

`to_dcp` writes a committed step as a checkpoint of DCP. The ranks' files are mapped and passed to
PyTorch's writer in chunks, so no tensor is assembled, and memory holds only pages of the files,
which the kernel can reclaim. The folder appears complete, by one rename.
"""

import io
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from trinity_sync.errors import ConfigError, SaveError
from trinity_sync.formats.shard_reader import SavedState, open_shard, outline_files
from trinity_sync.fs.atomic import make_folder, sync_folder
from trinity_sync.fs.direct_io import OnProgress, no_progress
from trinity_sync.layout import check_name, step_folder
from trinity_sync.storage.discovery import list_shards, require_unreplaced
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.restore import require_digests
from trinity_sync.storage.steps_in_use import lease_to_read
from trinity_sync.tensors.unshard import TensorChunk, iter_leaves

COMPONENTS = ("model", "optim")
"""Components that can be converted; the others belong to this job and its ranks."""


@dataclass(frozen=True)
class DcpResult:
    """Result of a conversion to DCP."""

    folder: Path
    components: tuple[str, ...]
    tensors: int
    nbytes: int
    """Bytes of the folder's files."""


def to_dcp(
    root: str | Path,
    step: int,
    folder: str | Path,
    *,
    role: str = "actor",
    components: Sequence[str] = (),
    on_progress: OnProgress = no_progress,
) -> DcpResult:
    """Write model and optimizer of a step as a DCP checkpoint ``{"model": ..., "optim": ...}``.

    Keys are those of ``model.state_dict()`` and ``optimizer.state_dict()`` (which numbers
    parameters). Load it with ``dcp.load({"model": model.state_dict()}, checkpoint_id=folder)``,
    with any number of ranks, or none.

    Args:
        root: the job's root.
        step: a committed step.
        folder: folder of the checkpoint; missing or empty.
        role: role of the state.
        components: ``model``, ``optim`` or both; by default those that the step has.
        on_progress: called with bytes and the total; each byte counts twice, for its digest and its
            copy.

    Raises:
        CommitError: the step is not committed or corrupted, lacks a component, or its shards cannot
            be put together.
        ConfigError: an argument is invalid, or the optimizer's tensors have no placement.
        SaveError: the folder cannot be written; nothing is left of it.
    """
    check_name("role", role)
    base, target = Path(root).resolve(), Path(folder).absolute().resolve()
    if target.is_relative_to(base) or base.is_relative_to(target):
        raise ConfigError(f"{folder} is part of the job, or contains it; choose another folder")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{folder} is not empty; nothing was changed. Choose another folder.")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    of_step = step_folder(base, step)
    with lease_to_read(base, step, f"conversion of {role}") as manifest:
        shards = {
            name: list_shards(base, manifest, role, name)
            for name in _choose_components(manifest, role, components)
        }
        records = [record for each in shards.values() for record in each]
        total = 2 * sum(record.nbytes for record in records)
        require_digests(of_step, records, lambda n: on_progress(n, total))
        files = {name: [of_step / record.path for record in each] for name, each in shards.items()}
        first = {name: dict(open_shard(each[0])) for name, each in files.items()}
        _require_placements(files, first)
        saved = {
            name: SavedState(each, [*outline_files(each, range(len(each))).values()])
            for name, each in files.items()
        }
        require_unreplaced(base, manifest)  # mapped files stay those of this commit
        try:
            make_folder(partial)
            planner = _Planner(saved, lambda n: on_progress(n, total))
            writer = FileSystemWriter(partial)
            with run_dcp_alone():
                save(first, storage_writer=writer, planner=planner, no_dist=True)
            sync_folder(partial)
            if target.exists():
                target.rmdir()
            partial.rename(target)
            sync_folder(target.parent)
        except OSError as error:
            raise SaveError(
                f"step {step} in {root} is not converted: {error.filename or target} cannot be "
                f"written: {error.strerror}. Nothing is left of it; repair that and retry."
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    nbytes = sum(path.stat().st_size for path in target.iterdir())
    tensors = sum(len(component.tensors) for component in saved.values())
    return DcpResult(target, tuple(saved), tensors, nbytes)


class _Planner(DefaultSavePlanner):
    """Plans all ranks' chunks in one process; each chunk is read from its rank's file."""

    def __init__(self, saved: Mapping[str, SavedState], on_read: Callable[[int], object]) -> None:
        super().__init__()
        self._saved, self._on_read = saved, on_read
        self._chunks: dict[MetadataIndex, tuple[SavedState, str, TensorChunk]] = {}

    def create_local_plan(self) -> SavePlan:
        """Plan all chunks of all tensors, and plain values as rank 0 saved them."""
        names = {
            f"{c}.{name}": (saved, name)
            for c, saved in self._saved.items()
            for name in saved.tensors
        }
        items, rest = [], {}
        for key, value in self.state_dict.items():
            if key not in names:
                rest[key] = value
                continue
            saved, name = names[key]
            full = saved.tensors[name]
            if not full.chunks:  # a tensor without elements
                rest[key] = torch.empty(full.shape, dtype=full.dtype, device="cpu")
            for chunk in full.chunks:
                index = MetadataIndex(key, torch.Size(chunk.offsets))
                self._chunks[index] = saved, name, chunk
                box = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                data = TensorWriteData(box, TensorProperties(full.dtype), torch.Size(full.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.state_dict.update(rest)
        items += create_default_local_save_plan(rest, is_coordinator=True).items
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return a chunk as a view of the mapped file, of which the writer copies one at a time."""
        if write_item.index not in self._chunks:
            return super().resolve_data(write_item)
        saved, name, chunk = self._chunks[write_item.index]
        part = saved.view_chunk(name, chunk)
        self._on_read(part.nbytes)
        return part


def _require_placements(
    files: Mapping[str, Sequence[Path]], first: Mapping[str, Mapping[Any, Any]]
) -> None:
    """Require that tensors have placements, which the flat optimizer state of FSDP1 lacks."""
    leaves = {name: [*iter_leaves(state)] for name, state in first.items()}
    model, optim = (
        [leaf for _, leaf in leaves.get(name, ()) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        for name in COMPONENTS
    )
    is_sharded = [any(isinstance(leaf, DTensor) for leaf in each) for each in (model, optim)]
    if optim and is_sharded == [True, False] and len(files["optim"]) > 1:
        raise ConfigError(
            f"{files['optim'][0]} is the flat state of FSDP1, which does not say to which "
            "parameters it belongs; convert the model alone (--component model)"
        )


def _choose_components(manifest: Manifest, role: str, components: Sequence[str]) -> Sequence[str]:
    """Return the requested components, by default the model and what else the step has."""
    if unknown := set(components) - set(COMPONENTS):
        raise ConfigError(
            f"{', '.join(sorted(unknown))} cannot be converted; only model and optim can"
        )
    saved = {f.component for f in manifest.files if f.role == role and f.is_shard}
    return components or [name for name in COMPONENTS if name == "model" or name in saved]


@contextmanager
def run_dcp_alone() -> Iterator[None]:
    """Run DCP within the block without a process group, and raise the original errors.

    DCP warns that there is no process group, wraps the errors of ranks, and finishes a file after
    the disk refused a write, which hides the cause.
    """
    with warnings.catch_warnings(), torch.device("cpu"):  # DCP computes on the default device
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except (CheckpointException, RuntimeError) as error:
            first: BaseException = error
            if isinstance(error, CheckpointException):
                first = next(iter(error.failures.values()))[0]
            raise _find_os_error(first) or first from error


def _find_os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error
