"""Iteration files: the pointers that veRL and Trinity resume and sync from.

They move after the manifest, atomically, and only forward: by step within a run, while a later run
counts as newer than every earlier one, because it went on from an earlier step on purpose.
"""

import logging
from pathlib import Path

from trinity_sync.errors import ManifestError
from trinity_sync.layout import ITERATION_FILES, Kind
from trinity_sync.storage.durable import replace_file
from trinity_sync.storage.manifest import read_manifest

logger = logging.getLogger(__name__)


def read_iteration(root: str | Path, kind: Kind) -> int | None:
    """The step that the iteration file names; None if it is missing, empty or torn."""
    try:
        text = (Path(root) / ITERATION_FILES[kind]).read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return int(text) if text.isascii() and text.isdigit() else None


def advance_iteration(root: str | Path, kind: Kind, run: int, step: int) -> bool:
    """Point the iteration file at a committed step, unless it points at a newer one already.

    Returns:
        Whether the file names ``step`` now.
    """
    path = Path(root) / ITERATION_FILES[kind]
    current = read_iteration(root, kind)
    if current is None:
        if path.exists():
            logger.warning("iteration file %s was empty or torn and is written anew", path)
    elif is_announced(root, kind, run, step):
        return current == step
    replace_file(path, str(step))
    return True


def is_announced(root: str | Path, kind: Kind, run: int, step: int) -> bool:
    """Whether the iteration file names this step, or one that counts as newer."""
    current = read_iteration(root, kind)
    return current is not None and (_run_of(root, current), current) >= (run, step)


def _run_of(root: str | Path, step: int) -> int:
    """Run that committed ``step``; 0 if none did, as for a checkpoint of another system."""
    try:
        manifest = read_manifest(root, step)
    except ManifestError:
        manifest = None
    return manifest.run if manifest else 0
