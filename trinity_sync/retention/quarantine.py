"""Retention of steps in quarantine, by a policy as for committed steps."""

import calendar
import logging
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from trinity_sync.errors import FormatError
from trinity_sync.fs.atomic import make_folder, sync_folder
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.layout import KINDS, PRIVATE_FOLDER, steps_on_disk
from trinity_sync.retention.policies import Policy, StepInfo
from trinity_sync.storage.quarantine import TIME_FORMAT, quarantine_folder, require_readable_step

logger = logging.getLogger(__name__)


def prune_quarantine(
    root: str | Path,
    policy: Policy,
    now: float,
    *,
    dry_run: bool = False,
    only: Sequence[str] | None = None,
) -> list[str]:
    """Remove the folders in quarantine that a policy does not keep; return their sorted names.

    Each is renamed into ``.trinity_sync/trash``; the next `prune.remove_steps` removes its files. A
    folder with a step of another release is kept. For the policy, such as ``newer=30d`` or
    ``last=2``, a folder counts as a step of its time; ``now`` is in seconds since the epoch. With
    ``only``, folders of other names are kept.
    """
    quarantine, trash = quarantine_folder(root), Path(root) / PRIVATE_FOLDER / "trash"
    if not quarantine.is_dir():
        return []
    with acquire_commit_lock(root) as lock:  # no rewind adds steps meanwhile
        folders = sorted(quarantine.iterdir(), key=lambda folder: folder.name)
        ages = [
            StepInfo(number, 0, KINDS, at, 0)
            for number, folder in enumerate(folders)
            if (at := _parse_time(folder)) is not None and _is_own_release(folder)
        ]
        kept = policy.keeps(ages, now)
        gone = [folders[each.step] for each in ages if each.step not in kept]
        gone = [folder for folder in gone if only is None or folder.name in only]
        if gone and not dry_run:
            make_folder(trash)
            for folder in gone:
                lock.require_held()
                folder.rename(trash / f"quarantine-{folder.name}.{uuid.uuid4().hex}")
            sync_folder(trash)
            sync_folder(quarantine)
    return [folder.name for folder in gone]


def _is_own_release(folder: Path) -> bool:
    """Return whether this release can read all steps in a folder."""
    try:
        for step in steps_on_disk(folder):
            require_readable_step(folder, step)
    except FormatError as error:
        logger.warning("keeping %s in quarantine: %s", folder, error)
        return False
    return True


def _parse_time(folder: Path) -> float | None:
    """Return the creation time in a folder's name; None if a user created the folder."""
    try:
        return calendar.timegm(time.strptime(folder.name.rstrip("_"), TIME_FORMAT))
    except ValueError:
        return None
