"""Quarantine: the folder of steps that a rewind or a new run displaced, kept instead of removed.

::

    root/.trinity_sync/quarantine/20260102T030405Z/
      global_step_50/                   unchanged; rename it back to undo

A rewind quarantines the steps newer than its target, in a folder of its own. A run that began at
step 0 although the root had steps quarantines each step that its commits replace, in a folder
named after the time at which it began, because its user may have forgotten to load or named the
root of another training. Steps replaced by a run that loaded a step are removed.
"""

import logging
import time
from contextlib import suppress
from pathlib import Path

from trinity_sync.errors import ManifestError
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, make_folder, sync_folder
from trinity_sync.layout import PRIVATE_FOLDER, step_folder
from trinity_sync.storage.block_reuse import remove_folder
from trinity_sync.storage.manifest import read_manifest, read_run_number
from trinity_sync.storage.runs import read_fresh_start_time

logger = logging.getLogger(__name__)

TIME_FORMAT = "%Y%m%dT%H%M%SZ"


def quarantine_folder(root: str | Path) -> Path:
    """Return the folder that has a quarantine folder for each rewind or run."""
    return Path(root) / PRIVATE_FOLDER / "quarantine"


def replacing_folder(root: str | Path) -> Path:
    """Return the folder for steps that replace others; a replaced step moves there."""
    return Path(root) / PRIVATE_FOLDER / "replacing"


def fetching_folder(root: str | Path) -> Path:
    """Return the folder in which steps are downloaded from a remote."""
    return Path(root) / PRIVATE_FOLDER / "fetching"


def clear_replaced_step(root: str | Path, step: int, *, keep: int = 0) -> Path | None:
    """Quarantine or remove the replaced step in `replacing_folder`. Call it under the commit lock.

    Return its path in quarantine; None if it was removed by `remove_folder`, which gets ``keep``.

    Raises:
        FormatError: another release has committed it; it stays.
    """
    folder = step_folder(replacing_folder(root), step)
    require_readable_step(replacing_folder(root), step)
    before, now = read_run_number(replacing_folder(root), step), read_run_number(root, step)
    if 0 < before < now and (began := read_fresh_start_time(root, now)):
        place = step_folder(_timed_folder(root, began), step)
        if not place.exists():
            make_folder(place.parent)
            for path in folder.rglob(f".*{TEMPORARY_SUFFIX}"):  # files of the replacing save
                path.unlink()
            folder.rename(place)
            sync_folder(place.parent)
            return place
    remove_folder(root, folder, keep=keep)
    return None


def displaced_folder(root: str | Path, step: int) -> Path:
    """Return the path of a step that made way for save functions; `gc.remove_replaced` knows it."""
    folder = step_folder(replacing_folder(root), step)
    return folder.with_name(f"{folder.name}.replaced")


def clear_displaced_step(root: str | Path, step: int, *, keep: int = 0) -> None:
    """Do as `clear_replaced_step` with the step in `displaced_folder`, if there is one."""
    moved, folder = displaced_folder(root, step), step_folder(replacing_folder(root), step)
    if not moved.exists() and not moved.is_symlink():
        return
    if folder.exists() or folder.is_symlink():
        clear_replaced_step(root, step)
    moved.rename(folder)
    clear_replaced_step(root, step, keep=keep)


def make_quarantine_folder(root: Path, now: float) -> Path:
    """Create a new quarantine folder and return its path; ``now`` is in seconds since the epoch."""
    folder = _timed_folder(root, now)
    while folder.exists():
        folder = folder.with_name(folder.name + "_")
    make_folder(folder)
    return folder


def require_readable_step(root: Path, step: int) -> None:
    """Require that this release can read the manifest, if any, of a step in the folder ``root``.

    Raises:
        FormatError: another release has committed the step.
    """
    with suppress(ManifestError):
        read_manifest(root, step)


def _timed_folder(root: str | Path, at: float) -> Path:
    return quarantine_folder(root) / time.strftime(TIME_FORMAT, time.gmtime(at))
