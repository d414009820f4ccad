"""Writer of safetensors files of limited size, with one file in memory at a time, that can resume.

The folder of an export has a small file, ``trinity_export.json``, with the source of the export and
the finished files and digests. It stays in the finished folder, to recognize it as an export.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from trinity_sync.errors import ExportError
from trinity_sync.formats.hf_naming import Naming, Tensors
from trinity_sync.formats.shard_reader import Meta, SavedState
from trinity_sync.fs.atomic import make_folder, read_file, remove_tree, replace_file, sync_folder
from trinity_sync.fs.direct_io import OnProgress, digest_cached_file, no_progress
from trinity_sync.layout import is_below
from trinity_sync.tensors.dtensors import have_equal_bits

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
            and not path.is_symlink()
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
        path.unlink(missing_ok=True)  # it may be another user's link
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
    make_folder(folder.parent)
    remove_tree(folder)
    make_folder(folder)
    return ExportProgress(folder, source)


def read_progress(folder: Path) -> ExportProgress | None:
    """Return the progress of the export in a folder, in flight or finished, or None."""
    try:
        body = json.loads(read_file(folder / PROGRESS))
        files = {str(name): ExportedFile(**known) for name, known in body["files"].items()}
        is_ours = all(map(is_below, files))  # anyone may have written it
        return ExportProgress(folder, body["source"], files) if is_ours else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_model(
    progress: ExportProgress,
    model: SavedState,
    names: dict[str, str],
    naming: Naming,
    metas: Mapping[str, Meta],
    *,
    max_bytes: int,
    on_progress: OnProgress = no_progress,
) -> None:
    """Write the weights to one file, or to several with an index, as ``save_pretrained`` does.

    By name in the exported model, ``names`` has the name in ``model``, and ``metas`` the shape and
    the dtype to write. A tensor larger than ``max_bytes`` gets a file of its own. ``on_progress``
    is called with bytes written and their total.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    groups = naming.plan_groups(metas)
    planned = {  # group and bytes by name
        name: (group, empty.nbytes)
        for group, (_, written) in groups.items()
        for name, empty in written.items()
    }
    shards = split_state_dict_into_shards_factory(
        {name: nbytes for name, (_, nbytes) in planned.items()},
        get_storage_size=lambda nbytes: nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    total = shards.metadata["total_size"]

    def read_tensors(wanted: list[str]) -> Tensors:
        found = {}
        for group, inside in groupby(wanted, key=lambda name: planned[name][0]):
            members = groups[group][0]
            read = {each: model.read_tensor(names[each], metas[each][1]) for each in members}
            read = naming.revert_fusion(read)
            for name in inside:
                found[name] = read.pop(name).contiguous()
                on_progress(planned[name][1], total)
            read.clear()  # what is in another file, before the next group is read
        return found

    for file, wanted in shards.filename_to_tensors.items():
        written = progress.write_file(
            file,
            lambda path, wanted=wanted: save_compared(path, read_tensors(wanted)),  # type: ignore[misc]
        )
        if not written:
            on_progress(sum(planned[name][1] for name in wanted), total)
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        progress.write_file(INDEX, lambda path: path.write_text(json.dumps(index, indent=2) + "\n"))


@contextmanager
def translate_disk_errors(path: Path) -> Iterator[None]:
    """Raise what safetensors says of a full or broken disk as the `OSError` that it is."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if not (found := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Write tensors to a safetensors file; no two of them share memory."""
    from safetensors.torch import save_file

    with translate_disk_errors(path):
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
