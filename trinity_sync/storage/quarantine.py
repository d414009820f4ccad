"""Quarantine: the folder of steps that a rewind or a new run displaced, kept instead of removed.

::

    root/.trinity_sync/quarantine/20260102T030405Z/
      global_step_50/                   unchanged; rename it back to undo
    root/.trinity_sync/quarantine/pinned-of-run-1/
      global_step_40/                   was pinned when a later run replaced it; never pruned

A rewind quarantines the steps newer than its target, in a folder of its own. If a run began at
step 0 although the root had steps, its user may have forgotten to load or named the root of another
training. So it, and each run that continues it, quarantines the earlier steps that its commits
replace, in a folder named after the time at which the run began. A run that continues the training
quarantines the pinned steps that it replaces, and removes the others. Steps of another system are
quarantined by any run.

A rewind makes an earlier committed step the newest again; nothing is deleted. Steps that are newer
than the target (a later number, or any step of a later run) are quarantined, under the commit lock
and the removal lock, in an order that keeps the root valid after a crash:

1. Write a run record that resumed from the target. After a crash here, saves of earlier runs beyond
   the target are refused, and every step can still be loaded.
2. Update the latest pointers to the target. After a crash here, readers of the pointers resume from
   the target, and readers of manifests (``coordinator.latest_step``) from the newest step.
3. Rename the newest step, sync both folders; then the next step. After a crash here, ``latest`` is
   the newest of the steps that are left. After the last rename it is the target.

The same call finishes an interrupted rewind: it finds its own run record, and quarantines the steps
that are left.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import ConfigError, StepInUseError
from trinity_sync.fs.atomic import (
    TEMPORARY_SUFFIX,
    is_temporary,
    make_folder,
    move,
    remove_file,
    sync_folder,
    walk_files,
)
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.layout import KINDS, PRIVATE_FOLDER, step_folder, steps_on_disk
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.storage.block_reuse import remove_folder
from trinity_sync.storage.discovery import (
    iter_committed_steps,
    list_files_of_run,
    repair_latest_pointer,
    require_committed,
    require_whole,
)
from trinity_sync.storage.job_settings import read_required_remote
from trinity_sync.storage.manifest import read_run_number
from trinity_sync.storage.runs import open_run, read_restart_time, read_start_time
from trinity_sync.storage.save_timing import append_removal
from trinity_sync.storage.steps_in_use import (
    Pin,
    acquire_removal_lock,
    is_pinned,
    list_leases,
    list_pins,
    unpin,
)

TIME_FORMAT = "%Y%m%dT%H%M%SZ"
REWIND = "rewind-to-step-"
"""Prefix of the key of a rewind's run, of which no process is part."""


def quarantine_folder(root: str | Path) -> Path:
    """Return the folder that has a quarantine folder for each rewind or run."""
    return Path(root) / PRIVATE_FOLDER / "quarantine"


def replacing_folder(root: str | Path) -> Path:
    """Return the folder for steps that replace others; a replaced step moves there."""
    return Path(root) / PRIVATE_FOLDER / "replacing"


def fetching_folder(root: str | Path) -> Path:
    """Return the folder in which steps are downloaded from a remote."""
    return Path(root) / PRIVATE_FOLDER / "fetching"


def clear_replaced_step(root: str | Path, step: int, *, keep: int = 0) -> Path | None:
    """Quarantine or remove the replaced step in `replacing_folder`. Call it under the commit lock.

    Return its path in quarantine; None if it was removed by `remove_folder`, which gets ``keep``.
    """
    folder = step_folder(replacing_folder(root), step)
    before, now = read_run_number(replacing_folder(root), step), read_run_number(root, step)
    parent: Path | None = None
    if 0 < before < now:
        if is_pinned(root, step):
            parent = quarantine_folder(root) / f"pinned-of-run-{before}"
        elif began := read_restart_time(root, before, now):
            parent = _timed_folder(root, began)
    elif not before and list_files_of_run(root, folder, now) is not None:
        parent = _timed_folder(root, read_start_time(root, now))
    if parent:
        while (place := step_folder(parent, step)).exists():  # of a run of the same second
            parent = parent.with_name(parent.name + "_")
        make_folder(parent)
        for path in walk_files(folder, f".*{TEMPORARY_SUFFIX}"):
            if is_temporary(path.name):  # of the replacing save
                remove_file(path)
        move(folder, place)
        sync_folder(parent)
        return place
    remove_folder(root, folder, keep=keep)
    return None


def displaced_folder(root: str | Path, step: int) -> Path:
    """Return the path of a step that made way for save functions; `gc.remove_replaced` knows it."""
    folder = step_folder(replacing_folder(root), step)
    return folder.with_name(f"{folder.name}.replaced")


def clear_displaced_step(root: str | Path, step: int, *, keep: int = 0) -> None:
    """Do as `clear_replaced_step` with the step in `displaced_folder`, if there is one."""
    moved, folder = displaced_folder(root, step), step_folder(replacing_folder(root), step)
    if not moved.exists() and not moved.is_symlink():
        return
    if folder.exists() or folder.is_symlink():
        clear_replaced_step(root, step)
    move(moved, folder)
    clear_replaced_step(root, step, keep=keep)


def make_quarantine_folder(root: Path, now: float) -> Path:
    """Create a new quarantine folder and return its path; ``now`` is in seconds since the epoch."""
    folder = _timed_folder(root, now)
    while folder.exists():
        folder = folder.with_name(folder.name + "_")
    make_folder(folder)
    return folder


def _timed_folder(root: str | Path, at: float) -> Path:
    return quarantine_folder(root) / time.strftime(TIME_FORMAT, time.gmtime(at))


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
    """Return the steps that a rewind quarantines, in that order: the newest first.

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
    if url := read_required_remote(base):
        raise ConfigError(
            f"cannot rewind {root}: it requires the remote {url}, where newer steps would be found "
            f"again. Load step {step} in the training, coordinator.load({step}): its next commit "
            "is then the newest."
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
        folder = make_quarantine_folder(base, clock()) if newer else None
        for other in newer:
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
