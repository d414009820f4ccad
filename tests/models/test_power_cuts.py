"""The power goes at any instant of a job's life, and everything that was not synced may be lost.

A whole life is recorded (``powercut``); then each disk that may be left is made, and the product's
own code is asked what it finds. It must be what a reader could have seen since the last call that
had returned: the old steps or the new steps, whole, none of them missing, and the same once the
repairs have run. Of each instant, the disk with all that was done and the one with all that was
synced are tried always, and ``POWER_CUTS`` others; by default, one at every third instant.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.job import Job
from tests.support.powercut import Disk, Names, Recording, Synced, after, cuts
from tests.support.steps import commit_files
from trinity_sync.errors import CommitError
from trinity_sync.fs import atomic, direct_io, locks
from trinity_sync.fs.atomic import replace_file
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.layout import KINDS, Kind, step_folder
from trinity_sync.remote import download, remote_root
from trinity_sync.remote.download import fetch
from trinity_sync.remote.prune import prune_remote
from trinity_sync.remote.upload import replicate
from trinity_sync.retention.policies import ALL, parse_policy
from trinity_sync.retention.prune import plan_prune
from trinity_sync.retention.prune import prune as prune_root
from trinity_sync.retention.removal import Rules
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.storage import block_reuse, persist, replace, steps_in_use
from trinity_sync.storage import manifest as manifest_files
from trinity_sync.storage.discovery import (
    Corruption,
    find_newest,
    iter_committed_steps,
    mark_corrupted,
    read_latest_pointer,
    remove_mark,
    repair_latest_pointer,
    require_committed,
)
from trinity_sync.storage.gc import FILE_REPAIRS
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import find_newest_run, open_run
from trinity_sync.storage.steps_in_use import list_pins, pin, tag, unpin

OTHERS = float(os.environ.get("POWER_CUTS", "0.34"))
Commit = tuple[int, int, tuple[str, ...]]
"""Run, step and the digests of its files."""


@dataclass(frozen=True)
class View:
    """What the product says of a root."""

    newest: tuple[tuple[Kind, Commit | None], ...]
    steps: frozenset[Commit]
    """That count and are whole to the last byte."""
    torn: tuple[str, ...]
    """What counts and is not whole."""
    pointers: tuple[int | None, ...]
    pins: frozenset[tuple[int, str]]
    run: int


def view(root: Path) -> View:
    steps, torn = {}, []
    for manifest in iter_committed_steps(root):
        try:
            require_committed(root, manifest.step)
        except CommitError:
            continue
        folder = step_folder(root, manifest.step)
        wrong = [r.path for r in manifest.files if digest_cached_file(folder / r.path) != r.digest]
        torn += [f"step {manifest.step}: {path}" for path in wrong]
        digests = tuple(record.digest for record in manifest.files)
        steps[manifest.step] = manifest.run, manifest.step, digests
    found = {kind: find_newest(root, kind) for kind in KINDS}
    last = find_newest_run(root)
    return View(
        tuple((kind, m and steps[m.step]) for kind, m in found.items()),
        frozenset(steps.values()),
        tuple(torn),
        tuple(read_latest_pointer(root, kind) for kind in KINDS),
        frozenset((each.step, each.name) for each in list_pins(root)),
        last.number if last else 0,
    )


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300,), value)}


def save(job: Job, step: int, value: float, *, kind: Kind = "checkpoint", run: int = 1) -> None:
    job.stage(step, {"model": state(value), "optim": state(-value)}, kind=kind, run=run)
    job.commit(step, "model", "optim", kind=kind, run=run)


def prune(job: Job) -> None:
    rules = Rules(parse_policy("last=1"), parse_policy("last=1"))
    prune_root(job.root, plan_prune(job.root, rules, now=0))


def a_whole_life(job: Job) -> Iterator[str]:
    """Every sort of change that the product makes to a root; yields what is done."""
    root = job.root
    open_run(root, "first", 0)
    yield "run 1 began"
    save(job, 1, 1.0)
    yield "step 1 was saved"
    job.stage(2, {"model": state(2.0)}, kind="state_dict")
    job.commit(2, kind="state_dict")
    yield "step 2 was synced"
    job.stage(2, {"optim": state(-2.0)}, also=("model",))
    job.commit(2, "model", "optim")
    yield "step 2 was saved"
    open_run(root, "second", 1)
    yield "run 2 began at step 1"
    save(job, 2, 2.5, run=2)
    yield "run 2 replaced step 2"
    save(job, 3, 3.0, run=2)
    yield "step 3 was saved, over spare files"
    pin(root, 1, "the best")
    tag(root, 2, "good")
    yield "step 1 was pinned, step 2 tagged"
    save(job, 4, 4.0, run=2)
    prune(job)
    yield "step 4 was saved, step 3 removed"
    unpin(root, 1)
    unpin(root, "good")
    yield "the pins were taken back"
    with acquire_commit_lock(root):
        mark_corrupted(root, 4, Corruption({"actor/x.pt": "is missing"}, 0.0))
        repair_latest_pointer(root, "checkpoint")
    yield "step 4 was found corrupted"
    with acquire_commit_lock(root):
        remove_mark(root / "global_step_4")
        repair_latest_pointer(root, "checkpoint")
    yield "step 4 was restored"
    rewind(root, 1, clock=lambda: 0.0)
    yield "back at step 1"
    save(job, 3, 3.5, run=3)
    yield "step 3 was saved by run 3"
    prune(job)
    yield "all but step 3 was removed"


def a_step_that_is_replaced(job: Job) -> Iterator[str]:
    for run, value in ((1, 1.0), (2, 2.0)):
        open_run(job.root, str(run), 0)
        save(job, 1, value, run=run)
        yield f"run {run} saved step 1"


def record(folder: Path, life: Callable[[Job], Iterator[str]] = a_whole_life) -> Recording:
    root = folder / "ckpts"
    root.mkdir()
    job = Job(root, open_job_spool(folder / "spool", root))
    recording = Recording(root)
    with pytest.MonkeyPatch.context() as patch, recording.running():
        patch.setattr(block_reuse, "WORTHWHILE", 1000)
        patch.setattr(persist, "WORTHWHILE", 1000)
        for done in life(job):
            recording.done(done)
    for stager in job.stagers.values():
        stager.close()
    return recording


class Checker:
    """Makes disks in a folder, and says what is wrong with them."""

    def __init__(self, folder: Path, recording: Recording) -> None:
        self.recording = recording
        self._folder = folder
        self._known: dict[Any, tuple[View, View]] = {}
        self._went_on: set[View] = set()

    @property
    def disks(self) -> int:
        return len(self._known)

    def problems(self, others: float = OTHERS, seed: int = 1) -> Iterator[str]:
        """Goes through all instants, and through the disks that each may leave."""
        since, before = 0, "nothing was done"
        returned = dict(self.recording.acknowledged)
        seen: list[View] = []
        for instant in range(len(self.recording.changes) + 1):
            if instant in returned:
                since, before, seen = instant, returned[instant], []
            seen.append(self._views(after(self.recording, instant))[0])
            random = Random(f"{seed}/{instant}")
            some = int(others * (instant + 1)) - int(others * instant)
            for disk in cuts(self.recording, instant, random, some):
                for problem in self._wrong_with(disk, seen):
                    yield (
                        f"the power goes {instant - since} changes after {before!r} "
                        f"(change {instant}): {problem}"
                    )

    def _wrong_with(self, disk: Disk, seen: list[View]) -> Iterator[str]:
        found, mended = self._views(disk)
        for when, view in (("", found), (" once it is mended", mended)):
            if view.torn:
                yield f"read as good{when}: {view.torn}"
            for at, (kind, commit) in enumerate(view.newest):
                if commit not in [each.newest[at][1] for each in seen]:
                    yield f"the newest {kind}{when} is {commit and commit[:2]}"
            if lost := frozenset.intersection(*(each.steps for each in seen)) - view.steps:
                yield f"lost{when}: {sorted(commit[:2] for commit in lost)}"
            if unknown := view.steps - frozenset.union(*(each.steps for each in seen)):
                yield f"never there{when}: {sorted(commit[:2] for commit in unknown)}"
            if not when and view.pointers not in [each.pointers for each in seen]:
                yield f"the iteration files name {view.pointers}"
            if view.pins not in [each.pins for each in seen]:
                yield f"pinned{when}: {sorted(view.pins)}"
            if view.run not in [each.run for each in seen]:
                yield f"the newest run{when} is {view.run}"

    def _views(self, disk: Disk) -> tuple[View, View]:
        """What there is at once, and after the repairs and a look at the pointers."""
        picture = disk.picture()
        if picture not in self._known:
            root = self._folder / "disk" / "ckpts"
            root.parent.mkdir()
            disk.build(root)
            found = mended = view(root)
            if [finding for repair in FILE_REPAIRS for finding in repair(root)]:
                mended = view(root)
            assert all(
                kind in require_committed(root, step).kinds
                for kind in KINDS
                if (step := read_latest_pointer(root, kind)) is not None
                and dict(mended.newest)[kind]
            )
            if not mended.torn:
                self._can_go_on(root, mended)
            self._known[picture] = found, mended
            shutil.rmtree(root.parent)
        return self._known[picture]

    def _can_go_on(self, root: Path, mended: View) -> None:
        """The newest checkpoint loads, and the next one can be committed."""
        commit = dict(mended.newest)["checkpoint"]
        if mended in self._went_on:
            return
        self._went_on.add(mended)
        if commit:
            ranks = max(record.world_size for record in require_committed(root, commit[1]).files)
            load_states(root, commit[1], "actor", world_size=ranks)
        commit_files(root, 99, run=max(mended.run, commit[0] if commit else 1))
        assert find_newest(root).step == read_latest_pointer(root, "checkpoint") == 99


def problems_of(folder: Path, life: Callable[[Job], Iterator[str]]) -> str:
    return "\n".join(Checker(folder, record(folder, life)).problems())


def a_save(job: Job) -> Iterator[str]:
    open_run(job.root, "first", 0)
    job.stage(1, {"model": state(1.0)})
    job.commit(1)
    yield "step 1 was saved"


def steps_that_share_a_file(job: Job) -> Iterator[str]:
    open_run(job.root, "first", 0)
    for step in (1, 2, 3):
        job.stage(step, {"model": state(step), "optim": state(-1.0)})
        job.commit(step, "model", "optim")
        (optimizer,) = step_folder(job.root, step).glob("actor/optim*")
        assert (optimizer.stat().st_nlink > 1) == (step > 1)
        yield f"step {step} was saved"
        prune(job)
        yield f"all but step {step} was removed"


def a_pin(job: Job) -> Iterator[str]:
    job.stage(1, {"model": state(1.0)})
    job.commit(1)
    pin(job.root, 1)
    unpin(job.root, 1)
    yield "it was pinned and unpinned"


def steps_in_parts(job: Job) -> Iterator[str]:
    """Of two ranks, with a file in each part of a manifest."""

    def stage(run: int, kind: Kind, component: str, **other: Any) -> None:
        for rank in range(2):
            states = {component: state(rank + run / 10)}
            job.stage(1, states, rank=rank, kind=kind, run=run, **other)

    job.world_size = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_files, "PART_FILES", 1)
        open_run(job.root, "first", 0)
        stage(1, "state_dict", "model")
        job.commit(1, kind="state_dict")
        yield "step 1 was synced"
        stage(1, "checkpoint", "optim", also=("model",))
        job.commit(1, "model", "optim")
        yield "step 1 was saved"
        assert len([*job.root.glob("global_step_1/manifest-*.json")]) == 4
        open_run(job.root, "second", 0)
        stage(2, "checkpoint", "model")
        job.commit(1, run=2)
        yield "run 2 replaced step 1"


def steps_reduced_to_weights(job: Job) -> Iterator[str]:
    """With a file in each part of a manifest; a save makes the last of them whole again."""
    rules = Rules(parse_policy("last=1"), ALL, models=parse_policy("every=2"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_files, "PART_FILES", 1)
        open_run(job.root, "first", 0)
        for step in (1, 2, 3):
            save(job, step, float(step))
            yield f"step {step} was saved"
        prune_root(job.root, plan_prune(job.root, rules, now=0))
        assert read_manifest(job.root, 2).removed == ("optim",)
        yield "step 1 was removed, and all but the weights of step 2"
        save(job, 2, 2.0)
        yield "step 2 was saved again"


@contextmanager
def another_job(job: Job) -> Iterator[Job]:
    """A job whose root is not recorded, with no step of its own."""
    root = job.root.parent / "other"
    root.mkdir()
    made = Job(root, open_job_spool(job.root.parent / "spool", root))
    yield made
    for stager in made.stagers.values():
        stager.close()


def an_upload(job: Job) -> Iterator[str]:
    """Of another job's steps, into the folder that is recorded."""
    url = f"file://{job.root}"
    with another_job(job) as source:
        save(source, 1, 1.0)
        replicate(source.root, url, 1, parallel=1)
        yield "step 1 was copied"
        save(source, 1, 2.0, run=2)
        replicate(source.root, url, 1, parallel=1)
        yield "step 1 of run 2 was copied"
        save(source, 2, 3.0, run=2)
        replicate(source.root, url, 2, parallel=1)
        prune_remote(source.root, url, Rules(parse_policy("last=1"), ALL))
        yield "step 2 was copied, step 1 removed"


