"""Prune: remove the steps of a root that no policy keeps, each of them completely.

First the steps to remove are planned, from policies and from what is on disk. Then each step is
checked again, under the commit lock and the removal lock (`removal`). It is renamed to
``.trinity_sync/trash``, and its files are removed afterwards, without a lock. So a crash leaves a
step as it was committed, or no step. The next prune removes what a crash left in the trash.

Of a step that is reduced to its weights, the manifest is replaced by one that names these alone,
and then its other files are moved to the trash. A crash in between leaves them unnamed in the
step's folder, and the next prune removes them.

A step is kept here, besides what keeps it everywhere, if the required remote lacks it, a save of
it is in flight, or its folder is a link. Nothing is removed from a root of another release, or with
a run or a spool of one.

Steps in quarantine have a policy of their own.
"""

import calendar
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

from trinity_sync.errors import SpoolError
from trinity_sync.fs.atomic import NO_ROOM, list_paths, make_folder, move, sync_folder
from trinity_sync.fs.file_system import read_file_system_time
from trinity_sync.fs.locks import LONG_S, TRASH_LOCK, acquire_commit_lock, acquire_file_lock
from trinity_sync.layout import KINDS, PRIVATE_FOLDER, step_folder
from trinity_sync.retention.policies import Policy, StepInfo
from trinity_sync.retention.removal import (
    RemovalPlan,
    Rules,
    carry_out,
    describe_steps,
    make_step_info,
    plan_removals,
    read_now,
)
from trinity_sync.snapshot.identity import SaveId, job_id
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.block_reuse import can_reuse_blocks, remove_folder, remove_spares
from trinity_sync.storage.discovery import (
    iter_committed_steps,
    list_removed_files,
    read_manifest_state,
)
from trinity_sync.storage.job_settings import needs_replication
from trinity_sync.storage.manifest import Manifest, read_manifest, write_manifest
from trinity_sync.storage.metrics import find_metrics, remove_metrics
from trinity_sync.storage.replace import TIME_FORMAT, quarantine_folder
from trinity_sync.storage.runs import find_newest_run, is_superseded
from trinity_sync.storage.save_functions import read_statuses
from trinity_sync.storage.save_timing import append_removal
from trinity_sync.storage.steps_in_use import acquire_removal_lock
from trinity_sync.storage.uncommitted import is_being_written, remove_export_files

logger = logging.getLogger(__name__)

IN_FLIGHT_S = 3600.0
"""Maximum age in seconds of a temporary file that shows a save in flight."""
EXPORT_HOLDS_S = 86_400.0
"""Seconds after its commit for which a step is kept for a requested export: a model that cannot be
exported must not fill the disk with its steps."""
NOT_REPLICATED = "the required remote is not known to have it"
SAVING = "a save of it is in flight"
LINKED = "its folder is a symbolic link; remove it by hand"


def plan_prune(
    root: str | Path, rules: Rules, now: float | None = None, *, just_committed: int | None = None
) -> RemovalPlan:
    """Plan which steps of a root, and which folders in quarantine, no policy keeps.

    ``now`` is in seconds since the epoch, None for `read_now`. The step ``just_committed``, whose
    save requests this, is kept.

    Raises:
        ConfigError: a policy by itself keeps no step of its type, or names an unknown metric.
    """
    steps = describe_steps(RootSteps(root), just_committed=just_committed)
    at = read_now(Path(root), rules) if now is None else now
    quarantine = list_prunable_quarantine(root, rules.quarantine, at)
    return replace(plan_removals(steps, rules, at), quarantine=tuple(quarantine))


