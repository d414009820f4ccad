"""What the disk says of versions: the committed weights, and which folder is fit to load."""

import logging
from collections.abc import Iterator
from pathlib import Path

from trinity_sync.errors import CommitError, FormatError, SupersededError
from trinity_sync.layout import step_folder
from trinity_sync.storage.discovery import committed_steps, require_committed
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.runs import refuse_superseded
from trinity_sync.weights.version import Version

logger = logging.getLogger(__name__)

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
"""Files of weights that Hugging Face's and Trinity's loaders take before shards."""


def committed_weights(root: str | Path, role: str) -> Iterator[Manifest]:
    """Commits with the weights of a role, whole and not left behind by a later run, newest first.

    Manifests decide; iteration files are not read, so an empty one does no harm.
    """
    found = [m for m in committed_steps(root) if "state_dict" in m.kinds and _has_model(m, role)]
    for manifest in sorted(found, key=lambda m: (m.run, m.step), reverse=True):
        try:
            refuse_superseded(root, manifest.run, "", manifest.step)
            yield require_committed(root, manifest.step)
        except SupersededError:
            continue
        except CommitError as error:
            logger.warning("%s", error)


def newest_version(root: str | Path, role: str) -> Version | None:
    """The newest of `committed_weights` as a version."""
    return next(
        (
            Version(manifest.step, manifest.run, "checkpoint", str(root), role)
            for manifest in committed_weights(root, role)
        ),
        None,
    )


def version_of_step(root: str | Path, role: str, step: int) -> Version | None:
    """A step as a version; None if it is not one of `committed_weights`."""
    try:
        manifest = require_committed(root, step)
        refuse_superseded(root, manifest.run, "", step)
    except (SupersededError, CommitError, FormatError):
        return None
    if "state_dict" not in manifest.kinds or not _has_model(manifest, role):
        return None
    return Version(step, manifest.run, "checkpoint", str(root), role)


def model_path(root: str | Path, role: str, *, use_huggingface: bool = False) -> Path | None:
    """The newest folder to load the weights from, as Trinity's ``get_latest_model_path``.

    ``global_step_N/{role}``, or its ``huggingface`` where the commit put whole weights there. A
    folder with weights that the commit does not name and that are older than it is passed over:
    loaders prefer such a file to the newer shards beside it.
    """
    for manifest in committed_weights(root, role):
        folder = step_folder(root, manifest.step) / role
        named = {step_folder(root, manifest.step) / record.path for record in manifest.files}
        if stale := _stale(folder, named, manifest.committed_at):
            logger.warning(
                "step %d in %s is passed over: %s is older than its commit and not part of it, "
                "and loaders would prefer it. Remove it.",
                manifest.step,
                root,
                stale,
            )
            continue
        if not use_huggingface:
            return folder
        inner = folder / "huggingface"
        if any(path in named for path in _weights_in(inner)):
            return inner
    return None


def _has_model(manifest: Manifest, role: str) -> bool:
    return any((file.role, file.component) == (role, "model") for file in manifest.files)


def _stale(folder: Path, named: set[Path], committed_at: float) -> Path | None:
    for path in [*_weights_in(folder), *_weights_in(folder / "huggingface")]:
        if path not in named and path.stat().st_mtime < committed_at:
            return path
    return None


def _weights_in(folder: Path) -> list[Path]:
    return [path for pattern in WEIGHTS for path in folder.glob(pattern)]
