"""Prune: remove the steps of a root that no policy keeps, each of them completely.

First the steps to remove are planned (`planner`), from policies and from what is on disk. Then each
step is checked again, under the commit lock and the removal lock: it is not in use, and a newer
step is valid. It is renamed to ``.trinity_sync/trash``, and its files are removed afterwards,
without a lock. So a crash leaves a step as it was committed, or no step. The next prune removes
what a crash left in the trash.

Nothing is removed from a root of another release, or with a run or a spool of one.

Steps in quarantine have a policy of their own.
"""

import calendar
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trinity_sync.errors import FormatError
from trinity_sync.fs.atomic import make_folder, sync_folder
from trinity_sync.fs.locks import LONG_S, TRASH_LOCK, acquire_commit_lock, acquire_file_lock
from trinity_sync.layout import KINDS, PRIVATE_FOLDER, step_folder, steps_on_disk
from trinity_sync.retention.planner import (
    Removal,
    RemovalPlan,
    Rules,
    StepOutcome,
    list_outcomes,
    plan_removals,
)
from trinity_sync.retention.policies import Policy, StepInfo
from trinity_sync.retention.step_infos import find_reason_to_keep, list_step_infos
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.block_reuse import can_reuse_blocks, remove_folder
from trinity_sync.storage.export_requests import remove_export_files
from trinity_sync.storage.leases import acquire_removal_lock
from trinity_sync.storage.metrics import remove_metrics
from trinity_sync.storage.quarantine import TIME_FORMAT, quarantine_folder, require_readable_step

logger = logging.getLogger(__name__)

JUST_COMMITTED = "its save, just committed, removes the others"


@dataclass(frozen=True)
class Pruned:
    """Result of prune for a root."""

    root: Path
    plan: RemovalPlan
    removal: Removal | None
    """None for a dry run."""
    quarantine: list[str]
    """Names of the folders in quarantine that were or would be removed, oldest first."""

    @property
    def nbytes(self) -> int:
        """Bytes that were or would be freed, without those in quarantine."""
        return (self.removal or self.plan).nbytes

    @property
    def removed(self) -> list[int]:
        """Steps that were or would be removed."""
        return [each.step for each in (self.removal or self.plan).removed]

    @property
    def outcomes(self) -> list[StepOutcome]:
        """Outcome of every step, oldest first."""
        return list_outcomes(self.plan, self.removal)


def prune(
    root: str | Path,
    rules: Rules,
    now: float,
    *,
    spool: Path | None = None,
    recycle: bool | Literal["always"] = True,
    dry_run: bool = False,
    confirmed: Pruned | None = None,
    just_committed: int | None = None,
    on_removed: Callable[[list[int]], object] = lambda _steps: None,
) -> Pruned:
    """Remove the steps of a root, and the folders in quarantine, that no policy keeps.

    ``now`` is in seconds since the epoch. ``spool`` is as in `remove_steps`, ``recycle`` as in the
    settings. ``confirmed`` is the result of a dry run: nothing else is removed, whatever has
    changed since then. The step ``just_committed``, whose save requests this, is kept.
    ``on_removed`` is called with the removed steps, e.g. to update the catalog.

    Raises:
        ConfigError: a policy by itself keeps no step of its type, or names an unknown metric.
        OSError, CommitError, LockTimeoutError: as `remove_steps`.
    """
    steps = [
        replace(each, held=(*each.held, JUST_COMMITTED)) if each.step == just_committed else each
        for each in ([] if confirmed else list_step_infos(root))
    ]
    plan = confirmed.plan if confirmed else plan_removals(steps, rules, now)
    only = confirmed.quarantine if confirmed else None
    quarantine = prune_quarantine(root, rules.quarantine, now, dry_run=dry_run, only=only)
    if dry_run:
        return Pruned(Path(root), plan, None, quarantine)
    removal = remove_steps(root, plan, spool=spool, recycle=can_reuse_blocks(root, recycle))
    pruned = Pruned(Path(root), plan, removal, quarantine)
    on_removed(pruned.removed)
    return pruned


def remove_steps(
    root: str | Path,
    plan: RemovalPlan,
    *,
    spool: Path | None = None,
    recycle: bool = True,
) -> Removal:
    """Carry out a plan, as far as it is still valid, and empty the trash.

    Other prunes, saves and readers may run meanwhile. Images in ``spool``, this node's, may need
    the files of a step. ``recycle`` keeps large files for block reuse, as many bytes as the largest
    of the newest steps has.

    Raises:
        OSError: a step cannot be removed; earlier steps of the plan are removed.
        CommitError: this node lost a lock to another node; earlier steps of the plan are removed.
        LockTimeoutError: another process holds a lock for too long; earlier steps of the plan are
            removed.
    """
    result = Removal()
    job = JobSpool(spool / job_id(root)) if spool else None
    for error in job.tickets()[1] if job else []:
        logger.warning("pruning %s without this image: %s", root, error)
    for each in plan.removed:
        with acquire_commit_lock(root) as changes, acquire_removal_lock(root) as removal:
            try:
                reason = find_reason_to_keep(Path(root), each, plan, job)
            except FormatError as error:
                reason = str(error)
            if reason:
                result.spared.append((each, reason))
            elif reason is None:
                for lock in (changes, removal):
                    lock.require_held()
                _move_to_trash(Path(root), each.step)
                result.removed.append(each)
    largest = max((each.nbytes for each in plan.newest.values()), default=0)
    _empty_trash(Path(root), keep=largest if recycle else 0)
    for each in result.removed:
        remove_metrics(root, each.step)
        remove_export_files(root, each.step)
    return result


def _move_to_trash(root: Path, step: int) -> None:
    trash = root / PRIVATE_FOLDER / "trash"
    make_folder(trash)
    folder = step_folder(root, step)
    folder.rename(trash / f"{folder.name}.{uuid.uuid4().hex}")
    sync_folder(trash)  # the new name first: after a power cut it may have both, never none
    sync_folder(root)


def _empty_trash(root: Path, *, keep: int) -> None:
    """Remove the folders in the trash, one process at a time."""
    trash = root / PRIVATE_FOLDER / "trash"
    if not trash.is_dir():
        return
    with acquire_file_lock(trash.parent / TRASH_LOCK, limit_s=LONG_S):
        for folder in trash.iterdir():
            remove_folder(root, folder, keep=keep)


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
