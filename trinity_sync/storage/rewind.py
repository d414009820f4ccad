"""Make an earlier committed step the newest one again; nothing is deleted.

::

    root/.trinity_sync/quarantine/20260102T030405Z/
      global_step_50/                   as it was; rename it back to undo

What is newer than the step (a later number, or any step of a later run) is quarantined. The order
is the promise; all of it happens under the commit lock and the lock of removal:

1. A run record that resumed from the step. Dies everything now: what earlier runs have in flight
   beyond the step is refused, and every step can still be loaded.
2. The iteration files name the step. Now: who goes by them resumes from the step, who goes by
   manifests (``coordinator.latest``) from the newest one.
3. The newest step is renamed, both folders synced; then the next one. Now: the newest of those
   that are left is what ``latest`` answers. With the last rename it is the step that was wanted.

So resuming finds a whole step at every instant, and a rewind that was broken off is finished by
the same call again: it finds its own run record, and quarantines what is left. What is in
quarantine stays until no policy keeps it (``TRINITY_SYNC_KEEP_QUARANTINE``), or somebody removes
it.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trinity_sync.errors import ConfigError, ManifestError, StepInUseError
from trinity_sync.fs.atomic import replace_file, sync_folder
from trinity_sync.fs.locks import one_change_at_a_time
from trinity_sync.layout import (
    ITERATION_FILES,
    KINDS,
    Kind,
    step_folder,
    steps_on_disk,
)
from trinity_sync.storage.discovery import committed_steps, require_committed
from trinity_sync.storage.leases import list_leases, removal_lock
from trinity_sync.storage.manifest import Manifest, read_manifest, read_run_number
from trinity_sync.storage.pins import Pin, list_pins, unpin
from trinity_sync.storage.quarantine import make_quarantine_folder
from trinity_sync.storage.required_remote import required_remote_of
from trinity_sync.storage.runs import open_run


@dataclass(frozen=True)
class RewindResult:
    """What a rewind did."""

    step: int
    run: int
    """Number of the run record that begins at the step."""
    quarantined: tuple[int, ...]
    """Steps that are in quarantine now."""
    folder: Path | None
    """Where they lie now; None if there were none."""


def list_newer_steps(root: str | Path, step: int) -> list[int]:
    """The steps that a rewind to ``step`` quarantines, in that order: the newest first.

    Raises:
        CommitError: the step is not committed, or corrupted.
        FormatError: another release has committed it, or a newer one.
    """
    target = require_committed(root, step)
    runs = {other: read_run_number(root, other) for other in steps_on_disk(root)}
    newer = [other for other, run in runs.items() if other > step or run > target.run]
    for other in newer:
        with suppress(ManifestError):
            read_manifest(root, other)
    return sorted(newer, key=lambda other: (runs[other], other), reverse=True)


def rewind(
    root: str | Path,
    step: int,
    *,
    force: bool = False,
    clock: Callable[[], float] = time.time,
) -> RewindResult:
    """Make ``step`` the newest one; waits for a commit that is under way.

    Stop the training first: if it still runs, it goes on, and its saves beyond the step are refused
    (`SupersededError`).

    Args:
        root: the job's root.
        step: a committed one.
        force: quarantine pinned and tagged steps also; their pins and tags are removed.
        clock: seconds since the epoch.

    Raises:
        ConfigError: the steps of the root count in a store, where nothing can be quarantined.
        CommitError: the step is not committed, or corrupted; nothing was changed.
        StepInUseError: a newer step is leased, or pinned or tagged without ``force``; nothing was
            changed.
        FormatError: another release has committed the step or a newer one, or has begun a run;
            nothing was changed.
        CommitError: also if this node was cut off, and another one may have its locks; the same
            call again finishes the rewind.
    """
    base = Path(root)
    if store := required_remote_of(base):
        raise ConfigError(
            f"{root} cannot be rewound: its steps count in {store}, where newer ones would be "
            f"found again. Let the training load step {step}, coordinator.load({step}): what it "
            "commits then is the newest."
        )
    target = require_committed(base, step)  # before any lock file is made
    with one_change_at_a_time(base) as changes, removal_lock(base) as removal:
        newer = list_newer_steps(base, step)
        pinned = _refuse_in_use(base, step, newer, force=force)
        key = f"rewind-to-step-{step}-of-run-{target.run}"
        run = open_run(base, key, step, resumed_run=target.run)
        for lock in (changes, removal):
            lock.require_ours()
        _point_at(base, target, newer)
        folder = make_quarantine_folder(base, clock()) if newer else None
        for other in newer:
            assert folder is not None  # there are newer ones
            for lock in (changes, removal):
                lock.require_ours()
            step_folder(base, other).rename(step_folder(folder, other))
            sync_folder(folder)
            sync_folder(base)
        for pin in pinned:
            unpin(base, pin.name or pin.step)
    return RewindResult(step, run.number, tuple(newer), folder)


def _refuse_in_use(root: Path, step: int, newer: list[int], *, force: bool) -> list[Pin]:
    """The pins and tags of the newer steps, if nothing forbids to quarantine them."""
    readers: dict[int, list[str]] = {}
    for lease in list_leases(root):
        if lease.step in newer:
            readers.setdefault(lease.step, []).append(lease.holder)
    if readers:
        raise StepInUseError(
            f"cannot rewind {root} to step {step}: newer steps are being read "
            f"({_in_words(readers)}). Let the readers end, or their leases, and repeat.",
            holders=readers,
        )
    pinned = [pin for pin in list_pins(root) if pin.step in newer]
    if pinned and not force:
        kept: dict[int, list[str]] = {}
        for pin in pinned:
            kept.setdefault(pin.step, []).append(pin.why)
        raise StepInUseError(
            f"cannot rewind {root} to step {step}: newer steps are pinned or tagged "
            f"({_in_words(kept)}). Unpin or untag them, or pass --force, which quarantines them "
            "and removes pins and tags.",
            holders=kept,
        )
    return pinned


def _in_words(holders: dict[int, list[str]]) -> str:
    return "; ".join(f"step {step}: {', '.join(names)}" for step, names in holders.items())


def _point_at(root: Path, target: Manifest, newer: list[int]) -> None:
    """Have each iteration file name the newest of what stays that serves as its kind."""
    for kind in KINDS:
        wanted = target.step if kind in target.kinds else _newest_kept(root, kind, newer)
        path = root / ITERATION_FILES[kind]
        if wanted is not None:
            replace_file(path, str(wanted))
        elif path.exists():
            path.unlink()
            sync_folder(root)


def _newest_kept(root: Path, kind: Kind, newer: list[int]) -> int | None:
    kept = [m for m in committed_steps(root) if m.step not in newer and kind in m.kinds]
    return max(((m.run, m.step) for m in kept), default=(0, None))[1]
