"""Retention: remove the steps of a root that no policy keeps, never half of one.

First a plan (`planner`), from policies and from what is on disk; nothing is touched. Then each step
on its own, under the locks of commits and removals: it is checked again that the step is not in use
and that a newer one is valid; then it loses its name in one rename to ``.trinity_sync/trash``. Its
files are removed afterwards, without a lock, so a crash at any point leaves the step as it was
committed, or no step. What a crash left in the trash goes with the next retention.

A record of another release holds every step that it may be about; what it says is never guessed.
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
from trinity_sync.fs.clock import file_time
from trinity_sync.fs.locks import LONG_S, TRASH_LOCK, file_lock, one_change_at_a_time
from trinity_sync.layout import KINDS, PRIVATE_FOLDER, job_id, step_folder, steps_on_disk
from trinity_sync.retention.planner import (
    Removal,
    RemovalPlan,
    Rules,
    StepOutcome,
    describe_step,
    list_outcomes,
    plan_removals,
)
from trinity_sync.retention.policies import StepInfo
from trinity_sync.retention.quarantine import prune_quarantine
from trinity_sync.snapshot.callable_status import read_statuses
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.block_reuse import can_reuse_blocks, remove_folder
from trinity_sync.storage.discovery import committed_steps, manifest_state, require_committed
from trinity_sync.storage.export_requests import remove_export_files, steps_awaiting_export
from trinity_sync.storage.latest_pointer import read_iteration
from trinity_sync.storage.leases import removal_lock
from trinity_sync.storage.manifest import read_manifest, read_run_number
from trinity_sync.storage.metrics import read_metrics, remove_metrics
from trinity_sync.storage.pins import steps_in_use
from trinity_sync.storage.required_remote import must_be_sent
from trinity_sync.storage.runs import (
    Lineage,
    build_lineage,
    list_runs,
    newest_run,
    refuse_superseded,
)

logger = logging.getLogger(__name__)

UNDER_WAY_S = 3600.0
"""Age in seconds up to which a temporary file in a step's folder means that a save is writing."""
NOT_SENT = "the store, where it counts, does not have it yet"
SAVING = "a save of it is under way"
LINKED = "its folder is a symbolic link; remove it by hand"


@dataclass(frozen=True)
class Pruned:
    """What a retention made of a root."""

    root: Path
    plan: RemovalPlan
    removal: Removal | None
    """None for a dry run."""
    quarantine: list[str]
    """Names of the folders in quarantine that go too, oldest first."""

    @property
    def nbytes(self) -> int:
        """Bytes that it freed, or would free; without those in quarantine."""
        return (self.removal or self.plan).nbytes

    @property
    def removed(self) -> list[int]:
        """The steps that it removed, or would remove."""
        return [each.step for each in (self.removal or self.plan).removed]

    @property
    def outcomes(self) -> list[StepOutcome]:
        """What becomes of every step, oldest first."""
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
    """Remove the steps of a root, and the folders in quarantine, that no rule keeps.

    Args:
        root: the job's root.
        rules: what to keep.
        now: seconds since the epoch, by which policies reckon.
        spool: this node's spool, whose images may need a step's files.
        recycle: as in the settings; keep large files of removed steps for the next saves.
        dry_run: plan only, and touch nothing.
        on_removed: called with the steps that are gone; tells the catalog.

    Raises:
        ConfigError: a policy keeps none of several steps by itself, or names an unknown metric.
        OSError, CommitError, LockTimeoutError: as `remove_steps`.
    """
    plan = plan_removals(survey(root), rules, now)
    quarantine = prune_quarantine(root, rules.quarantine, now, dry_run=dry_run)
    if dry_run:
        return Pruned(Path(root), plan, None, quarantine)
    removal = remove_steps(root, plan, spool=spool, recycle=can_reuse_blocks(root, recycle))
    done = Pruned(Path(root), plan, removal, quarantine)
    on_removed(done.removed)
    return done


