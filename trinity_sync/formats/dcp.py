"""Conversion of committed steps to checkpoints of PyTorch DCP, and back.

`to_dcp` writes a committed step as a checkpoint of DCP. The ranks' files are mapped and passed to
PyTorch's writer in chunks, so no tensor is assembled, and memory holds only pages of the files,
which the kernel can reclaim. The folder appears complete, by one rename.

`from_dcp` commits a checkpoint of DCP as a step of FSDP2 ranks, or of replicas. One rank's part of
one component is in memory at a time: PyTorch plans which chunks of the checkpoint it needs; it is
read, written and freed. Then the step is committed like any other.
"""

import io
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
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

from trinity_sync.errors import CommitError, ConfigError, SaveError
from trinity_sync.formats.dcp_source import DcpReader, Paths, run_dcp_alone
from trinity_sync.formats.shard_reader import SavedState, open_shard, outline_files
from trinity_sync.fs.atomic import make_folder, sync_folder
from trinity_sync.fs.direct_io import OnProgress, digest_cached_file, no_progress
from trinity_sync.layout import check_name, check_root, shard_file, step_folder
from trinity_sync.snapshot.job_identity import open_identity
from trinity_sync.snapshot.packed import read_folder
from trinity_sync.snapshot.save_id import SaveId
from trinity_sync.storage.commit import commit
from trinity_sync.storage.discovery import list_shards, require_unreplaced
from trinity_sync.storage.leases import lease_to_read
from trinity_sync.storage.manifest import FileRecord, Manifest, read_run_manifest
from trinity_sync.storage.persist import make_attempt_path, read_file_identity
from trinity_sync.storage.restore import require_digests
from trinity_sync.storage.runs import find_newest_run, open_run
from trinity_sync.storage.save import Written, discard
from trinity_sync.tensors.torch_private import make_mesh
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


def from_dcp(
    folder: str | Path,
    root: str | Path,
    step: int,
    *,
    world_size: int,
    role: str = "actor",
    model: str = "model",
    optim: str = "optim",
    layout: Literal["replicas", "fsdp2", ""] = "",
    device_type: str = "cuda",
    mesh: str = "fsdp",
    whole: Sequence[str] = (),
    metadata: str | Path | None = None,
    on_progress: OnProgress = no_progress,
) -> Manifest:
    """Commit a step with the state of a DCP checkpoint, for ``world_size`` ranks.

    With the layout ``replicas`` the tensors are those of a model without FSDP, written once, and
    ``extra_state`` of each of several ranks is empty. With ``fsdp2`` they are DTensors that are
    split along their first dimension, as ``fully_shard`` does; scalars are not split. veRL's loader
    reads the step with as many ranks, ``FSDPCheckpointManager`` with any number; both without
    ``extra`` in ``checkpoint.load_contents``, which DCP checkpoints do not contain.

    Args:
        folder: folder of the checkpoint.
        root: a job's root, of which no training is running; created if it is missing.
        step: number of the new step.
        world_size: number of ranks that are to load it.
        role: role of the state.
        model: key of the model in the saved state, with dots between nested keys, which a stateful
            object around it may precede; empty if its tensors are at the top.
        optim: key of the optimizer, in the form of ``optimizer.state_dict()`` or of
            ``torch.distributed.checkpoint.state_dict``; empty to leave it out.
        layout: how the ranks hold tensors; by default as replicas for one rank, otherwise FSDP2.
        device_type: device type of the mesh of FSDP2; DTensors of another one do not load.
        mesh: name of the mesh's dimension, likewise: that of veRL by default, and empty for
            ``fully_shard`` without a mesh.
        whole: patterns of names of model tensors that are not sharded, i.e. buffers.
        metadata: folder with ``fsdp_config.json`` and ``huggingface/``, for veRL's merger.
        on_progress: called with shards that were written and their total.

    Raises:
        ConfigError: the folder is not a DCP checkpoint, has no such state or more than tensors and
            plain values, or an argument is invalid.
        CommitError: the job has such a step, or the checkpoint is corrupted.
        SaveError: the step cannot be written; nothing is left of it.
    """
    check_name("role", role)
    check_root(root)
    if world_size < 1 or step < 0:
        raise ConfigError(
            f"step must be at least 0, got {step}, and world_size at least 1, got {world_size}"
        )
    source, base = DcpReader(Path(folder)), Path(root).resolve()
    parts = _select_parts(source, model, optim)
    is_whole = (layout or ("replicas" if world_size == 1 else "fsdp2")) == "replicas"
    if step_folder(base, step).exists():
        raise CommitError(f"{step_folder(base, step)} exists already; choose another step or root")
    make_folder(base)
    identity = open_identity(base)
    run = find_newest_run(base) or open_run(base, f"from-dcp-{uuid.uuid4().hex}", 0)
    save = SaveId(str(base), run.number, run.key, step, "checkpoint", (role,), identity=identity)
    saved_by = 1 if is_whole else world_size  # a replica is written once, as of one rank
    shards = [(name, rank, saved_by) for name in parts for rank in range(saved_by)]
    if saved_by < world_size:
        shards += [("extra_state", rank, world_size) for rank in range(world_size)]
    small = _read_metadata_files(Path(metadata)) if metadata else {}
    components = (*dict.fromkeys(name for name, *_ in shards), *(["metadata"] if small else []))
    replicated = tuple(parts) if saved_by < world_size else ()
    written: list[Written] = []
    try:
        for name, content in small.items():
            record = FileRecord(f"{role}/{name}", 0, "", role, "metadata", 0, world_size)
            written.append(_write(save, record, content, components))
        for name, rank, of in shards:
            on = None if is_whole else make_mesh(device_type, rank, of, mesh)
            paths = parts.get(name)
            state = source.read_component(paths, rank, on, whole, name) if paths else {}
            record = FileRecord(f"{role}/{shard_file(name, of, rank)}", 0, "", role, name, rank, of)
            written.append(_write(save, record, state, components))
            on_progress(1, len(shards))
        return commit(save, [replace(file, replicated=replicated) for file in written])
    except OSError as error:
        raise SaveError(
            f"{save} is not committed: {error.filename or save.folder} cannot be written: "
            f"{error.strerror}. Nothing is left of it; repair that and retry."
        ) from error
    finally:
        _remove_uncommitted(save, written)