def a_download(job: Job) -> Iterator[str]:
    """From the copies of another job, into the root that is recorded."""
    url = f"file://{job.root.parent}/copies"
    with another_job(job) as source:
        for run, value in ((1, 1.0), (2, 2.0)):
            save(source, 1, value, run=run)
            replicate(source.root, url, 1)
            fetch(url, 1, job.root, replace=True, parallel=1)
            yield f"step 1 of run {run} was fetched"


def a_removal(job: Job) -> Iterator[str]:
    save(job, 1, 1.0)
    save(job, 2, 2.0)
    yield "two steps were saved"
    prune(job)
    yield "step 1 was removed"


@pytest.mark.parametrize("life", [an_upload, a_download])
def test_copies_are_durable_before_their_manifest(
    spool_folder: Path, life: Callable[[Job], Iterator[str]]
) -> None:
    assert not problems_of(spool_folder, life)


@pytest.mark.parametrize(
    "life", [steps_in_parts, steps_that_share_a_file, steps_reduced_to_weights]
)
def test_what_a_manifest_names_is_durable_before(
    spool_folder: Path, life: Callable[[Job], Iterator[str]]
) -> None:
    assert not problems_of(spool_folder, life)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no_exchange"])
def test_whenever_the_power_goes_the_old_or_the_new_steps_are_found(
    spool_folder: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:  # as on NFS
        nothing = SimpleNamespace(CDLL=lambda *_, **__: None)
        monkeypatch.setattr(atomic, "ctypes", nothing)
    life = a_whole_life if exchange else a_step_that_is_replaced
    checker = Checker(spool_folder, record(spool_folder, life))
    assert not list(checker.problems())
    print(f"{len(checker.recording.changes)} changes, {checker.disks} disks")


def test_a_step_that_is_removed_is_in_the_trash_before_its_name_ends(spool_folder: Path) -> None:
    changes = record(spool_folder, a_removal).changes
    (moved,) = (
        at for at, each in enumerate(changes) if isinstance(each, Names) and len(each.where) == 2
    )
    synced = [each.what for each in changes[moved:] if isinstance(each, Synced)]
    (trash,) = changes[moved].where - {0}
    assert synced.index(trash) < synced.index(0)


UNSYNCED = SimpleNamespace(**{**vars(os), "fsync": lambda fd: None})
REPLACE_UNSYNCED = partial(replace_file, sync=False)


@pytest.mark.parametrize(
    ("life", "module", "name", "instead", "reported"),
    [
        (a_save, direct_io, "os", UNSYNCED, "read as good: .*model_world_size_1_rank_0.pt"),
        (a_save, replace, "sync_folder", lambda folder: None, "lost: .*1, 1"),
        (a_save, locks, "sync_folder", lambda folder: None, "the newest run is 0"),
        (a_pin, steps_in_use, "sync_folder", lambda folder: None, r"pinned: \[\(1, ''\)\]"),
        (steps_in_parts, manifest_files, "replace_file", REPLACE_UNSYNCED, "lost: .*1, 1"),
        (an_upload, remote_root, "sync_file", lambda path: None, "read as good: .*model_world"),
        (an_upload, remote_root, "sync_folder", lambda folder: None, "read as good: .*model_world"),
        (a_download, download, "os", UNSYNCED, "read as good: .*model_world"),
        (a_download, download, "sync_folders", lambda folder, paths: None, "lost: .*1, 1"),
    ],
    ids=[
        *("bytes", "names", "run", "unpin", "parts"),
        *("uploaded", "manifest removed", "downloaded", "downloaded names"),
    ],
)
def test_a_sync_that_is_left_out_is_noticed(
    spool_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    life: Callable[[Job], Iterator[str]],
    module: ModuleType,
    name: str,
    instead: Any,
    reported: str,
) -> None:
    monkeypatch.setattr(module, name, instead)
    assert re.search(reported, problems_of(spool_folder, life))
