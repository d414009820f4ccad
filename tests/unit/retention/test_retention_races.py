"""Retentions, saves and readers at once, in processes of their own: nothing is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.steps import commit_files
from trinity_sync.layout import steps_on_disk
from trinity_sync.storage.discovery import find_newest, require_committed
from trinity_sync.storage.manifest import read_manifest

BEGIN = """
import json, sys, time
from contextlib import ExitStack
from pathlib import Path
from tests.support.steps import MODEL, commit_files
from trinity_sync.errors import CommitError
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.layout import steps_on_disk
from trinity_sync.retention.policies import ALL, parse_policy
from trinity_sync.retention.removal import Rules, plan_removals
from trinity_sync.retention.prune import prune
from trinity_sync.retention.prune import plan_prune
from trinity_sync.storage.discovery import find_newest, read_step_state, require_committed
from trinity_sync.storage.steps_in_use import lease_to_read
root = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
"""
RETAIN = """
removed = []
while not (root / "stop").exists():
    rules = Rules(parse_policy(sys.argv[2]), parse_policy("last=1"))
    made = plan_prune(root, rules, 0)
    removed += [each.step for each in prune(root, made).removed]
print(json.dumps(removed))
"""
SAVE = """
for step in range(100, 160):
    with acquire_commit_lock(root):  # as a commit does
        commit_files(root, step, optim=True)
    assert find_newest(root).step == step
(root / "stop").touch()
print("null")
"""
READ = """
read = 0
while not (root / "stop").exists():
    step = find_newest(root).step
    with ExitStack() as leased:
        try:
            leased.enter_context(lease_to_read(root, step, "reader"))
        except CommitError:
            continue  # it went between the question and the lease
        for _ in range(5):
            manifest = require_committed(root, step)
            assert len((root / f"global_step_{step}" / MODEL).read_bytes()) == 1000
        read += 1
print(json.dumps(read))
"""
REDUCE = """
reduced = []
while not (root / "stop").exists():
    plan = plan_prune(root, Rules(parse_policy("last=1"), ALL, models=ALL), 0)
    reduced += prune(root, plan).changed
print(json.dumps(reduced))
"""
READ_ALL = """
while not (root / "stop").exists():
    for step in steps_on_disk(root):
        found = read_step_state(root, step)  # without a lease
        assert found.state in ("valid", "not committed"), found.reason
        with lease_to_read(root, step, "reader") if found.manifest else ExitStack() as manifest:
            for each in manifest.files if found.manifest else ():
                path = root / f"global_step_{step}" / each.path
                assert digest_cached_file(path) == each.digest
print("null")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "ckpts"
    made.mkdir()
    for step in range(20):
        commit_files(made, step)
    return made


def at_once(root: Path, *bodies: tuple[str, ...]) -> list:
    """Run each body with its arguments in a process; what they print in the end."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + body, str(root), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for body, *arguments in bodies
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(output) for output in outputs]


def test_saves_readers_and_two_retentions_at_once_lose_nothing(root: Path) -> None:
    _, once, twice, read = at_once(
        root, (SAVE,), (RETAIN, "last=2"), (RETAIN, "last=3,every=10"), (READ,)
    )
    assert read > 0
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
    _, once, twice, _ = at_once(root, (SAVE,), (REDUCE,), (REDUCE,), (READ_ALL,))
    found = {step: read_manifest(root, step) for step in steps_on_disk(root)}
    assert [*found] == [*range(20), *range(100, 160)]
    assert {step for step, each in found.items() if each.removed} == {*once, *twice}
    assert find_newest(root).step == 159
