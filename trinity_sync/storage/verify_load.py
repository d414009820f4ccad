"""Verification by loading: load the newest checkpoint as a restart would, and measure the time.

All shards of all ranks are read, compared with their digests and unpickled, one after the other on
one node; a restart, in which each rank reads its own, takes a fraction of the time. Other files,
such as those of callable saves and of DCP, which only their loader understands, are digested;
exported weights are not, because a restart does not read them. It is separate from `verify`, which
needs no torch.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import CommitError, ImageError
from trinity_sync.fs.direct_io import open_direct, read_fd
from trinity_sync.layout import FOLDERS, MANIFEST, step_folder
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.leases import lease_to_read
from trinity_sync.storage.restore import load_shards, require_digests
from trinity_sync.tensors.deserialize import load_image
from trinity_sync.tensors.safe_load import is_trusted


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Result of loading a checkpoint."""

    root: str
    step: int
    files: int
    nbytes: int
    seconds: float
    checked: bool
    """Whether digests were compared; without a manifest there are none."""


def load_newest(
    root: str | Path, *, clock: Callable[[], float] = time.perf_counter
) -> LoadedCheckpoint | None:
    """Load the newest checkpoint of a job, from disk; return None if the job has none yet.

    Files are unpickled as a restart would do it, see ``tensors.safe_load``.

    Raises:
        CommitError: the checkpoint cannot be loaded or is empty, or no checkpoint is valid.
    """
    root = Path(root)
    manifest = find_newest(root)
    if manifest is None:
        return _load_without_manifest(root, clock)
    # common.pt of Megatron, among the metadata, may name classes of its environment
    paths = [
        record.path
        for record in manifest.files
        if record.path.endswith(".pt") and record.component != "metadata"
    ]
    others = [
        record
        for record in manifest.files
        if record.path not in paths and (record.component in ("", *FOLDERS) or record.is_distcp)
    ]
    if not paths and not others:
        raise _make_empty_error(step_folder(root, manifest.step))
    with lease_to_read(root, manifest.step, "verify --load"):
        start = clock()
        nbytes = 0
        try:
            for shard in load_shards(root, manifest.step, paths):
                nbytes += shard.nbytes
            require_digests(step_folder(root, manifest.step), others)
            nbytes += sum(record.nbytes for record in others)
        except (CommitError, ImageError):
            raise
        except Exception as error:  # whatever a pickle may raise
            raise CommitError(
                f"step {manifest.step} in {root} cannot be loaded: {error!r}. Resume from another "
                "step (trinity-sync ls lists them)."
            ) from error
        seconds = clock() - start
    files = len(paths) + len(others)
    return LoadedCheckpoint(str(root), manifest.step, files, nbytes, seconds, checked=True)


def _load_without_manifest(root: Path, clock: Callable[[], float]) -> LoadedCheckpoint | None:
    """Load a checkpoint that veRL saved itself, which its latest pointer names."""
    step = read_latest_pointer(root, "checkpoint")
    if step is None:
        return None
    folder = step_folder(root, step)
    if (folder / MANIFEST).exists() or not folder.is_dir():
        raise CommitError(
            f"{root} has checkpoints, and none can be loaded: the latest pointer names step "
            f"{step}. Run: trinity-sync ls {root}"
        )
    paths = sorted(folder.rglob("*.pt"))
    if not paths:
        raise _make_empty_error(folder)
    start = clock()
    nbytes = 0
    for path in paths:
        try:
            with open_direct(path) as fd:
                trusted = is_trusted(fd)
                image, _ = read_fd(fd, os.fstat(fd).st_size)
            load_image(image, path, trusted=trusted)
        except CommitError:
            raise
        except Exception as error:
            raise CommitError(f"{path} cannot be loaded: {error!r}") from error
        nbytes += len(image)
    return LoadedCheckpoint(str(root), step, len(paths), nbytes, clock() - start, checked=False)


def _make_empty_error(folder: Path) -> CommitError:
    return CommitError(
        f"{folder} is the newest checkpoint, and contains nothing that can be loaded. Check what "
        "its saves write."
    )
