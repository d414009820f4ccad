"""Where steps go that are in somebody's way and that nobody asked to remove.

::

    root/.trinity_sync/aside/20260102T030405Z/
      global_step_50/                   as it was; rename it back to undo

A rewind sets aside what is newer than the step that it goes back to, a folder a rewind. A run that
began at step 0 although there were steps already sets aside what its own commits replace, in a
folder of the time when it began: whoever started it may have forgotten to load, or named the root
of another training. A run that loaded a step has said what it leaves behind; what that replaces is
removed.
"""

import calendar
import logging
import time
import uuid
from contextlib import suppress
from pathlib import Path

from trinity_sync.errors import FormatError, ManifestError
from trinity_sync.layout import KINDS, PRIVATE_FOLDER, step_folder, steps_on_disk
from trinity_sync.storage.durable import TEMPORARY_SUFFIX, make_folder, sync_folder
from trinity_sync.storage.locks import one_change_at_a_time
from trinity_sync.storage.manifest import read_manifest, run_of
from trinity_sync.storage.policies import Policy, StepInfo
from trinity_sync.storage.recycling import remove_folder
from trinity_sync.storage.runs import began_anew

logger = logging.getLogger(__name__)

_TIME = "%Y%m%dT%H%M%SZ"


def aside_folder(root: str | Path) -> Path:
    """Where all lies that was set aside, a folder a rewind or run."""
    return Path(root) / PRIVATE_FOLDER / "aside"


def replacing_folder(root: str | Path) -> Path:
    """Where a step is made that is to replace another one, and where that one lies afterwards."""
    return Path(root) / PRIVATE_FOLDER / "replacing"


def fetching_folder(root: str | Path) -> Path:
    """Where steps gather that are fetched from a store."""
    return Path(root) / PRIVATE_FOLDER / "fetching"


def let_go_of_replaced(root: str | Path, step: int, *, keep: int = 0) -> Path | None:
    """Set aside or remove what lies in `replacing_folder` of a step; under the commit lock.

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
    _require_own_release(replacing_folder(root), step)
    before, now = run_of(replacing_folder(root), step), run_of(root, step)
    if 0 < before < now and (began := began_anew(root, now)):
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


def fresh_folder(root: Path, now: float) -> Path:
    """A new folder for what is set aside now."""
    folder = _folder_of(root, now)
    while folder.exists():
        folder = folder.with_name(folder.name + "_")
    make_folder(folder)
    return folder


def let_go_of_aside(
    root: str | Path, policy: Policy, now: float, *, dry_run: bool = False
) -> list[str]:
    """Take away what was set aside, as far as a policy does not keep it.

    What is let go of moves to ``.trinity_sync/trash`` in one rename each; its files go with the
    next `retention.carry_out`. A folder with a step of another release stays.

    Args:
        root: the job's root.
        policy: such as ``newer=30d`` or ``last=2``; a folder counts as a step of its time.
        now: seconds since the epoch.
        dry_run: touch nothing.

    Returns:
        Names of the folders, oldest first.
    """
    aside, trash = aside_folder(root), Path(root) / PRIVATE_FOLDER / "trash"
    if not aside.is_dir():
        return []
    with one_change_at_a_time(root) as lock:  # no rewind fills one meanwhile
        folders = sorted(aside.iterdir(), key=lambda folder: folder.name)
        ages = [
            StepInfo(number, 0, KINDS, at, 0)
            for number, folder in enumerate(folders)
            if (at := _time_of(folder)) is not None and _is_own_release(folder)
        ]
        kept = policy.keeps(ages, now)
        gone = [folders[each.step] for each in ages if each.step not in kept]
        if gone and not dry_run:
            make_folder(trash)
            for folder in gone:
                lock.require_ours()
                folder.rename(trash / f"aside-{folder.name}.{uuid.uuid4().hex}")
            sync_folder(trash)
            sync_folder(aside)
    return [folder.name for folder in gone]


def _require_own_release(root: Path, step: int) -> None:
    """See that this release can read what a step consists of, if it was committed.

    Raises:
        FormatError: another release has committed it.
    """
    with suppress(ManifestError):
        read_manifest(root, step)


def _is_own_release(folder: Path) -> bool:
    """Whether `_require_own_release` of all steps in a folder."""
    try:
        for step in steps_on_disk(folder):
            _require_own_release(folder, step)
    except FormatError as error:
        logger.warning("%s stays: %s", folder, error)
        return False
    return True


def _time_of(folder: Path) -> float | None:
    """When it was made; None for a folder of another name, which is somebody's own."""
    try:
        return calendar.timegm(time.strptime(folder.name.rstrip("_"), _TIME))
    except ValueError:
        return None


def _folder_of(root: str | Path, at: float) -> Path:
    return aside_folder(root) / time.strftime(_TIME, time.gmtime(at))
