"""Retention: which steps may go, why the others stay, and how one goes without half of it left.

First a plan, from policies and from what is on disk; nothing is touched. Then each step of it on
its own, under the locks of commits and removals: it is asked again whether anybody needs the step,
and whether a newer one is valid; then it loses its name in one rename to ``.trinity_sync/trash``.
Its files are removed afterwards, without a lock, so whatever dies when, a step is there as it was
committed or it is not there. What a crash left in the trash goes with the next retention.

A record of another release holds every step that it may be about; what it says is never guessed.
"""

import logging
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from trinity_sync.errors import (
    CommitError,
    ConfigError,
    FormatError,
    ManifestError,
    SpoolError,
    SupersededError,
)
from trinity_sync.fs.atomic import TEMPORARY_SUFFIX, make_folder, sync_folder
from trinity_sync.fs.clock import file_time
from trinity_sync.fs.locks import LONG_S, TRASH_LOCK, file_lock, one_change_at_a_time
from trinity_sync.layout import KINDS, PRIVATE_FOLDER, Kind, job_id, step_folder, steps_on_disk
from trinity_sync.retention.policies import All, Policy, StepInfo
from trinity_sync.snapshot.callable_status import receipts_of
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.block_reuse import remove_folder
from trinity_sync.storage.discovery import committed_steps, manifest_state, require_committed
from trinity_sync.storage.export_requests import awaited, forget_exports
from trinity_sync.storage.latest_pointer import read_iteration
from trinity_sync.storage.leases import removal_lock
from trinity_sync.storage.manifest import Manifest, read_manifest, run_of
from trinity_sync.storage.metrics import forget_metrics, read_metrics
from trinity_sync.storage.pins import steps_in_use
from trinity_sync.storage.required_remote import must_be_sent
from trinity_sync.storage.runs import Lineage, all_runs, lineage, newest_run, refuse_abandoned

logger = logging.getLogger(__name__)

UNDER_WAY_S = 3600.0
"""Age in seconds up to which a temporary file in a step's folder means that a save is writing."""
NOT_STORED = "the store, where it counts, does not have it yet"
SAVING = "a save of it is under way"
LINKED = "its folder is a symbolic link; remove it by hand"


@dataclass(frozen=True)
class Rules:
    """The policies of the two sorts of steps."""

    checkpoints: Policy
    """For steps that a training can resume from."""
    syncs: Policy
    """For steps that hold weights only, which the next one supersedes."""
    superseded: Policy = field(default_factory=All)
    """For steps of both sorts that a run which began at step 0 did not go on from: whoever started
    it may have forgotten to load, so they do not count among the others."""


@dataclass(frozen=True)
class Plan:
    """What would be removed, and why the rest stays."""

    kept: tuple[tuple[StepInfo, str], ...]
    """Steps and reasons, oldest first."""
    removed: tuple[StepInfo, ...]
    """Oldest first."""
    newest: dict[Kind, StepInfo]
    """What has to be valid before anything older goes."""

    @property
    def nbytes(self) -> int:
        """Bytes that carrying it out frees."""
        return sum(each.nbytes for each in self.removed)


@dataclass
class Removal:
    """What became of a plan."""

    removed: list[StepInfo] = field(default_factory=list)
    spared: list[tuple[StepInfo, str]] = field(default_factory=list)
    """Steps that are needed after all, with the reason."""

    @property
    def nbytes(self) -> int:
        """Bytes that it freed, those of spare files included."""
        return sum(each.nbytes for each in self.removed)


@dataclass(frozen=True)
class Verdict:
    """What becomes of a step."""

    step: StepInfo
    state: Literal["kept", "removed", "would be removed"]
    why: str = ""
    """Why it is kept."""


def verdicts(plan: Plan, removal: Removal | None) -> list[Verdict]:
    """What a plan and its removal, if it was carried out, make of every step, oldest first."""
    found = [Verdict(each, "kept", why) for each, why in plan.kept]
    if removal is None:
        found += [Verdict(each, "would be removed") for each in plan.removed]
    else:
        found += [Verdict(each, "removed") for each in removal.removed]
        found += [Verdict(each, "kept", why) for each, why in removal.spared]
    return sorted(found, key=lambda each: each.step.age)