def prune(
    root: str | Path,
    plan: RemovalPlan,
    *,
    spool: Path | None = None,
    recycle: bool | Literal["always"] = True,
) -> RemovalPlan:
    """Remove what was planned and nothing else, as far as it is still valid; return what was.

    Images in ``spool``, this node's, may need the files of a step. ``recycle``, as in the settings,
    keeps large files for block reuse, as many bytes as the largest of the newest steps has.

    Raises:
        OSError: something cannot be removed; all else is.
        CommitError, LockTimeoutError: as `carry_out`.
    """
    job = JobSpool(spool / job_id(root)) if spool else None
    for error in job.tickets()[1] if job else []:
        logger.warning("pruning %s without this image: %s", root, error)
    done = carry_out(RootSteps(root, job), plan)
    largest = max((each.nbytes for each in plan.newest.values()), default=0)
    keep, quarantine = largest if can_reuse_blocks(root, recycle) else 0, list[str]()
    with ExitStack() as parts:  # each is done, from the last to the first, whatever another raises
        parts.callback(_empty_trash, Path(root), keep=keep)
        parts.callback(lambda: quarantine.extend(remove_quarantined(root, plan.quarantine)))
        for each in done.removed:
            parts.callback(remove_metrics, root, each.step, each.run)
            parts.callback(remove_export_files, root, each.step)
    if done.error:
        raise done.error
    return replace(done, quarantine=tuple(quarantine))


class RootSteps:
    """The steps of a root, which are removed by a rename into its trash.

    Images in ``spool``, the job's on this node, may need the files of a step.
    """

    def __init__(self, root: str | Path, spool: JobSpool | None = None) -> None:
        self.root = Path(root)
        self._spool = spool

    def __str__(self) -> str:
        return str(self.root)

    def list_steps(self) -> Iterator[StepInfo]:
        """As `Place.list_steps`."""
        return map(self._describe, iter_committed_steps(self.root))

    def read_step(self, step: int) -> StepInfo | None:
        """As `Place.read_step`."""
        manifest = read_manifest(self.root, step)
        return self._describe(manifest) if manifest else None

    def remove_step(self, step: StepInfo, find_reason: Callable[[], str], *, reduce: bool) -> str:
        """As `Place.remove_step`, under the commit lock and the removal lock.

        Raises:
            CommitError: this node lost a lock to another node.
            LockTimeoutError: another process holds a lock for too long.
        """
        with acquire_commit_lock(self.root) as changes, acquire_removal_lock(self.root) as removal:
            why = find_reason() or _find_save_in_flight(self.root, step, self._spool)
            if not why:
                for lock in (changes, removal):
                    lock.require_held()
            if not why and reduce:
                try:
                    _reduce_to_weights(self.root, step.step, changes.require_held)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    remove_spares(self.root)
                    _empty_trash(self.root, keep=0)  # which makes room for the manifest
                    _reduce_to_weights(self.root, step.step, changes.require_held)
            elif not why:
                _move_to_trash(self.root, step_folder(self.root, step.step))
                append_removal(self.root, step.run, step.step, time.time())
            return why

    def _describe(self, manifest: Manifest) -> StepInfo:
        corruption = read_manifest_state(self.root, manifest, runs=()).reason
        metrics, problem = find_metrics(self.root, manifest.run, manifest.step)
        held = [problem] if problem else []  # it may be the best
        if not corruption and needs_replication(self.root, manifest):
            held.append(NOT_REPLICATED)
        if roles := list_pending_exports(self.root, manifest):
            held.append(f"the export of the model of {', '.join(roles)} is pending")
        if step_folder(self.root, manifest.step).is_symlink():
            held.append(LINKED)
        found = make_step_info(manifest, metrics=metrics, held=held, corruption=corruption)
        left = [path for path in list_removed_files(self.root, manifest) if path.exists()]
        return replace(found, resume_nbytes=sum(p.stat().st_size for p in left)) if left else found


def list_pending_exports(root: str | Path, manifest: Manifest) -> list[str]:
    """Return the roles whose export keeps a step: it is neither done nor failed, nor a day old."""
    roles = [r for r in manifest.list_missing_exports() if r not in manifest.failed_exports]
    ends_at = manifest.committed_at + EXPORT_HOLDS_S
    return roles if roles and read_file_system_time(root) < ends_at else []


