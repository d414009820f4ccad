"""Checks of one job: the root's file system, remote and disk, its steps.

The checks change nothing: the files of probes in the root are removed at once.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trinity_sync.client.init_root import Capabilities, probe_capabilities
from trinity_sync.errors import CommitError, FormatError, RootError, TrinitySyncError
from trinity_sync.fs.atomic import list_paths
from trinity_sync.fs.file_system import find_room, measure_ray_stores
from trinity_sync.layout import ROOT_FORMAT, steps_on_disk
from trinity_sync.saves.journal import Journal
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import job_id, read_identity
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.discovery import (
    find_newest,
    iter_committed_steps,
    list_unnamed_files,
    read_step_state,
)
from trinity_sync.storage.job_settings import (
    find_settings_problem,
    needs_replication,
    read_job_settings,
)
from trinity_sync.storage.placement import read_placement
from trinity_sync.storage.runs import find_newest_run, list_runs


@dataclass(frozen=True)
class Check:
    """A check of ``doctor``."""

    name: str
    """What was checked."""
    state: Literal["ok", "warn", "fail"]
    """``ok``, ``warn`` or ``fail``."""
    found: str
    """What was found."""
    todo: str = ""
    """What to do."""


def check_root(root: Path, settings: Settings) -> Iterator[Check]:
    """Run all checks of a job, and yield each result as soon as it is known."""
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        found = f"this user cannot read and write {root}"
        yield Check("root", "fail", found, f"change its owner or mode: ls -ld {root}")
        return
    try:
        yield from _check_capabilities(probe_capabilities(root))
    except RootError as error:
        yield Check("root", "fail", str(error), "see docs/concepts/file-systems.md")
        return
    yield (records := _check_records(root))
    if records.state == "fail":
        return
    yield from _check_required_remote(root)
    latest = find_newest(root)
    yield _check_disk(root, latest.nbytes if latest else 0)
    if latest and settings.spool.is_dir():
        spool = JobSpool(settings.spool / job_id(root))
        yield _check_shared_memory(
            spool, settings, int(latest.nbytes * _compute_local_fraction(root, settings))
        )
    yield _check_steps(root)
    journal = Journal(root)
    journal.read()
    if (last := journal.find_last()) and last.message:
        found = f"the last {last.kind}, of step {last.step}, is {last.state}: {last.message}"
        yield Check("last save", "warn", found, f"see: trinity-sync runs {root}")


def _check_records(root: Path) -> Check:
    """Check that this release can read the root, the runs and the steps."""
    try:
        read_identity(root)
        list_runs(root)
        find_newest(root)
    except (CommitError, FormatError) as error:
        return Check("records", "fail", str(error), "nothing is committed or removed until then")
    return Check("records", "ok", f"format {ROOT_FORMAT}")


def _check_disk(root: Path, step_bytes: int) -> Check:
    free = shutil.disk_usage(root).free
    fit = f", {free // step_bytes} checkpoints of the newest's size" if step_bytes else ""
    state: Literal["ok", "warn", "fail"] = "ok"
    if step_bytes and free < 3 * step_bytes:
        state = "warn" if free >= step_bytes else "fail"
    todo = "" if state == "ok" else "remove old steps, or move the job to a larger disk"
    return Check("disk", state, f"{free / 1e9:.1f} GB free{fit}", todo)


def _check_capabilities(found: Capabilities) -> Iterator[Check]:
    """Report the capabilities of the root's file system, and the consequences of missing ones."""
    mount = found.mount
    locks, late = mount.local_lock_option, mount.weak_consistency_option
    wrong = f"; the option {locks} keeps locks on this node" if locks else ""
    wrong += f"; the option {late} delays the changes of other nodes" if late else ""
    yield Check(
        "file system",
        "warn" if wrong else "ok",
        f"{mount}, {'which other nodes may see' if mount.shared else 'local to this node'}{wrong}",
        "mount it without that option before using several nodes" if wrong else "",
    )
    for each in found.each:
        if each.reason:
            todo = "use another file system for the root, see docs/concepts/file-systems.md"
            yield Check(each.name, "fail", f"no ({each.reason}): {each.consequence}", todo)
        else:
            yield Check(each.name, "ok", "yes")


def _check_required_remote(root: Path) -> Iterator[Check]:
    """Check that the settings count, and that the required remote, if any, has all steps."""
    try:
        if problem := find_settings_problem(root):
            yield Check("settings", "fail", problem, "set them again; saves go on until then")
        if not (url := read_job_settings(root).required_remote):
            return
        from trinity_sync.remote.remote_root import Remote

        uploaded = [step.step for step in Remote(url).list_steps() if step.state == "valid"]
        missing = [
            each.step for each in iter_committed_steps(root) if needs_replication(root, each)
        ]
    except TrinitySyncError as error:
        yield Check("remote", "fail", str(error), "correct that; saves fail until then")
        return
    found = f"{len(uploaded)} valid steps at {url}"
    if missing:
        yield Check("remote", "warn", f"{found}; it lacks {missing}", "the next save sends them")
    else:
        yield Check("remote", "ok", found)


def _compute_local_fraction(root: Path, settings: Settings) -> float:
    """Return the fraction of the last run's ranks on this node; 1 if it is unknown."""
    run = find_newest_run(root)
    if run is None:
        return 1.0
    found = [read_placement(root, run.number, run.key, role) or () for role in settings.roles]
    places = [place for of_role in found for place in of_role]
    here = sum(len(place.ranks) for place in places if place.node == settings.node)
    return here / sum(len(place.ranks) for place in places) if here else 1.0


def _check_shared_memory(spool: JobSpool, settings: Settings, step_bytes: int) -> Check:
    """Check that the slots of this node's ranks fit into shared memory."""
    needed = settings.slots * step_bytes
    used = sum(path.stat().st_blocks * 512 for path in list_paths(spool.folder, "*.slot"))
    room = find_room(settings.spool)
    available = room.nbytes + used - measure_ray_stores(settings.spool)
    found = (
        f"{settings.slots} x {step_bytes / 1e9:.1f} GB needed, {available / 1e9:.1f} GB available"
    )
    if available >= needed:
        return Check("room for images", "ok", found)
    todo = f"{room.enlarge}, or set TRINITY_SYNC_SLOTS=1"
    return Check("room for images", "warn", found, todo)


def _check_steps(root: Path) -> Check:
    valid, wrong, others = 0, list[int](), list[int]()
    for step in steps_on_disk(root):
        found = read_step_state(root, step, runs=())
        if found.state == "valid":
            valid += 1
            if found.manifest and list_unnamed_files(root, found.manifest):
                others.append(step)
        else:
            wrong.append(step)
    if wrong:
        todo = f"see: trinity-sync ls {root}"
        return Check("steps", "warn", f"{valid} valid; not committed or corrupted: {wrong}", todo)
    if others:
        todo = f"move them away; see: trinity-sync verify {root} STEP"
        return Check("steps", "warn", f"{valid} valid; files beside the commit: {others}", todo)
    return Check("steps", "ok", f"{valid} valid")
