"""Committed weights: the versions that manifests name, and the folders that are safe to load."""

import logging
from collections.abc import Iterator
from pathlib import Path

from trinity_sync.errors import CommitError, FormatError, SupersededError
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.job_identity import read_identity
from trinity_sync.storage.discovery import (
    iter_committed_steps,
    read_manifest_state,
    require_committed,
)
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.runs import refuse_superseded
from trinity_sync.weights.version import Version

logger = logging.getLogger(__name__)

WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")
"""Files that Hugging Face's and Trinity's loaders prefer to shards."""


def iter_committed_weights(root: str | Path, role: str) -> Iterator[Manifest]:
    """Yield the valid commits with the weights of a role, newest first, without superseded ones.

    Manifests decide; latest pointers are not read, so an empty pointer does no harm.
    """
    found = [manifest for manifest in iter_committed_steps(root) if _has_weights(manifest, role)]
    for manifest in sorted(found, key=lambda m: (m.run, m.step), reverse=True):
        try:
            refuse_superseded(root, manifest.run, "", manifest.step)
            yield _require_weights(root, manifest.step, role)
        except SupersededError:
            continue
        except CommitError as error:
            logger.warning("%s", error)


def find_newest_version(root: str | Path, role: str) -> Version | None:
    """Return the first of `iter_committed_weights` as a version; None if there is none."""
    identity = read_identity(root)  # first: the root may be recreated meanwhile
    return next(
        (
            Version(manifest.step, manifest.run, "checkpoint", str(root), role, identity=identity)
            for manifest in iter_committed_weights(root, role)
        ),
        None,
    )


def find_committed_version(root: str | Path, role: str, step: int) -> Version | None:
    """Return a committed step as a version.

    None if it is not committed, corrupted, superseded or without weights of the role.
    """
    identity = read_identity(root)
    try:
        manifest = _require_weights(root, step, role)
        refuse_superseded(root, manifest.run, "", step)
    except (SupersededError, CommitError, FormatError):
        return None
    if not _has_weights(manifest, role):
        return None
    return Version(step, manifest.run, "checkpoint", str(root), role, identity=identity)


def find_model_path(root: str | Path, role: str, *, use_huggingface: bool = False) -> Path | None:
    """Return the newest folder to load weights from, as Trinity's ``get_latest_model_path``.

    It is ``global_step_N/{role}``, or with ``use_huggingface`` its ``huggingface`` folder if the
    commit put full weights there; None if there is none. A folder is skipped if it has a file of
    weights that is older than the commit and not part of it: loaders prefer such a file to the
    newer shards next to it.
    """
    for manifest in iter_committed_weights(root, role):
        folder = step_folder(root, manifest.step) / role
        committed = {step_folder(root, manifest.step) / record.path for record in manifest.files}
        if stale := _find_stale_file(folder, committed, manifest.committed_at):
            logger.warning(
                "skipping step %d in %s: %s is older than its commit and not part of it, and "
                "loaders would prefer it. Remove that file.",
                manifest.step,
                root,
                stale,
            )
            continue
        if not use_huggingface:
            return folder
        inner = folder / "huggingface"
        if any(path in committed for path in _list_weight_files(inner)):
            return inner
    return None


def _require_weights(root: str | Path, step: int, role: str) -> Manifest:
    """Return the manifest of a step whose files of a role's weights are not corrupted.

    Optimizer states and the like, which no reader of weights opens, are not looked at.
    """
    manifest = require_committed(root, step, paths=())
    paths = {
        file.path
        for file in manifest.files
        if file.role == role and (file.component == "model" or not file.is_shard)
    }
    return read_manifest_state(root, manifest, runs=(), paths=paths).require_loadable()


def _has_weights(manifest: Manifest, role: str) -> bool:
    is_of_role = any(file.role == role and file.is_weights for file in manifest.files)
    return is_of_role and "state_dict" in manifest.kinds


def _find_stale_file(folder: Path, committed: set[Path], committed_at: float) -> Path | None:
    for path in [*_list_weight_files(folder), *_list_weight_files(folder / "huggingface")]:
        if path not in committed and path.stat().st_mtime < committed_at:
            return path
    return None


def _list_weight_files(folder: Path) -> list[Path]:
    return [path for pattern in WEIGHT_FILES for path in folder.glob(pattern)]
