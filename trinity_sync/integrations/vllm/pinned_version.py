"""The version that an update of an engine is about: which one it is, and opening it.

The updater names the version that it has opened itself, with the places of its images, so the
workers need not look for it; other callers of vLLM's protocol name a step, or nothing.

An update holds a claim on the engine, which refuses others until it has ended. vLLM takes one
update at a time, but cannot tell one in progress from one whose updater was killed, which the next
updater has to end.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_sync.errors import WeightSyncError
from trinity_sync.fs.process import is_process_alive, read_process_identity, read_process_namespace
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import job_id
from trinity_sync.weights.committed import find_committed_version
from trinity_sync.weights.reader import WeightReader
from trinity_sync.weights.version_view import VersionView
from trinity_sync.weights.versions import ImageRef, Version


@dataclass
class Wanted:
    """The version to load; by default the newest."""

    step: int | None = None
    """Load this step, and no other; not one before the step that the engine has."""
    run: int | None = None
    """Number of the run that made it; None for any."""
    images: list[dict[str, Any]] = field(default_factory=list)
    """Where the updater found it in the memory of its node: the fields of each `ImageRef`."""
    min_step: int = 0
    """Wait for a version of at least this step."""
    timeout_s: float = 30.0
    identity: str = ""
    """Identity of the job that made it; empty for any."""


def select_version(reader: WeightReader, root: str, role: str, wanted: Wanted) -> Version:
    """Return the version to load, once it can be read; wait for it up to ``wanted.timeout_s``.

    Raises:
        WeightSyncError: there is none in time, or the step is gone or of another run.
    """
    step, run = wanted.step, wanted.run
    found: Version | None
    if step is not None and run is not None and wanted.images:
        images = tuple(ImageRef(**image) for image in wanted.images)
        if _are_here(images, root):
            return Version(step, run, "memory", root, role, images, identity=wanted.identity)
        found = find_committed_version(root, role, step)
        remedy = "run the updater on the engine's node, with its TRINITY_SYNC_SPOOL"
    else:
        found = wait_for(reader, wanted.min_step if step is None else step, wanted.timeout_s)
        remedy = f"load the newest, {found.step} of run {found.run}"
        if step not in (None, found.step):
            found = find_committed_version(root, role, step)
    if found and run in (None, found.run) and wanted.identity in ("", found.identity):
        return found
    raise WeightSyncError(
        f"no version with {step=}, {run=} is in the shared memory of this node, or committed in "
        f"{root}; {remedy}"
    )


def wait_for(reader: WeightReader, least: int, timeout_s: float) -> Version:
    """Wait for a version of at least step ``least``, and return the newest.

    Raises:
        WeightSyncError: there is none within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    found = reader.wait(least - 1, timeout_s)
    while found and found.step < least:  # of a run that resumed from an earlier step
        left_s = max(0.0, deadline - time.monotonic())
        found = reader.wait(found, left_s)
    if found is None:
        raise WeightSyncError(
            f"no version of step {least} or later can be read after {timeout_s:g} s; does the "
            "trainer run, and does this node see its root?"
        )
    return found


@contextmanager
def pin_version(reader: WeightReader, version: Version) -> Iterator[VersionView]:
    """Yield this version, and no other, which nothing changes or removes meanwhile.

    Raises:
        WeightSyncError: it is gone.
    """
    with reader.open(version) as view:
        found = view.version
        is_same = (found.run, found.step) == (version.run, version.step)
        if not is_same or found.is_of_other_job(version):
            raise WeightSyncError(
                f"version {version.step} of run {version.run} is gone; load the newest, "
                f"{found.step} of run {found.run}"
            )
        yield view


def _are_here(images: tuple[ImageRef, ...], root: str) -> bool:
    """Return whether the images are in the job's spool of this node."""
    spool = Settings().spool / job_id(root)
    slots = [Path(image.slot) for image in images]
    return all(slot.parent == spool and slot.is_file() for slot in slots)


def make_claim(name: str, calls_s: float, job: Version) -> dict[str, Any]:
    """Return what the updater ``name``, in this process, tells the workers in ``init_info``.

    All calls of its update have timed out after ``calls_s``. ``job`` is a version of the job.
    """
    return {
        "name": name,
        "root": job.root,
        "identity": job.identity,
        "process": read_process_identity(os.getpid()),
        "namespace": read_process_namespace(),
        "until": time.time() + calls_s,
    }


def end_claim(claim: dict[str, Any]) -> dict[str, Any]:
    """Return the claim of a job on its engine after an update, for ten minutes on another host."""
    return claim and {**claim, "is_idle": True, "until": time.time() + 600}


def require_free(held: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Require that no other updater is in an update, nor follows another job.

    Both are claims: of the last update, empty without one, and of the next.

    Raises:
        WeightSyncError: another one is or does, or may on another host.
    """
    if not held or held["name"] == wanted.get("name"):
        return
    same = (held.get(each) == wanted.get(each) for each in ("root", "identity", "process"))
    if held.get("is_idle") and (not wanted or any(same)):
        return
    if held["namespace"] == read_process_namespace():
        lives = is_process_alive(held["process"])
    else:
        lives = time.time() < held["until"]
    if lives:
        raise WeightSyncError(
            f"process {held['process']} of {held['namespace']} updates this engine with the job in "
            f"{held.get('root')}; use one updater for an engine, or try again once it has ended"
        )