def survey(root: str | Path) -> list[StepInfo]:
    """Return all steps with a manifest that can be read, oldest first; others are not removed."""
    held = _held(root)
    try:
        line = build_lineage(list_runs(root), partial(read_run_number, root))
    except FormatError:  # holds all steps, see `_held`
        line = Lineage(frozenset())
    found = []
    for manifest in committed_steps(root):
        corruption = manifest_state(root, manifest, runs=()).reason
        metrics: dict[str, float] = {}
        try:
            metrics = read_metrics(root, manifest.run, manifest.step)
            if not corruption and must_be_sent(root, manifest):
                held[manifest.step].append(NOT_SENT)
        except FormatError as error:
            held[manifest.step].append(str(error))
        if step_folder(root, manifest.step).is_symlink():
            held[manifest.step].append(LINKED)
        found.append(
            describe_step(
                manifest,
                metrics=metrics,
                held=held[manifest.step],
                corruption=corruption,
                superseded_by=line.supersedes(manifest.run),
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
    """Remove what a plan says, as far as it is still true, and what an earlier crash left behind.

    Any number of retentions, saves and readers may be at work meanwhile.

    Args:
        root: the job's root.
        plan: of this root.
        spool: this node's spool, in which images may wait that need a step's files.
        recycle: keep large files for the next saves to write over, as many bytes as the newest
            checkpoint has.

    Raises:
        OSError: something cannot be removed; steps before it are gone.
        CommitError: this node was cut off, and another one may have its locks; likewise.
        LockTimeoutError: another process hangs with one of the locks; likewise.
    """
    done = Removal()
    job = JobSpool(spool / job_id(root)) if spool else None
    for error in job.tickets()[1] if job else []:
        logger.warning("retention of %s goes on without this image: %s", root, error)
    for each in plan.removed:
        with one_change_at_a_time(root) as changes, removal_lock(root) as removal:
            try:
                reason = _reason_to_stay(Path(root), each, plan, job)
            except FormatError as error:
                reason = str(error)
            if reason:
                done.spared.append((each, reason))
            elif reason is None:
                for lock in (changes, removal):
                    lock.require_ours()
                _take_name_away(Path(root), each.step)
                done.removed.append(each)
    largest = max((each.nbytes for each in plan.newest.values()), default=0)
    _empty_trash(Path(root), keep=largest if recycle else 0)
    for each in done.removed:
        remove_metrics(root, each.step)
        remove_export_files(root, each.step)
    return done


def _held(root: str | Path) -> dict[int, list[str]]:
    """Steps that somebody needs whatever policies say, with reasons."""
    held = steps_in_use(root)
    for step, roles in steps_awaiting_export(root).items():
        held[step].append(f"the model of {', '.join(roles)} is to be exported")
    for kind in KINDS:
        if (pointed := read_iteration(root, kind)) is not None:
            held[pointed].append(f"the iteration file of {kind}s names it")
    try:
        run = newest_run(root)
    except FormatError as error:
        for step in steps_on_disk(root):
            held[step].append(str(error))
        return held
    pointed = read_iteration(root, "checkpoint")
    at = 0 if pointed is None else read_run_number(root, pointed)
    if run and run.resumed_from and at < run.number:
        held[run.resumed_from].append(f"run {run.number} resumed from it and has no checkpoint yet")
    return held


def _reason_to_stay(
    root: Path, planned: StepInfo, plan: RemovalPlan, spool: JobSpool | None
) -> str | None:
    """Why a step may not go after all; None if it may, and an empty text if it is gone."""
    try:
        manifest = read_manifest(root, planned.step)
    except ManifestError as error:
        return str(error)
    if manifest is None:
        return ""
    planned_commit = (planned.run, planned.kinds, planned.committed_at)
    if (manifest.run, manifest.kinds, manifest.committed_at) != planned_commit:
        return "it was committed anew meanwhile"
    if held := _held(root)[planned.step]:
        return "; ".join(held)
    if must_be_sent(root, manifest):
        return NOT_SENT
    if step_folder(root, planned.step).is_symlink():
        return LINKED
    if saving := _save_under_way(root, planned, spool):
        return saving
    for kind in manifest.kinds:
        successor = plan.newest[kind]
        try:
            found = require_committed(root, successor.step)
        except CommitError as error:
            return f"its successor is not valid: {error}"
        if (found.run, found.step) <= planned.age or kind not in found.kinds:
            return f"step {successor.step} is not its successor any more"
    return None


def _save_under_way(root: Path, planned: StepInfo, spool: JobSpool | None) -> str:
    """Say which other save of the step, by any run, may rely on files of it; empty if none.

    A ticket that cannot be read holds the step that it names: one of another release may be
    committed by that. Where it names none nobody can commit its image, so it holds nothing.

    Raises:
        FormatError: another release has left a receipt of the step, or has begun a run.
    """
    for path in step_folder(root, planned.step).rglob(f".*{TEMPORARY_SUFFIX}"):
        with suppress(FileNotFoundError):  # named or removed meanwhile
            if path.lstat().st_mtime > file_time(root) - UNDER_WAY_S:
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
        abandoned = error.run is not None and _is_superseded(root, error.run, "", planned.step)
        if error.step == planned.step and not abandoned:
            return f"an image of it may wait: {error}"
    newest = newest_run(root)
    runs = {planned.run, newest.number if newest else planned.run}
    try:
        for run in runs:
            for kind in KINDS:
                receipts = read_statuses(spool, run, planned.step, kind)
                if any(receipt.state != "failed" for receipt in receipts):
                    return SAVING
    except SpoolError as error:
        return str(error)
    return ""


def _is_superseded(root: Path, run: int, run_key: str, step: int) -> bool:
    """Whether a later run has left an image behind."""
    try:
        refuse_superseded(root, run, run_key, step)
    except SupersededError:
        return True
    return False


def _take_name_away(root: Path, step: int) -> None:
    trash = root / PRIVATE_FOLDER / "trash"
    make_folder(trash)
    folder = step_folder(root, step)
    folder.rename(trash / f"{folder.name}.{uuid.uuid4().hex}")
    sync_folder(trash)  # the new name first: after a power cut it may have two, never none
    sync_folder(root)


def _empty_trash(root: Path, *, keep: int) -> None:
    """Remove what has lost its name, by whomever; two that do so take turns."""
    trash = root / PRIVATE_FOLDER / "trash"
    if not trash.is_dir():
        return
    with file_lock(trash.parent / TRASH_LOCK, limit_s=LONG_S):
        for folder in trash.iterdir():
            remove_folder(root, folder, keep=keep)
