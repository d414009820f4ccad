"""Verification by loading: load the newest checkpoint as a restart would, and measure the time.

All shards of all ranks are read, compared with their digests and unpickled, one after the other on
one node; a restart, in which each rank reads its own, takes a fraction of the time. Other files,
such as those of callable saves and of DCP, which only their loader understands, are digested;
exported weights are not, because a restart does not read them. It is separate from `verify`, which
needs no torch.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import CommitError, ImageError
from trinity_sync.layout import FOLDERS, step_folder
from trinity_sync.storage.discovery import find_newest, is_foreign
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.leases import lease_to_read
from trinity_sync.storage.restore import load_shards, require_digests


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Result of loading a checkpoint."""

    root: str
    step: int
    files: int
    nbytes: int
    seconds: float


def load_newest(
    root: str | Path, *, clock: Callable[[], float] = time.perf_counter
) -> LoadedCheckpoint | None:
    """Load the newest checkpoint of a job, from disk; return None if the job has none yet.

    A checkpoint of another system, which has no manifest, is none of the job's. Files are
    unpickled as a restart would do it, see ``tensors.safe_load``.

    Raises:
        CommitError: the checkpoint cannot be loaded or is empty, or no checkpoint is valid.
    """
    root = Path(root)
    manifest = find_newest(root)
    if manifest is None:
        named = read_latest_pointer(root, "checkpoint")
        if named is None or is_foreign(step_folder(root, named)):
            return None
        raise CommitError(
            f"{root} has checkpoints, and none can be loaded: the latest pointer names step "
            f"{named}. Run: trinity-sync ls {root}"
        )
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
        raise CommitError(
            f"{step_folder(root, manifest.step)} is the newest checkpoint, and contains nothing "
            "that can be loaded. Check what its saves write."
        )
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
    return LoadedCheckpoint(str(root), manifest.step, files, nbytes, seconds)
