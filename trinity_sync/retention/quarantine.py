"""How long steps stay in quarantine: by a policy, as committed steps do."""

import calendar
import logging
import time
import uuid
from pathlib import Path

from trinity_sync.errors import FormatError
from trinity_sync.fs.atomic import make_folder, sync_folder
from trinity_sync.fs.locks import one_change_at_a_time
from trinity_sync.layout import KINDS, PRIVATE_FOLDER, steps_on_disk
from trinity_sync.retention.policies import Policy, StepInfo
from trinity_sync.storage.quarantine import TIME_FORMAT, quarantine_folder, require_own_release

logger = logging.getLogger(__name__)


def prune_quarantine(
    root: str | Path, policy: Policy, now: float, *, dry_run: bool = False
) -> list[str]:
    """Remove the folders in quarantine that a policy does not keep.

    Each moves to ``.trinity_sync/trash`` in one rename; its files go with the next
    `prune.remove_steps`. A folder with a step of another release stays.

    Args:
        root: the job's root.
        policy: such as ``newer=30d`` or ``last=2``; a folder counts as a step of its time.
        now: seconds since the epoch.
        dry_run: touch nothing.

    Returns:
        Names of the folders, oldest first.
    """
    quarantine, trash = quarantine_folder(root), Path(root) / PRIVATE_FOLDER / "trash"
    if not quarantine.is_dir():
        return []
    with one_change_at_a_time(root) as lock:  # no rewind fills one meanwhile
        folders = sorted(quarantine.iterdir(), key=lambda folder: folder.name)
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
                folder.rename(trash / f"quarantine-{folder.name}.{uuid.uuid4().hex}")
            sync_folder(trash)
            sync_folder(quarantine)
    return [folder.name for folder in gone]


def _is_own_release(folder: Path) -> bool:
    """Whether `require_own_release` of all steps in a folder."""
    try:
        for step in steps_on_disk(folder):
            require_own_release(folder, step)
    except FormatError as error:
        logger.warning("%s stays: %s", folder, error)
        return False
    return True


def _time_of(folder: Path) -> float | None:
    """When it was made; None for a folder of another name, which is somebody's own."""
    try:
        return calendar.timegm(time.strptime(folder.name.rstrip("_"), TIME_FORMAT))
    except ValueError:
        return None
