"""Writer of safetensors files of limited size, with one file in memory at a time, that can resume.

The folder of an export has a small file, ``trinity_export.json``, with the source of the export and
the finished files and digests. It stays in the finished folder, to recognize it as an export.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trinity_sync.errors import ExportError
from trinity_sync.formats.hf_naming import Naming, Tensors
from trinity_sync.formats.shard_reader import Meta, ShardedModel
from trinity_sync.fs.atomic import make_folder, replace_file, sync_folder
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.fs.progress import OnProgress, no_progress
from trinity_sync.snapshot.dtensor_shards import have_equal_bits

PROGRESS = "trinity_export.json"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ExportedFile:
    """A finished file of an export."""

    nbytes: int
    digest: str


@dataclass
class ExportProgress:
    """Source of an export, and the files written so far."""

    folder: Path
    source: dict[str, Any]
    """Step, dtype and so on; only an export of the same source is resumed."""
    files: dict[str, ExportedFile] = field(default_factory=dict)

    def has_file(self, name: str) -> bool:
        """Return whether a file was written before and is unchanged."""
        known, path = self.files.get(name), self.folder / name
        return bool(
            known
            and path.is_file()
            and path.stat().st_size == known.nbytes
            and digest_cached_file(path) == known.digest
        )

    def write_file(self, name: str, write: Callable[[Path], object]) -> bool:
        """Write a file, unless it was written before; return whether it was written.

        ``name`` is its path below the folder.
        """
        if self.has_file(name):
            return False
        path = self.folder / name
        make_folder(path.parent)
        write(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sync_folder(path.parent)
        self.files[name] = ExportedFile(path.stat().st_size, digest_cached_file(path))
        body = {"source": self.source, "files": {n: asdict(f) for n, f in self.files.items()}}
        replace_file(self.folder / PROGRESS, json.dumps(body, indent=1))
        return True


def open_progress(folder: Path, source: dict[str, Any]) -> ExportProgress:
    """Return the progress of an export; a folder with an export of another source is emptied."""
    found = read_progress(folder)
    if found and found.source == source:
        return found
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    return ExportProgress(folder, source)


def read_progress(folder: Path) -> ExportProgress | None:
    """Return the progress of the export in a folder, in flight or finished, or None."""
    try:
        body = json.loads((folder / PROGRESS).read_text())
        files = {str(name): ExportedFile(**known) for name, known in body["files"].items()}
        return ExportProgress(folder, body["source"], files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_model(
    progress: ExportProgress,
    model: ShardedModel,
    names: dict[str, str],
    naming: Naming,
    *,
    convert_dtype: Callable[[str, torch.dtype], torch.dtype],
    max_bytes: int,
    on_progress: OnProgress = no_progress,
) -> None:
    """Write the weights to one file, or to several with an index, as ``save_pretrained`` does.

    ``names`` has the name in ``model`` by name in the exported model. ``convert_dtype`` returns the
    dtype to write, given a name in the exported model and the saved dtype. A tensor larger than
    ``max_bytes`` gets a file of its own. ``on_progress`` is called with bytes written and their
    total.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    groups: dict[str, list[str]] = {}
    for name in names:
        if name not in naming.dropped:
            groups.setdefault(naming.find_group(name), []).append(name)

    def make_empty(name: str) -> torch.Tensor:
        shape, dtype = model.read_meta(names[name])
        return torch.empty(shape, dtype=convert_dtype(name, dtype), device="meta")

    planned: dict[str, tuple[str, int]] = {}  # group and bytes by name
    for group, members in groups.items():
        for name, shape in naming.revert_fusion(
            {name: make_empty(name) for name in members}
        ).items():
            planned[name] = group, shape.nbytes
    shards = split_state_dict_into_shards_factory(
        {name: nbytes for name, (_, nbytes) in planned.items()},
        get_storage_size=lambda nbytes: nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    total = shards.metadata["total_size"]
    loaded: tuple[str, Tensors] = "", {}

    def read_tensors(wanted: list[str]) -> Tensors:
        nonlocal loaded
        found = {}
        for name in wanted:
            group = planned[name][0]
            if loaded[0] != group:
                loaded = "", {}
                trained = {
                    member: model.read_tensor(
                        names[member], convert_dtype(member, model.read_meta(names[member])[1])
                    )
                    for member in groups[group]
                }
                loaded = group, naming.revert_fusion(trained)
            found[name] = loaded[1].pop(name).contiguous()
            on_progress(planned[name][1], total)
        return found

    for file, wanted in shards.filename_to_tensors.items():
        written = progress.write_file(
            file,
            lambda path, wanted=wanted: save_compared(path, read_tensors(wanted)),  # type: ignore[misc]
        )
        if not written:
            on_progress(sum(planned[name][1] for name in wanted), total)
        loaded = "", {}
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        progress.write_file(INDEX, lambda path: path.write_text(json.dumps(index, indent=2) + "\n"))


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Write tensors to a safetensors file; no two of them share memory."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def save_compared(path: Path, tensors: Tensors) -> None:
    """Write a file as `save_tensors`, and require that it holds the tensors bit by bit.

    Raises:
        ExportError: it does not.
    """
    from safetensors import safe_open

    save_tensors(path, tensors)
    with safe_open(path, "pt", device="cpu") as file:
        written = {*file.keys()}
        for name, tensor in tensors.items():
            if name not in written or not have_equal_bits(file.get_tensor(name), tensor):
                raise ExportError(
                    f"{path} does not hold {name} as it was written; check the disk, and export "
                    "again"
                )


def read_metas(model: ShardedModel, names: dict[str, str]) -> dict[str, Meta]:
    """Return shape and dtype by new name, given the name in ``model`` by new name."""
    return {new: model.read_meta(old) for new, old in names.items()}
