"""What must hold whatever happened, seen from outside: files, veRL's own way to them, Prefect.

After docs/concepts/save.md: what was said to be committed is there; every commit is whole, of one
step, and the state of that step to the last bit; the iteration file names a commit; a save that was
submitted is committed, or its failure was reported.
"""

import io
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field

import torch
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

from tests.integration.prefect_api import Api
from tests.models.chaos.training import KEEP, RANKS, Expected, digest
from tests.models.chaos.world import World
from trinity_sync.errors import CommitError, ManifestError
from trinity_sync.layout import shard_file, step_folder
from trinity_sync.saves.journal import Journal
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.storage.discovery import find_newest, read_corruption, require_committed
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.runs import find_superseding_run, list_runs
from trinity_sync.storage.save_timing import read_saves
from trinity_sync.storage.verify import check_files, choose_files

Commit = tuple[int, int]
"""Run and step."""


@dataclass
class History:
    """What was seen over the whole campaign."""

    expected: Expected = field(default_factory=Expected)
    committed: set[Commit] = field(default_factory=set)
    """Ever seen; retention removes older commits."""
    checked: set[tuple[Commit, float]] = field(default_factory=set)
    acknowledged: Commit = (0, 0)
    """The newest that a training was told of."""


def violations(world: World, history: History) -> Iterator[str]:
    """What does not hold now, while everything is under way."""
    yield from _newest_is_no_older(world, history)
    commits = world.commits()
    history.committed |= commits.keys()
    for commit, manifest in sorted(commits.items()):
        if (commit, manifest.committed_at) not in history.checked:
            yield from _whole(world, manifest, history)
            history.checked.add((commit, manifest.committed_at))
    yield from _verl_finds_a_commit(world)
    for note in world.notes("explorer"):
        if note["what"] in ("torn", "went back"):
            yield f"the explorer read what it must not: {note}"


def _newest_is_no_older(world: World, history: History) -> Iterator[str]:
    """Than what the training was told before."""
    told = [
        step
        for name in ("rank0", "rank0-second")
        for note in world.notes(name)
        if note["what"] == "committed"
        for step in note["steps"]
    ]
    found = find_newest(world.root)
    have = (found.run, found.step) if found else (0, 0)
    runs = {step: run for run, step in sorted(history.committed | world.commits().keys())}
    known = [(runs[step], step) for step in told if step in runs]
    for step in set(told) - runs.keys():
        if step > have[1]:
            yield f"step {step} was said to be committed and was never seen; the newest is {have}"
    history.acknowledged = max([history.acknowledged, *known])
    if have < history.acknowledged:
        yield f"the newest commit is {have}, but {history.acknowledged} was acknowledged"
    whole = sorted(known)[-KEEP:]
    for run, step in whole:
        if (run, step) >= history.acknowledged and not _is_there(world, step):
            # read after it: what has removed the step was committed before
            seen = history.committed | world.commits().keys()
            newer = sorted(each for each in seen if each > (run, step))
            if len(newer) < KEEP:
                yield f"step {step} of run {run} was acknowledged and is not there; newer: {newer}"


def _states_of(world: World, request: SaveRequest) -> Iterator[str]:
    """How flow runs and savers have ended a save, in Prefect's words."""
    if world.has_stack:
        yield from (each.state_name for each in Api().runs_of(request.key))
    journal = Journal.of(request)
    journal.read()
    if entry := journal.find(request.key):
        yield entry.state.title()


def _is_there(world: World, step: int) -> bool:
    with suppress(CommitError):
        require_committed(world.root, step)
        return True
    return False


def _whole(world: World, manifest: Manifest, history: History) -> Iterator[str]:
    """A commit that was not checked yet: digests, then what ``torch.load`` makes of it."""
    what = f"step {manifest.step} of run {manifest.run}"
    try:
        if corruption := read_corruption(world.root, manifest.step):
            yield f"{what} is corrupted: {corruption}"
        wrong = [
            each for each in check_files(choose_files(world.root, step=manifest.step)) if each.wrong
        ]
        states = [_states(world, manifest, rank) for rank in range(RANKS)]
    except (CommitError, FileNotFoundError) as error:
        if _still(world, manifest):
            yield f"{what} does not load: {error}"
        return  # retention, or a later run, was faster
    if not _still(world, manifest):
        return
    yield from (f"{what}: {each.file.record.path} {each.wrong}" for each in wrong)
    for rank, state in enumerate(states):
        if state["extra_state"] != {"step": manifest.step, "rank": rank}:
            yield f"{what} has {state['extra_state']} for rank {rank}"
        if digest(state) != history.expected[manifest.step]:
            yield f"{what}: the state of rank {rank} is not that of the step"


def _states(world: World, manifest: Manifest, rank: int) -> dict[str, dict]:
    folder = step_folder(world.root, manifest.step) / "actor"
    return {
        name: torch.load(folder / shard_file(name, RANKS, rank), weights_only=False)
        for name in ("model", "optim", "extra_state")
    }


def _still(world: World, manifest: Manifest) -> bool:
    """Whether the step is the same commit as before, so that what was read counts."""
    try:
        now = read_manifest(world.root, manifest.step)
    except ManifestError:
        return True
    return now is not None and (now.run, now.committed_at) == (manifest.run, manifest.committed_at)


def _verl_finds_a_commit(world: World) -> Iterator[str]:
    """veRL goes by the iteration file; between two looks, retention may remove what it named."""
    for _ in range(3):
        with redirect_stdout(io.StringIO()):  # it prints what it finds
            found = find_latest_ckpt_path(str(world.root))
        if found is None or read_manifest(world.root, int(found.rpartition("_")[2])):
            return
    yield f"veRL's loader finds {found}, which has no manifest"


@dataclass(frozen=True)
class Fates:
    """What became of the saves that all ranks had submitted."""

    committed: int
    refused: int
    """Superseded by a later run, as they must be."""
    told: list[str]
    """Failed, and said so."""
    lost: list[str]
    """Neither committed nor reported: there must be none."""


def fates(world: World, history: History, submitted: set[Commit]) -> Fates:
    """Ask for each save, once all is at rest, what became of it."""
    runs = {run.number: run for run in list_runs(world.root)}
    failures = "\n".join(  # a line each
        str(note.get("why"))
        for name in ("rank0", "rank1", "rank0-second", "rank1-second")
        for note in world.notes(name)
        if note["what"] == "failed"
    )
    logs = world.log("rank0") + world.log("rank1") + world.log("rank0-second")
    logged = {(each.run, each.step) for each in read_saves(world.root)}
    told, lost, refused, pruned = [], [], 0, 0
    open_ = sorted(submitted - history.committed)
    for run, step in open_:
        if find_superseding_run(runs.values(), run, step):
            refused += 1
            continue
        fields = {"run_key": runs[run].key, "identity": read_identity(world.root)}
        request = SaveRequest(root=str(world.root), run=run, step=step, **fields)
        states = [*_states_of(world, request)]
        newer = [each for each in history.committed if each > (run, step)]
        done = "Completed" in states or (run, step) in logged
        if done and len(newer) >= KEEP:  # and removed, between two looks
            pruned += 1
            continue
        said = f"step {step} " in failures or f"step {step}," in logs or f"step {step} " in logs
        if {"Failed", "Crashed", "Cancelled"} & {*states} or said:
            why = [line for line in failures.splitlines() if f"step {step} " in line]
            told.append(f"step {step} of run {run}: {states} {''.join(why[:1])[:300]}")
        else:
            lost.append(f"step {step} of run {run}: flow runs {states}")
    return Fates(len(submitted & history.committed) + pruned, refused, told, lost)
