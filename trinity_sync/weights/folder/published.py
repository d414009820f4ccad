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

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from trinity_sync.errors import DeltaError, WeightSyncError
from trinity_sync.fs.atomic import list_paths, make_temporary_path, read_uncached
from trinity_sync.fs.locks import LockFile
from trinity_sync.fs.records import Count, Record, decode_record
from trinity_sync.retention.policies import StepInfo, parse_policy
from trinity_sync.retention.removal import RemovalPlan
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
    run_key: str = ""

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


def remove_version(path: Path) -> None:
    """Remove a version, which has its name until it is no longer complete."""
    gone = make_temporary_path(path.with_suffix(".removed"))
    with suppress(FileNotFoundError):  # another process has removed it
        path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def plan_chains(out: Path, keep: str) -> RemovalPlan:
    """Plan to remove chains of which a policy keeps no version, except for the newest chain.

    Raises:
        ConfigError, WeightSyncError: the policy is invalid; the record of a version was altered.
    """
    chains = [[info for _, info in chain] for chain in _list_chains(out)]
    why = parse_policy(keep).keeps([info for chain in chains for info in chain], time.time())
    stay = [chain for chain in chains if chain is chains[-1] or any(e.step in why for e in chain)]
    kept = [(each, why.get(each.step, "its chain stays")) for chain in stay for each in chain]
    removed = [each for chain in chains if chain not in stay for each in chain]
    return RemovalPlan(tuple(kept), tuple(removed), newest={})


def remove_chains(out: Path, plan: RemovalPlan) -> RemovalPlan:
    """Remove the chains of a plan that no reader has open; return what became of them.

    Of a chain the newest version goes first, so each version that is left can be rebuilt.
    """
    for path in list_paths(out, ".weight_v*.removed.*"):  # of a removal that was killed
        shutil.rmtree(path, ignore_errors=True)
    removed: list[StepInfo] = []
    for chain in _list_chains(out):
        if all(info in plan.removed for _, info in chain):
            with closing(LockFile(chain[0][0] / VERSION_FILE, os.O_RDWR)) as lock:
                for folder, info in reversed(chain) if lock.try_acquire() else ():
                    remove_version(folder)
                    removed.append(info)
    why = "a FolderReader has its chain open"
    spared = tuple((each, why) for each in plan.removed if each not in removed)
    return replace(plan, removed=tuple(removed), spared=spared)


def _list_chains(out: Path) -> list[list[tuple[Path, StepInfo]]]:
    latest, chains = read_latest(out), list[list[tuple[Path, StepInfo]]]()
    for number, folder in iter_version_folders(out):
        if latest and number <= latest.version:
            each, files = read_version(out, number), [path.stat() for path in folder.iterdir()]
            if each.base is None or not chains:
                chains.append([])
            made_at, nbytes = folder.stat().st_mtime, sum(file.st_size for file in files)
            info = StepInfo(each.step, each.run, ("state_dict",), made_at, nbytes)
            chains[-1].append((folder, info))
    return chains


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
