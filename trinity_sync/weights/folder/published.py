"""Published versions of weights: their folders, and the marker that names the newest.

::

    OUT/
      latest.json                  the newest version; replaced atomically
      weight_v000007/              a complete model: model*.safetensors, config.json, tokenizer ...
        version.json               step, run and checksum
      weight_v000008/              or a delta to the version before (`delta`)
        version.json

A version has its final name once it is complete and durable. Its number is one more than that of
the version before; a number is never used for two versions that the marker has named. A step may
be published twice: by the run that resumed before it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from trinity_sync.errors import DeltaError, WeightSyncError
from trinity_sync.fs.atomic import read_uncached
from trinity_sync.fs.records import Count, Record, decode_record
from trinity_sync.weights.folder.delta import Tensors, compute_checksum, view_bytes

MARKER = "latest.json"
JOB_LOCK = ".job.lock"
"""File that each living publisher holds a shared lock of."""
VERSION_FILE = "version.json"
FOLDER = re.compile(r"weight_v(\d{6,})")


@dataclass(frozen=True)
class VersionRecord(Record):
    """Content of the marker, and of the file in a version's folder."""

    version: Count
    """Number of the version, from 1."""
    step: Count
    run: Count
    base: Count | None
    """Number of the version that this delta builds on; None for a complete model."""
    checksum: str
    """Of names, dtypes, shapes and bytes of all tensors, with the delta applied."""
    root: str
    """Root of the job that made the weights."""
    identity: str = ""
    """Identity of that job."""
    run_key: str = ""
    """Key of ``run``."""

    def is_of_other_root(self, other: Any) -> bool:
        """Return whether a version is of another job; not if the root was moved or recreated."""
        return self.root != str(other.root) and self.identity != other.identity


@dataclass(frozen=True)
class PublishedVersion(VersionRecord):
    """A version in a folder that engines read."""

    folder: Path = Path()


def read_latest(out: Path) -> PublishedVersion | None:
    """Return the version that the marker in ``out`` names; None if nothing was published.

    Raises:
        WeightSyncError: the marker was altered.
    """
    try:
        return decode_version(read_uncached(out / MARKER), out / MARKER, out)
    except FileNotFoundError:
        return None


def read_version(out: Path, version: int) -> PublishedVersion:
    """Return a published version by its number.

    Raises:
        DeltaError: it is missing.
        WeightSyncError: its file was altered.
    """
    path = version_folder(out, version) / VERSION_FILE
    try:
        return decode_version(read_uncached(path), path, out)
    except FileNotFoundError:
        raise explain_missing(version, out) from None


def explain_missing(version: int, where: str | Path) -> DeltaError:
    """Return the error of a version that was removed."""
    return DeltaError(
        f"version {version} is missing in {where}; a later version may build on it. Read the "
        "newest version"
    )


def list_chain(out: Path, version: PublishedVersion) -> list[PublishedVersion]:
    """Return a version, and before it those that it builds on, from a complete model on.

    Raises:
        DeltaError, WeightSyncError: as `read_version`.
    """
    chain = [version]
    while (base := chain[0].base) is not None:
        if base >= chain[0].version:
            raise DeltaError(
                f"{chain[0].folder} builds on the later version {base}; it was altered"
            )
        chain.insert(0, read_version(out, base))
    return chain


def iter_version_folders(out: Path) -> Iterator[tuple[int, Path]]:
    """Yield number and folder of all versions, complete or orphaned."""
    for path in sorted(out.iterdir()):
        if match := FOLDER.fullmatch(path.name):
            yield int(match[1]), path


def version_folder(out: Path, version: int) -> Path:
    """Return the folder of a version; slime's readers look for this name."""
    return out / f"weight_v{version:06d}"


def describe_tensor(name: str, tensor: torch.Tensor) -> str:
    """Return one line that differs if name, dtype, shape or a byte of a tensor differs."""
    checksum = compute_checksum(view_bytes(tensor))
    return f"{name} {tensor.dtype} {list(tensor.shape)} {checksum}\n"


def summarize(lines: Iterable[str]) -> str:
    """Return the checksum of a version, given the line of each tensor in any order."""
    return xxhash.xxh3_128_hexdigest("".join(sorted(lines)).encode())


def require_checksum(version: PublishedVersion, tensors: Tensors) -> None:
    """Require that tensors are those that were published.

    Raises:
        WeightSyncError: they are not.
    """
    if summarize(describe_tensor(*item) for item in tensors.items()) != version.checksum:
        raise WeightSyncError(
            f"{version.folder} is corrupted: its checksum is not that of step {version.step} as it "
            "was published; publish the step again"
        )


def decode_version(content: bytes, where: str | Path, out: Path) -> PublishedVersion:
    """Return the version in ``out`` that the content of a file at ``where`` names."""
    try:
        record = decode_record(VersionRecord, content, where)
    except ValueError as error:
        raise WeightSyncError(
            f"{where} is corrupted ({error}); publish into an empty folder"
        ) from error
    return PublishedVersion(**vars(record), folder=version_folder(out, record.version))
