"""Prune: remove the steps of a root that no policy keeps, each of them completely.

First the steps to remove are planned (`planner`), from policies and from what is on disk. Then each
step is checked again, under the commit lock and the removal lock: it is not in use, and a newer
step is valid. It is renamed to ``.trinity_sync/trash``, and its files are removed afterwards,
without a lock. So a crash leaves a step as it was committed, or no step. The next prune removes
what a crash left in the trash.

A record of another release keeps every step that it may be about.
"""

import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from trinity_sync.errors import (
    CommitError,
    FormatError,
    ManifestError,
    SpoolError,
    SupersededError,
)
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, make_folder, sync_folder
from trinity_sync.fs.clock import read_file_system_time
from trinity_sync.fs.locks import LONG_S, TRASH_LOCK, acquire_commit_lock, acquire_file_lock
from trinity_sync.layout import KINDS, PRIVATE_FOLDER, job_id, step_folder, steps_on_disk
from trinity_sync.retention.planner import (
    Removal,
    RemovalPlan,
    Rules,
    StepOutcome,
    list_outcomes,
    make_step_info,
    plan_removals,
)
from trinity_sync.retention.policies import StepInfo
from trinity_sync.retention.quarantine import prune_quarantine
from trinity_sync.snapshot.callable_status import read_statuses
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.block_reuse import can_reuse_blocks, remove_folder
from trinity_sync.storage.discovery import (
    iter_committed_steps,
    read_manifest_state,
    require_committed,
)
from trinity_sync.storage.export_requests import list_steps_awaiting_export, remove_export_files
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.leases import acquire_removal_lock
from trinity_sync.storage.manifest import read_manifest, read_run_number
from trinity_sync.storage.metrics import read_metrics, remove_metrics
from trinity_sync.storage.pins import list_steps_in_use
from trinity_sync.storage.required_remote import needs_replication
from trinity_sync.storage.runs import (
    Lineage,
    build_lineage,
    find_newest_run,
    list_runs,
    refuse_superseded,
)

logger = logging.getLogger(__name__)

IN_FLIGHT_S = 3600.0
"""Maximum age in seconds of a temporary file that shows a save in flight."""
NOT_REPLICATED = "the required remote does not have it yet"
SAVING = "a save of it is in flight"
LINKED = "its folder is a symbolic link; remove it by hand"


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
    on_removed: Callable[[list[int]], object] = lambda _steps: None,
) -> Pruned:
    """Remove the steps of a root, and the folders in quarantine, that no policy keeps.

    Args:
        root: the job's root.
        rules: the policies.
        now: seconds since the epoch, for the policies.
        spool: this node's spool, whose images may need the files of a step.
        recycle: keep large files of removed steps for block reuse, as in the settings.
        dry_run: plan only, and change nothing.
        on_removed: called with the removed steps, e.g. to update the catalog.

    Raises:
        ConfigError: a policy by itself keeps no step of its type, or names an unknown metric.
        OSError, CommitError, LockTimeoutError: as `remove_steps`.
    """
    plan = plan_removals(list_step_infos(root), rules, now)
    quarantine = prune_quarantine(root, rules.quarantine, now, dry_run=dry_run)
    if dry_run:
        return Pruned(Path(root), plan, None, quarantine)
    removal = remove_steps(root, plan, spool=spool, recycle=can_reuse_blocks(root, recycle))
    pruned = Pruned(Path(root), plan, removal, quarantine)
    on_removed(pruned.removed)
    return pruned


def list_step_infos(root: str | Path) -> list[StepInfo]:
    """Return all steps with a readable manifest, oldest first; prune removes no others."""
    held = _list_held(root)
    try:
        lineage = build_lineage(list_runs(root), partial(read_run_number, root))
    except FormatError:  # `_list_held` keeps all steps then
        lineage = Lineage(frozenset())
    found = []
    for manifest in iter_committed_steps(root):
        corruption = read_manifest_state(root, manifest, runs=()).reason
        metrics: dict[str, float] = {}
        try:
            metrics = read_metrics(root, manifest.run, manifest.step)
            if not corruption and needs_replication(root, manifest):
                held[manifest.step].append(NOT_REPLICATED)
        except FormatError as error:
            held[manifest.step].append(str(error))
        if step_folder(root, manifest.step).is_symlink():
            held[manifest.step].append(LINKED)
        found.append(
            make_step_info(
                manifest,
                metrics=metrics,
                held=held[manifest.step],
                corruption=corruption,
                superseded_by=lineage.supersedes(manifest.run),
            )
        )
    return sorted(found, key=lambda each: each.age)


