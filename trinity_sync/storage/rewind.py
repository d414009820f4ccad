"""A rewind makes an earlier committed step the newest again; nothing is deleted.

Steps that are newer than the target (a later number, or any step of a later run) are quarantined,
in a folder of their own (`timed_folder`), under the commit lock and the removal lock, in an order
that keeps the root valid after a crash:

1. Write a run record that resumed from the target. After a crash here, saves of earlier runs beyond
   the target are refused, and every step can still be loaded.
2. Update the latest pointers to the target. After a crash here, readers of the pointers resume from
   the target, and readers of manifests (``coordinator.latest_step``) from the newest step.
3. Rename the oldest step, sync both folders; then the next step. After a crash here, ``latest`` is
   the newest step, or the target.

The same call finishes an interrupted rewind: it finds its own run record, and quarantines the steps
that are left.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import ConfigError, StepInUseError
from trinity_sync.fs.atomic import make_folder, move, sync_folder
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.layout import KINDS, step_folder, steps_on_disk
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.storage.discovery import (
    iter_committed_steps,
    repair_latest_pointer,
    require_committed,
    require_whole,
)
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import read_run_number
from trinity_sync.storage.replace import timed_folder
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.save_timing import append_removal
from trinity_sync.storage.steps_in_use import (
    Pin,
    acquire_removal_lock,
    list_leases,
    list_pins,
    unpin,
)

REWIND = "rewind-to-step-"
"""Prefix of the key of a rewind's run, of which no process is part."""


@dataclass(frozen=True)
class RewindResult:
    """Result of a rewind."""

    step: int
    """The newest step from now on."""
    run: int | None
    """Number of the run that resumes from it; null for a dry run."""
    quarantined: tuple[int, ...]
    """Steps that were or would be quarantined, newest first."""
    folder: Path | None
    """Folder that contains them; null if there are none, or for a dry run."""


def list_newer_steps(root: str | Path, step: int) -> list[int]:
    """Return the steps that a rewind quarantines, the newest first.

    Raises:
        CommitError: the target is not committed, or corrupted.
        FormatError: another release has committed a step.
    """
    target = require_committed(root, step)
    committed = {manifest.step: manifest.run for manifest in iter_committed_steps(root)}
    runs = {other: committed.get(other, 0) for other in steps_on_disk(root)}
    newer = [other for other, run in runs.items() if other > step or run > target.run]
    return sorted(newer, key=lambda other: (runs[other], other), reverse=True)


def rewind(
    root: str | Path, step: int, *, force: bool = False, clock: Callable[[], float] = time.time
) -> RewindResult:
    """Make ``step`` the newest step; wait for a commit in flight.

    Stop the training first: if it still runs, its saves beyond the step are refused
    (`SupersededError`). ``force`` also quarantines pinned and tagged steps, and removes their pins
    and tags.

    Raises:
        ConfigError: the root requires a remote, in which nothing can be quarantined.
        CommitError: the step is not committed, or corrupted, and nothing was changed; or this node
            lost a lock to another node, and the same call finishes the rewind.
        StepInUseError: a newer step is leased, or pinned or tagged without ``force``; nothing was
            changed.
        FormatError: another release has made the root, committed a step or begun a run; nothing was
            changed.
    """
    base = Path(root)
    read_identity(base)  # which refuses a root of another release
    if (job := read_job_settings(base)).remote_required:
        raise ConfigError(
            f"cannot rewind {root}: it requires the remote {job.remote or '(unknown now)'}, where "
            f"newer steps would be found again. Load step {step} in the training, "
            f"coordinator.load({step}): its next commit is then the newest."
        )
    require_whole(base, target := require_committed(base, step))  # before any lock file is made
    with acquire_commit_lock(base) as changes, acquire_removal_lock(base) as removal:
        newer = list_newer_steps(base, step)
        pinned = _refuse_in_use(base, step, newer, force=force)
        key = f"{REWIND}{step}-of-run-{target.run}"
        run = open_run(base, key, step, resumed_run=target.run)
        for lock in (changes, removal):
            lock.require_held()
        for kind in KINDS:
            repair_latest_pointer(base, kind, without=newer)
        folder = _make_folder(base, clock()) if newer else None
        for other in reversed(newer):  # killed in between, it leaves the newest where it was
            assert folder is not None  # there are newer steps
            for lock in (changes, removal):
                lock.require_held()
            append_removal(base, read_run_number(base, other), other, clock())
            move(step_folder(base, other), step_folder(folder, other))
            sync_folder(folder)
            sync_folder(base)
        for pin in pinned:
            unpin(base, pin.name or pin.step)
    return RewindResult(step, run.number, tuple(newer), folder)


def _make_folder(root: Path, now: float) -> Path:
    folder = timed_folder(root, now)
    while folder.exists():
        folder = folder.with_name(folder.name + "_")
    make_folder(folder)
    return folder


def _refuse_in_use(root: Path, step: int, newer: list[int], *, force: bool) -> list[Pin]:
    """Return the pins and tags of the newer steps, if they may be quarantined."""
    if readers := [(it.step, it.holder) for it in list_leases(root) if it.step in newer]:
        raise StepInUseError(
            f"cannot rewind {root} to step {step}: newer steps are being read "
            f"({_in_words(readers)}). Wait for the readers or the end of their leases, and retry."
        )
    pinned = [pin for pin in list_pins(root) if pin.step in newer]
    if pinned and not force:
        kept = [(pin.step, pin.why) for pin in pinned]
        raise StepInUseError(
            f"cannot rewind {root} to step {step}: newer steps are pinned or tagged "
            f"({_in_words(kept)}). Unpin them, or pass --force to quarantine them and "
            "remove their pins and tags."
        )
    return pinned


def _in_words(holders: list[tuple[int, str]]) -> str:
    names = defaultdict(list)
    for step, name in holders:
        names[step].append(name)
    return "; ".join(f"step {step}: {', '.join(each)}" for step, each in names.items())
