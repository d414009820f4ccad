"""A restart asks the file system for as much a rank with many ranks as with few."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.path_calls import watch_path_calls
from benchmarks.restarts import Ranks, commit_step, restart
from tests.support.disk import flip_a_byte
from tests.support.forked import Program
from tests.support.job import Job
from tests.unit.client.conftest import Saves
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import CommitError
from trinity_sync.layout import shard_file, step_folder
from trinity_sync.settings import Settings
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.restore import load_bytes, load_states
from trinity_sync.storage.runs import list_runs
from trinity_sync.storage.steps_in_use import list_leases

RANKS = 8


def test_64_ranks_check_the_step_once_and_take_one_lease(tmp_path: Path) -> None:
    found = restart(tmp_path, 64)
    assert found.is_linear, found.row


def load_on_all(root: Path, when: Callable[[int, str, str], object]) -> list[Exception]:
    """Load step 1 on all ranks; return their errors. ``when`` is told of the calls of each rank."""
    group = Ranks(RANKS)

    def load(rank: int) -> None:
        settings = Settings(spool=root.parent / "spool", home=root.parent)
        with CheckpointCoordinator.of_process_group(root, settings=settings) as saves:
            saves.load(1)

    with watch_path_calls(lambda kind, path: when(group.at_work, kind, path), root):
        return group.run(load)


@pytest.fixture
def root(root: Path) -> Path:
    """The root of a job of which 8 ranks have committed step 1."""
    commit_step(root, RANKS)
    return root


def test_the_lease_of_all_ranks_is_held_until_the_last_has_read(root: Path) -> None:
    held: list[list[str]] = []
    looking: list[int] = []

    def look(rank: int, kind: str, path: str) -> None:
        if kind == "open" and path.endswith(f"_rank_{rank}.pt") and not looking:
            looking.append(rank)
            held.append([lease.holder for lease in list_leases(root)])
            looking.clear()

    assert load_on_all(root, look) == []
    assert held == [["load by all ranks"]] * (3 * RANKS)
    assert list_leases(root) == []
    assert [(run.number, run.resumed_from) for run in list_runs(root)][-1] == (2, 1)


def test_a_file_that_is_lost_after_the_check_fails_all_ranks_and_begins_no_run(root: Path) -> None:
    lost = step_folder(root, 1) / "actor" / shard_file("optim", RANKS, 5)

    def lose(rank: int, kind: str, path: str) -> None:
        if kind == "open" and "/leases/" in path:  # rank 0 has checked the step
            lost.unlink(missing_ok=True)

    failed = load_on_all(root, lose)
    assert len(failed) == RANKS
    assert {type(error) for error in failed} == {CommitError}
    assert all(lost.name in str(error) for error in failed)
    assert list_leases(root) == []
    assert len(list_runs(root)) == 1


def test_a_rank_that_loads_alone_checks_each_file_of_the_step_once(
    root: Path, settings: Settings
) -> None:
    calls: Counter[str] = Counter()
    with (
        CheckpointCoordinator(root, rank=3, world_size=RANKS, settings=settings) as saves,
        watch_path_calls(lambda kind, path: calls.update([path] if kind == "stat" else []), root),
    ):
        saves.load(1)
    of_the_step = {path: times for path, times in calls.items() if path.endswith(".pt")}
    assert len(of_the_step) == 3 * RANKS
    assert set(of_the_step.values()) == {1}


def test_a_rank_that_loads_alone_refuses_a_step_with_another_ranks_file_missing(
    root: Path, settings: Settings
) -> None:
    (step_folder(root, 1) / "actor" / shard_file("model", RANKS, 0)).unlink()
    with CheckpointCoordinator(root, rank=3, world_size=RANKS, settings=settings) as saves:
        assert saves.latest_step() is None
        with pytest.raises(CommitError, match=r"model_world_size_8_rank_0\.pt is missing"):
            saves.load(1)


def test_an_attachment_is_read_without_a_look_at_other_files(saves: Saves, job: Job) -> None:
    saves.attach("data.json", b"{}", step=4)
    saves.save(4, {"model": {"w": torch.zeros(3)}})
    job.commit(4, "model", "attachments")
    asked: list[str] = []
    with watch_path_calls(lambda kind, path: asked.append(path), job.root):
        assert saves.attachment(4, "data.json") == b"{}"
    assert not [path for path in asked if path.endswith(".pt")]


def test_bytes_beyond_the_end_of_a_file_are_noticed_where_only_one_rank_compares_sizes(
    root: Path,
) -> None:
    manifest = require_committed(root, 1)
    path = f"actor/{shard_file('model', RANKS, 2)}"
    with (step_folder(root, 1) / path).open("ab") as file:
        file.write(b"more")
    for load in (
        lambda: load_states(root, 1, "actor", rank=2, world_size=RANKS, manifest=manifest),
        lambda: load_bytes(root, 1, path, manifest=manifest),
    ):
        with pytest.raises(CommitError, match=rf"{path} is corrupted: it has .* bytes"):
            load()


RANK = """
import json, sys
import torch.distributed as dist
from trinity_sync import CheckpointCoordinator, CommitError, Settings
from trinity_sync.client import step_loader
rank, rendezvous, spool, root = sys.argv[1:]
dist.init_process_group("gloo", f"file://{rendezvous}", rank=int(rank), world_size=2)
saves = CheckpointCoordinator.of_process_group(root, settings=Settings(spool=spool, home=spool))
if rank == "1":  # whose view of the root is late
    step_loader.newest = lambda *_: None
said = [saves.latest_step(settle_s=0.2)]
try:
    saves.load(4)
except CommitError as error:
    said.append(str(error))
weights = saves.load(2)["model"]["w"]
with saves.open(2) as states:
    opened = states["model"]["w"].unique().tolist()
print(json.dumps([*said, weights.unique().tolist(), opened]))
saves.close(timeout=0)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("writable", [True, False])
def test_a_step_that_one_rank_cannot_load_is_loaded_by_none(
    job: Job,
    tmp_path: Path,
    spool_folder: Path,
    read_only: Callable[[Path], object],
    writable: bool,
) -> None:
    job.world_size = 2
    for step in (2, 4):
        for rank in (0, 1):
            job.stage(step, {"model": {"w": torch.full((20_000,), float(rank))}}, rank=rank)
        job.commit(step, "model")
    torn = job.root / "global_step_4/actor/model_world_size_2_rank_1.pt"
    flip_a_byte(torn, -9000)
    if not writable:
        read_only(job.root)
    given = [tmp_path / "rendezvous", spool_folder / "of_the_ranks", job.root]
    ranks = [Program(RANK, rank, *given) for rank in range(2)]
    one, other = (json.loads(rank.end()) for rank in ranks)
    assert one[:2] == other[:2]
    assert (one[0], torn.name in one[1]) == (4, True)
    assert [one[2:], other[2:]] == [[[0.0], [0.0]], [[1.0], [1.0]]]