def remove_steps(
    root: str | Path,
    plan: RemovalPlan,
    *,
    spool: Path | None = None,
    recycle: bool = True,
) -> Removal:
    """Carry out a plan, as far as it is still valid, and empty the trash.

    Other prunes, saves and readers may run meanwhile.

    Args:
        root: the job's root.
        plan: plan for this root.
        spool: this node's spool, whose images may need the files of a step.
        recycle: keep large files for block reuse, as many bytes as the newest checkpoint has.

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
                reason = _find_reason_to_keep(Path(root), each, plan, job)
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


def _list_held(root: str | Path) -> dict[int, list[str]]:
    """Return the steps that must be kept whatever the policies say, with reasons."""
    held = list_steps_in_use(root)
    for step, roles in list_steps_awaiting_export(root).items():
        held[step].append(f"the export of the model of {', '.join(roles)} is pending")
    for kind in KINDS:
        if (pointed := read_latest_pointer(root, kind)) is not None:
            held[pointed].append(f"the latest pointer of {kind}s names it")
    try:
        run = find_newest_run(root)
    except FormatError as error:
        for step in steps_on_disk(root):
            held[step].append(str(error))
        return held
    pointed = read_latest_pointer(root, "checkpoint")
    latest = 0 if pointed is None else read_run_number(root, pointed)
    if run and run.resumed_from and latest < run.number:
        held[run.resumed_from].append(f"run {run.number} resumed from it and has no checkpoint yet")
    return held


def _find_reason_to_keep(
    root: Path, planned: StepInfo, plan: RemovalPlan, spool: JobSpool | None
) -> str | None:
    """Return why a planned step must be kept; None if it may be removed, empty if it is gone."""
    try:
        manifest = read_manifest(root, planned.step)
    except ManifestError as error:
        return str(error)
    if manifest is None:
        return ""
    planned_commit = (planned.run, planned.kinds, planned.committed_at)
    if (manifest.run, manifest.kinds, manifest.committed_at) != planned_commit:
        return "it was committed again meanwhile"
    if held := _list_held(root)[planned.step]:
        return "; ".join(held)
    if needs_replication(root, manifest):
        return NOT_REPLICATED
    if step_folder(root, planned.step).is_symlink():
        return LINKED
    if saving := _find_save_in_flight(root, planned, spool):
        return saving
    for kind in manifest.kinds:
        successor = plan.newest[kind]
        try:
            found = require_committed(root, successor.step)
        except CommitError as error:
            return f"the newer step {successor.step} is not valid: {error}"
        if (found.run, found.step) <= planned.age or kind not in found.kinds:
            return f"step {successor.step} is no longer newer"
    return None


def _find_save_in_flight(root: Path, planned: StepInfo, spool: JobSpool | None) -> str:
    """Return which other save of the step, by any run, may need its files; empty if none.

    A ticket that cannot be read keeps the step that it names, because another release may commit
    its image. Without a step, its image cannot be committed, so it keeps nothing.

    Raises:
        FormatError: another release has written a callable status of the step, or has begun a run.
    """
    for path in step_folder(root, planned.step).rglob(f".*{TEMPORARY_SUFFIX}"):
        with suppress(FileNotFoundError):  # renamed or removed meanwhile
            if path.lstat().st_mtime > read_file_system_time(root) - IN_FLIGHT_S:
                return SAVING
    if spool is None:
        return ""
    sealed, unreadable = spool.tickets()
    for ticket in (image.ticket for image in sealed):
        if ticket.step == planned.step and not _is_superseded(
            root, ticket.run, ticket.run_key, ticket.step
        ):
            return SAVING
    for error in unreadable:
        superseded = error.run is not None and _is_superseded(root, error.run, "", planned.step)
        if error.step == planned.step and not superseded:
            return f"the spool may have an image of it: {error}"
    newest = find_newest_run(root)
    runs = {planned.run, newest.number if newest else planned.run}
    try:
        for run in runs:
            for kind in KINDS:
                statuses = read_statuses(spool, run, planned.step, kind)
                if any(status.state != "failed" for status in statuses):
                    return SAVING
    except SpoolError as error:
        return str(error)
    return ""


def _is_superseded(root: Path, run: int, run_key: str, step: int) -> bool:
    """Return whether a later run has superseded the step of an image."""
    try:
        refuse_superseded(root, run, run_key, step)
    except SupersededError:
        return True
    return False


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