def survey(root: str | Path) -> list[StepInfo]:
    """All steps with a manifest that can be read, oldest first; others are nobody's to remove."""
    held = _held(root)
    try:
        line = lineage(all_runs(root), partial(run_of, root))
    except FormatError:  # holds all steps, see `_held`
        line = Lineage(frozenset())
    found = []
    for manifest in committed_steps(root):
        corruption = manifest_state(root, manifest, runs=()).reason
        metrics: dict[str, float] = {}
        try:
            metrics = read_metrics(root, manifest.run, manifest.step)
            if not corruption and must_be_sent(root, manifest):
                held[manifest.step].append(NOT_STORED)
        except FormatError as error:
            held[manifest.step].append(str(error))
        if step_folder(root, manifest.step).is_symlink():
            held[manifest.step].append(LINKED)
        found.append(
            info_of(
                manifest,
                metrics=metrics,
                held=held[manifest.step],
                corruption=corruption,
                superseded_by=line.supersedes(manifest.run),
            )
        )
    return sorted(found, key=lambda each: each.age)


def info_of(
    manifest: Manifest,
    *,
    metrics: dict[str, float] | None = None,
    held: Sequence[str] = (),
    corruption: str = "",
    superseded_by: int = 0,
) -> StepInfo:
    """What policies know of the step of a manifest."""
    return StepInfo(
        manifest.step,
        manifest.run,
        manifest.kinds,
        manifest.committed_at,
        manifest.nbytes,
        metrics or {},
        tuple(held),
        corruption,
        superseded_by,
    )


def plan(steps: Sequence[StepInfo], rules: Rules, now: float) -> Plan:
    """Say what may go: nothing on disk is looked at, and nothing is touched.

    Whatever the policies say, these stay: the newest valid step of each kind, which is what a
    training resumes from and a reader loads, what somebody holds, and what is corrupted.

    Args:
        steps: as `survey` gives them.
        rules: what to keep besides.
        now: seconds since the epoch.

    Raises:
        ConfigError: a policy keeps none of several steps by itself, or names an unknown metric.
    """
    steps = sorted(steps, key=lambda each: each.age)
    valid = [each for each in steps if not each.corruption]
    newest = {kind: each for each in valid for kind in each.kinds}
    why: dict[int, list[str]] = defaultdict(list)
    for each in steps:
        why[each.step] += [f"newest {kind}" for kind in KINDS if newest.get(kind) is each]
        why[each.step] += each.held
        if each.corruption:
            why[each.step].append(f"not judged: {each.corruption}")
    for step, reason in rules.superseded.keeps([s for s in valid if s.superseded_by], now).items():
        why[step].append(f"{reason} that a run which began at step 0 did not go on from")
    ours = [each for each in valid if not each.superseded_by]
    checkpoints = [each for each in ours if "checkpoint" in each.kinds]
    syncs = [each for each in ours if "checkpoint" not in each.kinds]
    for policy, sort in ((rules.checkpoints, checkpoints), (rules.syncs, syncs)):
        keeps = policy.keeps(sort, now)
        if not keeps and any(not why[each.step] for each in sort):
            raise ConfigError(
                f"retention policy {str(policy)!r} keeps none of the {len(sort)} steps that it is "
                "for; nothing was removed. Add last=1 or more to it."
            )
        for step, reason in keeps.items():
            why[step].append(reason)
    return Plan(
        kept=tuple((each, "; ".join(why[each.step])) for each in steps if why[each.step]),
        removed=tuple(each for each in steps if not why[each.step]),
        newest=newest,
    )


def carry_out(
    root: str | Path,
    plan: Plan,
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
        forget_metrics(root, each.step)
        forget_exports(root, each.step)
    return done


def _held(root: str | Path) -> dict[int, list[str]]:
    """Steps that somebody needs whatever policies say, with reasons."""
    held = steps_in_use(root)
    for step, roles in awaited(root).items():
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
    at = 0 if pointed is None else run_of(root, pointed)
    if run and run.resumed_from and at < run.number:
        held[run.resumed_from].append(f"run {run.number} resumed from it and has no checkpoint yet")
    return held


def _reason_to_stay(
    root: Path, planned: StepInfo, plan: Plan, spool: JobSpool | None
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
        return NOT_STORED
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
        if ticket.step == planned.step and not _is_abandoned(
            root, ticket.run, ticket.run_key, ticket.step
        ):
            return SAVING
    for error in unreadable:
        abandoned = error.run is not None and _is_abandoned(root, error.run, "", planned.step)
        if error.step == planned.step and not abandoned:
            return f"an image of it may wait: {error}"
    newest = newest_run(root)
    runs = {planned.run, newest.number if newest else planned.run}
    try:
        for run in runs:
            for kind in KINDS:
                receipts = receipts_of(spool, run, planned.step, kind)
                if any(receipt.state != "failed" for receipt in receipts):
                    return SAVING
    except SpoolError as error:
        return str(error)
    return ""


def _is_abandoned(root: Path, run: int, run_key: str, step: int) -> bool:
    """Whether a later run has left an image behind."""
    try:
        refuse_abandoned(root, run, run_key, step)
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
