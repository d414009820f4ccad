"""Safetensors files of at most so many bytes, one in memory at a time, resumed where it broke off.

A folder under way has a small file, ``trinity_export.json``, that says what it is made of and which
files are whole, with digests. It stays in the finished folder: it tells an export from other files.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trinity_sync.formats.hf_naming import Naming, Tensors
from trinity_sync.formats.shard_reader import Meta, ShardedModel
from trinity_sync.fs.atomic import make_folder, replace_file, sync_folder
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.fs.progress import OnProgress, no_progress

PROGRESS = "trinity_export.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class WholeFile:
    """A file of an export that is whole."""

    nbytes: int
    digest: str


@dataclass
class Progress:
    """Source of an export, and the files written so far."""

    folder: Path
    source: dict[str, Any]
    """Step, dtype and so on: an export of another source is not gone on with."""
    files: dict[str, WholeFile] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether a file was written before and is still whole."""
        known, path = self.files.get(name), self.folder / name
        return bool(
            known
            and path.is_file()
            and path.stat().st_size == known.nbytes
            and digest_cached_file(path) == known.digest
        )

    def write(self, name: str, write: Callable[[Path], object]) -> bool:
        """Have a file written, unless it is there and whole; whether it had to be."""
        if self.has(name):
            return False
        path = self.folder / name
        make_folder(path.parent)
        write(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        sync_folder(path.parent)
        self.files[name] = WholeFile(path.stat().st_size, digest_cached_file(path))
        body = {"source": self.source, "files": {n: asdict(f) for n, f in self.files.items()}}
        replace_file(self.folder / PROGRESS, json.dumps(body, indent=1))
        return True


def open_progress(folder: Path, source: dict[str, Any]) -> Progress:
    """Return the progress of an export of ``source``; a folder with another export is emptied."""
    found = read_progress(folder)
    if found and found.source == source:
        return found
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    return Progress(folder, source)


def read_progress(folder: Path) -> Progress | None:
    """Return the progress of the export in a folder, in flight or finished; None without one."""
    try:
        body = json.loads((folder / PROGRESS).read_text())
        files = {str(name): WholeFile(**known) for name, known in body["files"].items()}
        return Progress(folder, body["source"], files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_model(
    progress: Progress,
    model: ShardedModel,
    names: dict[str, str],
    naming: Naming,
    *,
    dtype_of: Callable[[torch.dtype], torch.dtype],
    max_bytes: int,
    on_progress: OnProgress = no_progress,
) -> None:
    """Write the weights, in one file or in several with an index, as ``save_pretrained`` does.

    Args:
        progress: where to.
        model: what.
        names: name in ``model`` by name in the exported model.
        naming: how transformers wants them.
        dtype_of: the dtype to write a tensor of a dtype in.
        max_bytes: of a file; a larger tensor has a file of its own.
        on_progress: is told how far it is.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        if name not in naming.dropped:
            groups.setdefault(naming.group(name), []).append(name)

    def shape_of(name: str) -> torch.Tensor:
        shape, dtype = model.meta(names[name])
        return torch.empty(shape, dtype=dtype_of(dtype), device="meta")

    planned: dict[str, tuple[str, int]] = {}  # group and bytes by name
    for group, members in groups.items():
        for name, shape in naming.written({name: shape_of(name) for name in members}).items():
            planned[name] = group, shape.nbytes
    files = dict(_files(planned, max_bytes))
    whole = sum(nbytes for _, nbytes in planned.values())
    at_hand: tuple[str, Tensors] = "", {}

    def tensors_of(wanted: list[str]) -> Tensors:
        nonlocal at_hand
        found = {}
        for name in wanted:
            group = planned[name][0]
            if at_hand[0] != group:
                at_hand = "", {}
                trained = {
                    member: model.tensor(names[member], dtype_of(model.meta(names[member])[1]))
                    for member in groups[group]
                }
                at_hand = group, naming.written(trained)
            found[name] = at_hand[1].pop(name).contiguous()
            on_progress(planned[name][1], whole)
        return found

    for file, wanted in files.items():
        written = progress.write(
            file,
            lambda path, wanted=wanted: save_tensors(path, tensors_of(wanted)),  # type: ignore[misc]
        )
        if not written:
            on_progress(sum(planned[name][1] for name in wanted), whole)
        at_hand = "", {}
    if len(files) > 1:
        index = {
            "metadata": {"total_size": whole},
            "weight_map": {name: file for file, wanted in files.items() for name in wanted},
        }
        progress.write(INDEX, lambda path: path.write_text(json.dumps(index, indent=2) + "\n"))


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Write tensors as safetensors; none of them shares memory with another."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def read_metas(model: ShardedModel, names: dict[str, str]) -> dict[str, Meta]:
    """Shapes and dtypes by new name."""
    return {new: model.meta(old) for new, old in names.items()}


def _files(planned: dict[str, tuple[str, int]], max_bytes: int) -> Iterator[tuple[str, list[str]]]:
    lists: list[list[str]] = [[]]
    room = max_bytes
    for name, (_, nbytes) in planned.items():
        if lists[-1] and nbytes > room:
            lists.append([])
            room = max_bytes
        lists[-1].append(name)
        room -= nbytes
    for number, wanted in enumerate(lists, start=1):
        several = f"model-{number:05}-of-{len(lists):05}.safetensors"
        yield (several if len(lists) > 1 else WEIGHTS), wanted
