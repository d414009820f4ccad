"""Retentions, saves and readers at once, in processes of their own: nothing is lost."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import PRELOADED, forking
from tests.support.steps import MODEL, commit_files
from trinity_sync.errors import CommitError
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.layout import steps_on_disk
from trinity_sync.retention.policies import ALL, parse_policy
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.storage.discovery import find_newest, read_step_state, require_committed
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.steps_in_use import lease_to_read


def retain(root: Path, keep: str) -> list[int]:
    removed = []
    rules = Rules(parse_policy(keep), parse_policy("last=1"))
    while not (root / "stop").exists():
        made = plan_prune(root, rules, 0)
        removed += [each.step for each in prune(root, made).removed]
    return removed


def reduce(root: Path) -> list[int]:
    reduced = []
    rules = Rules(parse_policy("last=1"), ALL, models=ALL)
    while not (root / "stop").exists():
        reduced += prune(root, plan_prune(root, rules, 0)).changed
    return reduced


def save(root: Path) -> None:
    for step in range(100, 160):
        with acquire_commit_lock(root):  # as a commit does
            commit_files(root, step, optim=True)
        assert find_newest(root).step == step
    (root / "stop").touch()


def read(root: Path) -> int:
    times = 0
    while not (root / "stop").exists():
        step = find_newest(root).step
        with ExitStack() as leased:
            try:
                leased.enter_context(lease_to_read(root, step, "reader"))
            except CommitError:
                continue  # it went between the question and the lease
            for _ in range(5):
                require_committed(root, step)
                assert len((root / f"global_step_{step}" / MODEL).read_bytes()) == 1000
            times += 1
    return times


def read_all(root: Path) -> None:
    while not (root / "stop").exists():
        for step in steps_on_disk(root):
            found = read_step_state(root, step)  # without a lease
            assert found.state in ("valid", "not committed"), found.reason
            with lease_to_read(root, step, "reader") if found.manifest else ExitStack() as manifest:
                for each in manifest.files if found.manifest else ():
                    path = root / f"global_step_{step}" / each.path
                    assert digest_cached_file(path) == each.digest


@pytest.fixture
def root(root: Path) -> Path:
    for step in range(20):
        commit_files(root, step)
    return root


def at_once(root: Path, *calls: tuple[Any, ...]) -> list[Any]:
    """Call functions with the root and more, each in a process; return what they return."""
    with forking(*PRELOADED) as context:
        all_have_come: Callable[[], object] = context.Barrier(len(calls)).wait
        with ProcessPoolExecutor(len(calls), context, all_have_come) as pool:
            try:
                running = [pool.submit(call, root, *more) for call, *more in calls]
                return [each.result(120) for each in running]
            finally:
                (root / "stop").touch()


def test_saves_readers_and_two_retentions_at_once_lose_nothing(root: Path) -> None:
    _, once, twice, times = at_once(
        root, (save,), (retain, "last=2"), (retain, "last=3,every=10"), (read,)
    )
    assert times > 0
    assert len(once + twice) == len(set(once + twice))  # each step was removed by one of them
    assert find_newest(root).step == 159
    left = steps_on_disk(root)
    assert {*left, *once, *twice} == {*range(20), *range(100, 160)}
    assert {158, 159} <= {*left}
    for step in left:
        require_committed(root, step)
    assert not any((root / ".trinity_sync/trash").iterdir())


@pytest.mark.slow
def test_saves_readers_and_two_reductions_at_once_find_each_step_whole_or_its_weights(
    root: Path,
) -> None:
    _, once, twice, _ = at_once(root, (save,), (reduce,), (reduce,), (read_all,))
    found = {step: read_manifest(root, step) for step in steps_on_disk(root)}
    assert [*found] == [*range(20), *range(100, 160)]
    assert {step for step, each in found.items() if each.removed} == {*once, *twice}
    assert find_newest(root).step == 159