def _find_save_in_flight(root: Path, planned: StepInfo, spool: JobSpool | None) -> str:
    """Return which other save of the step, by any run, may need its files; empty if none.

    A ticket that cannot be read keeps the step that it names. Without a step, it keeps nothing.

    Raises:
        FormatError: another release has begun a run or made ``spool``.
    """
    if is_being_written(root, planned.step, within_s=IN_FLIGHT_S):
        return SAVING
    if spool is None:
        return ""
    sealed, unreadable = spool.tickets()
    for ticket in (image.ticket for image in sealed):
        known = root, ticket.run, ticket.step, ticket.run_key
        if ticket.step == planned.step and not is_superseded(*known):
            return SAVING
    for error in unreadable:
        superseded = error.run is not None and is_superseded(root, error.run, planned.step)
        if error.step == planned.step and not superseded:
            return f"the spool may have an image of it: {error}"
    newest = find_newest_run(root)
    runs = {planned.run, newest.number if newest else planned.run}
    try:
        for run in runs:
            for kind in KINDS:
                save = SaveId(str(root), run, "", planned.step, kind, ())
                if any(status.state != "failed" for status in read_statuses(spool, save)):
                    return SAVING
    except SpoolError as error:
        return str(error)
    return ""


def _move_to_trash(root: Path, folder: Path) -> None:
    """Rename a folder of a root into the trash, durably."""
    trash = root / PRIVATE_FOLDER / "trash"
    make_folder(trash)
    move(folder, trash / f"{folder.name}.{uuid.uuid4().hex}")
    sync_folder(trash)  # the new name first: after a power cut it may have both, never none
    sync_folder(folder.parent)


def _reduce_to_weights(root: Path, step: int, require_lock: Callable[[], object]) -> None:
    """Remove what only a resume needs of a step, or what a crash has left of that.

    The new manifest comes first: from then on, the files are no part of the step.
    """
    manifest = read_manifest(root, step)
    assert manifest  # it was read just now, under the same locks
    if (kept := manifest.keep_weights()) is not manifest:
        write_manifest(root, kept)
    left = list_removed_files(root, kept)
    trash = root / PRIVATE_FOLDER / "trash" / f"{step_folder(root, step).name}.{uuid.uuid4().hex}"
    make_folder(trash)
    for number, path in enumerate(left):
        require_lock()
        move(path, trash / str(number))
    for folder in {path.parent for path in left}:
        sync_folder(folder)


def _empty_trash(root: Path, *, keep: int) -> None:
    """Remove the folders in the trash, one process at a time."""
    trash = root / PRIVATE_FOLDER / "trash"
    if not trash.is_dir():
        return
    with acquire_file_lock(trash.parent / TRASH_LOCK, limit_s=LONG_S), ExitStack() as removals:
        for folder in trash.iterdir():  # all, also if one cannot be removed
            removals.callback(remove_folder, root, folder, keep=keep)


def list_prunable_quarantine(root: str | Path, policy: Policy, now: float | str) -> list[str]:
    """Return the sorted names of the folders in quarantine that a policy does not keep.

    For the policy, such as ``newer=30d`` or ``last=2``, a folder counts as a step of its time;
    ``now`` is that of `Policy.keeps`.
    """
    folders = list_paths(quarantine_folder(root), "*")
    ages = [
        StepInfo(number, 0, KINDS, at, 0)
        for number, folder in enumerate(folders)
        if (at := _parse_time(folder)) is not None
    ]
    kept = policy.keeps(ages, now)
    return [folders[each.step].name for each in ages if each.step not in kept]


def remove_quarantined(root: str | Path, names: Sequence[str]) -> list[str]:
    """Rename folders in quarantine into the trash, which `prune` empties next.

    Return the names of those that were there.
    """
    if not names:
        return []
    folders = map(quarantine_folder(root).joinpath, names)
    with acquire_commit_lock(root) as lock, ExitStack() as moves:  # no rewind adds steps meanwhile
        gone = [folder for folder in folders if folder.is_dir()]

        def move_held(folder: Path) -> None:
            lock.require_held()
            _move_to_trash(Path(root), folder)

        for folder in gone:  # all, also if one cannot be moved
            moves.callback(move_held, folder)
    return [folder.name for folder in gone]


def _parse_time(folder: Path) -> float | None:
    """Return the creation time in a folder's name; None if a user created the folder."""
    try:
        return calendar.timegm(time.strptime(folder.name.rstrip("_"), TIME_FORMAT))
    except ValueError:
        return None