def _select_parts(source: DcpReader, model: str, optim: str) -> dict[str, Paths]:
    """Return the entries of model and optimizer, without a component that is not saved.

    Raises:
        ConfigError: there is no model, or not the optimizer of a key that is not the default.
    """
    at = source.find_key(model) if model else ()
    keys = [optim] if optim else []
    if optim == "optim":  # next to the model, or where there is one
        beside = ".".join(map(str, (at or ())[:-1]))
        keys = ["optim", "optimizer", "optimizers"]
        keys = [*(f"{beside}.{key}" for key in keys if beside), *keys]
    found = [path for key in keys if (path := source.find_key(key))]
    parts: dict[str, Paths] = {}
    if at is not None:
        parts["model"] = source.select_entries(at, without=found[0] if found else None)
    if found:
        parts["optim"] = source.select_entries(found[0])
        source.require_optimizer(parts["optim"])
    for name, key in (("model", model), ("optim", optim)):
        if not parts.get(name) and (name == "model" or key not in ("", "optim")):
            top = dict.fromkeys(".".join(map(str, path[:2])) for path in source.paths.values())
            raise ConfigError(
                f"{source.folder} has no {name} under {key!r} (it has {', '.join([*top][:8])}); "
                f"pass its key, such as app.{name}, and '' for "
                f"{'none' if name == 'optim' else 'tensors at the top'} (--{name})"
            )
    return parts


def _write(save: SaveId, record: FileRecord, content: Any, components: tuple[str, ...]) -> Written:
    """Write a state, or bytes, under a temporary name, durably."""
    final, attempt, image = save.folder / record.path, uuid.uuid4().hex[:8], uuid.uuid4().hex
    make_folder(final.parent)
    temporary = make_attempt_path(final, attempt, image)
    try:
        with run_dcp_alone(), temporary.open("xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(final.parent)
    return Written(
        replace(record, nbytes=temporary.stat().st_size, digest=digest_cached_file(temporary)),
        temporary=os.fspath(temporary),
        identity=read_file_identity(temporary),
        components=components,
        seconds=0.0,
    )


def _read_metadata_files(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder with fsdp_config.json and huggingface/")
    return read_folder(folder)


def _remove_uncommitted(save: SaveId, written: Sequence[Written]) -> None:
    """Remove the files of a failed conversion; none after a commit."""
    if read_run_manifest(save.root, save.run, save.step):
        return
    discard(written)
    for file in written:
        (save.folder / file.record.path).unlink(missing_ok=True)
    for folder, _, _ in os.walk(save.folder, topdown=False):
        with suppress(OSError):  # not empty
            Path(folder).rmdir()
