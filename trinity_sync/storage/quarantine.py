"""Quarantine: where steps go that are in the way and that nobody asked to remove.

::

    root/.trinity_sync/quarantine/20260102T030405Z/
      global_step_50/                   as it was; rename it back to undo

A rewind quarantines what is newer than the step that it goes back to, a folder a rewind. A run that
began at step 0 although there were steps already quarantines what its own commits replace, in a
folder of the time when it began: whoever started it may have forgotten to load, or named the root
of another training. A run that loaded a step has said what it leaves behind; what that replaces is
removed.
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
from trinity_sync.storage.runs import fresh_start_time

logger = logging.getLogger(__name__)

TIME_FORMAT = "%Y%m%dT%H%M%SZ"


def quarantine_folder(root: str | Path) -> Path:
    """Return the folder of all that is in quarantine, a folder a rewind or run."""
    return Path(root) / PRIVATE_FOLDER / "quarantine"


def replacing_folder(root: str | Path) -> Path:
    """Where a step is made that is to replace another one, and where that one lies afterwards."""
    return Path(root) / PRIVATE_FOLDER / "replacing"


def fetching_folder(root: str | Path) -> Path:
    """Where steps gather that are fetched from a store."""
    return Path(root) / PRIVATE_FOLDER / "fetching"


def clear_replaced(root: str | Path, step: int, *, keep: int = 0) -> Path | None:
    """Quarantine or remove what lies in `replacing_folder` of a step; under the commit lock.

    Args:
        root: the job's root.
        step: which one.
        keep: bytes of files to keep for the next saves, if it is removed.

    Returns:
        Where it lies now; None if it was removed.

    Raises:
        FormatError: another release has committed it; it stays.
    """
    folder = step_folder(replacing_folder(root), step)
    require_own_release(replacing_folder(root), step)
    before, now = read_run_number(replacing_folder(root), step), read_run_number(root, step)
    if 0 < before < now and (began := fresh_start_time(root, now)):
        place = step_folder(_folder_of(root, began), step)
        if not place.exists():
            make_folder(place.parent)
            for path in folder.rglob(f".*{TEMPORARY_SUFFIX}"):  # of the save that replaced it
                path.unlink()
            folder.rename(place)
            sync_folder(place.parent)
            return place
    remove_folder(root, folder, keep=keep)
    return None


def make_quarantine_folder(root: Path, now: float) -> Path:
    """Make a new folder in quarantine.

    Args:
        root: the job's root.
        now: seconds since the epoch, of which it has its name.
    """
    folder = _folder_of(root, now)
    while folder.exists():
        folder = folder.with_name(folder.name + "_")
    make_folder(folder)
    return folder


def require_own_release(root: Path, step: int) -> None:
    """See that this release can read what a step consists of, if it was committed.

    Raises:
        FormatError: another release has committed it.
    """
    with suppress(ManifestError):
        read_manifest(root, step)


def _folder_of(root: str | Path, at: float) -> Path:
    return quarantine_folder(root) / time.strftime(TIME_FORMAT, time.gmtime(at))
