"""What is equal on several ranks is saved once, by the first of them, and loaded by all."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.disk import drop_cached
from tests.support.dtensors import make_dtensor, make_mesh
from tests.support.forked import Program
from tests.support.job import Job
from tests.support.savers import await_that
from tests.unit.conftest import Open
from trinity_sync import CheckpointCoordinator, Checkpoints
from trinity_sync.client import commit_watcher
from trinity_sync.errors import CommitError, ConfigError, MissingShardsError, SaveTimeoutError
from trinity_sync.layout import FULL_CHECKPOINT_MARK, shard_file, step_folder
from trinity_sync.pipeline.pending import find_pending_saves
from trinity_sync.snapshot import slot_pool
from trinity_sync.snapshot.ticket import list_components
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.restore import load_shards, load_states

REPLICATED = ("model", "optim")


def states(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"w": torch.arange(5000.0)},
        "optim": {"m": torch.ones(5000)},
        "extra_state": {"rng": torch.full((3,), float(rank))},
    }


@pytest.fixture
def ranks(coordinator_of: Open, job: Job) -> list[CheckpointCoordinator]:
    job.world_size = 2
    return [coordinator_of(rank=rank, world_size=2) for rank in (0, 1)]


def commit(job: Job, step: int) -> None:
    job.commit(step, "model", "optim", "extra_state")


def test_it_is_one_file_that_all_ranks_load(ranks: list[CheckpointCoordinator], job: Job) -> None:
    """The others may pass it, and have no image of it."""
    for rank, saves in enumerate(ranks):
        saves.save(4, states(rank), replicated=REPLICATED)
    tickets = [sealed.ticket for sealed in job.spool.tickets()[0]]
    assert sorted((each.component, each.rank) for each in tickets) == [
        ("extra_state", 0),
        ("extra_state", 1),
        ("model", 0),
        ("optim", 0),
    ]
    commit(job, 4)
    commit(job, 4)  # a retry
    files = {path.name for path in (step_folder(job.root, 4) / "actor").iterdir()}
    assert files == {
        "model_world_size_1_rank_0.pt",
        "optim_world_size_1_rank_0.pt",
        "extra_state_world_size_2_rank_0.pt",
        "extra_state_world_size_2_rank_1.pt",
    }
    model = torch.nn.ParameterDict({"w": torch.zeros(5000)})
    Checkpoints(job.root).load_into(4, model)
    assert torch.equal(model["w"], torch.arange(5000.0))


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "each rank saves it"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_loads_it(
    ranks: list[CheckpointCoordinator],
    job: Job,
    coordinator_of: Open,
    caplog: pytest.LogCaptureFixture,
    declared: bool,
    world_size: int,
) -> None:
    for rank, saves in enumerate(ranks):
        saves.save(4, states(rank), replicated=REPLICATED if declared else ())
    commit(job, 4)
    for rank in range(world_size):
        saves = coordinator_of(rank=rank, world_size=world_size, run_key="next")
        weights = torch.zeros(5000)
        loaded = saves.load_into(4, {"model": {"w": weights}})
        assert torch.equal(weights, torch.arange(5000.0))
        assert torch.equal(loaded["optim"]["m"], torch.ones(5000))
        extra = loaded.get("extra_state")
        assert (extra and extra["rng"].tolist()) == ([rank] * 3 if rank < 2 else None)
    assert ("rank 2 of 3 gets no extra_state" in caplog.text) == (world_size == 3)


def test_what_one_process_has_saved_is_loaded_by_several_ranks(
    job: Job, coordinator_of: Open
) -> None:
    coordinator_of().save(4, states(0))
    commit(job, 4)
    for rank in (0, 1):
        loaded = coordinator_of(rank=rank, world_size=2, run_key="next").load(4)
        assert torch.equal(loaded["model"]["w"], torch.arange(5000.0))
        assert ("extra_state" in loaded) == (rank == 0)


def test_shards_are_loaded_by_as_many_ranks_only(
    ranks: list[CheckpointCoordinator], job: Job, coordinator_of: Open
) -> None:
    for rank, saves in enumerate(ranks):
        saves.save(4, {**states(rank), "model": {"w": torch.full((9,), float(rank))}})
    commit(job, 4)
    alone = coordinator_of(run_key="next")
    for load in (alone.load, partial(alone.load_into, states={"model": {"w": torch.zeros(9)}})):
        with pytest.raises(
            CommitError, match=r"saved by 2 rank\(s\), and .* export dcp .*/ckpts 4"
        ):
            load(4)


RANK = """
import sys, torch
import torch.distributed as dist
from pathlib import Path
from tests.support.disk import count_read
from trinity_sync import CheckpointCoordinator, Settings
rank, rendezvous, spool, root = sys.argv[1:]
dist.init_process_group("gloo", f"file://{rendezvous}", rank=int(rank), world_size=3)
settings = Settings(spool=spool, home=spool)
saves = CheckpointCoordinator.of_process_group(root, settings=settings)
live = {"w": torch.zeros(4 << 20)}
before = count_read()
loaded = saves.load_into(4, {"model": live})
print(count_read() - before, int(live["w"].sum() + loaded["optim"]["m"].sum()))
saves.close(timeout=0)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "how", [{"replicated": REPLICATED}, {"replicas": dict.fromkeys(REPLICATED, (0, 1, 2))}], ids=str
)
def test_all_ranks_of_a_node_read_it_from_the_disk_once(
    job: Job, tmp_path: Path, spool_folder: Path, how: dict[str, Any]
) -> None:
    """What is filled in place, and what is loaded."""
    job.world_size, size = 3, 4 << 20
    own = {"model": {"w": torch.ones(size)}, "optim": {"m": torch.ones(size)}}
    for rank in range(3):
        more = {} if rank else own
        job.stage(4, {"extra_state": {}, **more}, rank=rank, **how)
    commit(job, 4)
    for component in REPLICATED:
        (path, *_) = (step_folder(job.root, 4) / "actor").glob(f"{component}_*")
        drop_cached(path)
    given = [tmp_path / "rendezvous", spool_folder / "of_the_ranks", job.root]
    ranks = [Program(RANK, rank, *given) for rank in range(3)]
    said = [rank.end().split() for rank in ranks]
    assert {total for _, total in said} == {str(2 * size)}
    assert sum(int(nbytes) for nbytes, _ in said) < 1.5 * 2 * 4 * size


def test_a_step_is_not_committed_without_that_of_rank_0(
    ranks: list[CheckpointCoordinator], job: Job
) -> None:
    ranks[1].save(4, states(1), replicated=REPLICATED)
    with pytest.raises(MissingShardsError, match="rank 0"):
        commit(job, 4)


def test_ranks_that_have_nothing_else_commit_with_an_empty_extra_state(
    ranks: list[CheckpointCoordinator], job: Job, coordinator_of: Open
) -> None:
    state = {"model": {"w": torch.arange(5000.0)}}
    ranks[0].save(4, state, replicated=("model",))
    with pytest.raises(MissingShardsError, match="rank 1"):
        job.commit(4, "model", "extra_state")
    ranks[0].save(5, state, replicated=("model",))
    ranks[1].save(5, {}, replicated=("model",))
    job.commit(5, "model", "extra_state")
    for rank, world_size in ((0, 2), (1, 2), (2, 3)):
        again = coordinator_of(rank=rank, world_size=world_size, run_key="next")
        assert torch.equal(again.load(5)["model"]["w"], torch.arange(5000.0))
    assert len(list(step_folder(job.root, 5).rglob("model_*"))) == 1


def test_a_wait_names_the_ranks_that_have_not_called_save(
    ranks: list[CheckpointCoordinator],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot_pool, "LONG_WAIT_S", 0.0)
    ranks[0].save(4, states(0))
    with pytest.raises(SaveTimeoutError, match="waits for rank 1 of this node: every rank has to"):
        ranks[0].wait_all(0.1)
    ranks[0].save(5, states(0))  # into the last slot
    ranks[0].emergency_save(6, states(0), deadline_s=1.0)
    assert "Step 4 waits for rank 1 of this node: every rank has to call save" in caplog.text


def test_the_first_save_says_which_role_it_waits_for_that_the_training_does_not_have(
    coordinator_of: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_watcher, "SAY_S", 0.0)
    monkeypatch.setattr(commit_watcher, "CARE_S", 0.05)
    coordinator_of(roles=("actor", "critic")).save(4, states(0))
    await_that(lambda: "Step 4 waits for role critic" in caplog.text, "it says so")
    assert "leave it out of TRINITY_SYNC_ROLES" in caplog.text


def test_what_cannot_be_replicated_is_refused(ranks: list[CheckpointCoordinator]) -> None:
    with pytest.raises(ConfigError, match="leave extra_state out of it"):
        ranks[1].save(4, states(1), replicated=("model", "optim", "extra_state"))
    with pytest.raises(ConfigError, match="pass a tuple of components that rank 0 saves"):
        ranks[0].save(4, {"extra_state": {}}, replicated=("model",))
    with pytest.raises(ConfigError, match="in a checkpoint"):
        ranks[0].save(4, states(0), replicated=("model",), kind="state_dict")


REPLICAS = ((0, 2), (1, 3))
"""Ranks with the same shards."""


def stage_shards(job: Job, step: int, *, without: tuple[int, ...] = ()) -> None:
    """Stage as four ranks with HSDP do; those ``without`` a model lose it."""
    job.world_size = 4
    for ranks in REPLICAS:
        for rank in ranks:
            own = {"extra_state": states(rank)["extra_state"]}
            if rank == ranks[0] and rank not in without:
                own["model"] = {"w": torch.full((5000,), float(rank))}
            job.stage(step, own, rank=rank, replicas={"model": ranks})


def test_a_commit_of_shards_with_several_names_is_repeated_without_effect(job: Job) -> None:
    stage_shards(job, 4)
    first = job.commit(4, "model", "extra_state")
    committed = read_manifest(job.root, 4)
    job.commit(4, "model", "extra_state")
    assert read_manifest(job.root, 4) == committed
    folder = step_folder(job.root, 4)
    model = [record for record in first.files if record.component == "model"]
    assert sorted(record.rank for record in model) == [0, 1, 2, 3]
    inodes = {record.rank: (folder / record.path).stat().st_ino for record in model}
    assert inodes[0] == inodes[2] != inodes[1] == inodes[3]
    loaded = load_states(job.root, 4, "actor", rank=3, world_size=4)
    assert torch.equal(loaded["model"]["w"], torch.ones(5000))
    assert loaded["extra_state"]["rng"].tolist() == [3.0] * 3
    assert not [path for path in folder.rglob(".*") if path.name != FULL_CHECKPOINT_MARK]


def test_the_shard_of_another_rank_is_loaded_from_its_slot(job: Job) -> None:
    stage_shards(job, 4)
    job.commit(4, "model", "extra_state")
    paths = [f"actor/{shard_file('model', 4, rank)}" for rank in range(4)]
    shards = load_shards(job.root, 4, paths, spool=job.spool)
    assert [shard.source for shard in shards] == ["spool"] * 4


def test_a_shard_that_none_of_its_ranks_has_saved_is_missing(job: Job) -> None:
    stage_shards(job, 4, without=(1,))
    with pytest.raises(MissingShardsError, match=r"lacks model of ranks 1,3"):
        job.commit(4, "model", "extra_state")


def test_tickets_of_other_ranks_name_what_rank_0_saves(
    ranks: list[CheckpointCoordinator], job: Job
) -> None:
    """What commits the save may find them first, and looks for what they name."""
    ranks[1].save(4, states(1), replicated=REPLICATED)
    (request,) = find_pending_saves(job.spool, grace_s=0)
    ranks[0].save(4, states(0), replicated=REPLICATED)
    committed = job.commit(4, *request.components)
    assert {*REPLICATED} < {each.component for each in committed.files}


def test_tickets_of_one_replica_name_what_the_other_saves(job: Job) -> None:
    stage_shards(job, 4)
    tickets = [sealed.ticket for sealed in job.spool.tickets()[0]]
    assert "model" in list_components([each for each in tickets if each.rank > 1])


@pytest.mark.parametrize(("saved_by", "ranks"), [(1, 2), (2, 4)])
def test_shards_that_are_equal_on_all_ranks_are_no_replicas(
    coordinator_of: Open, job: Job, saved_by: int, ranks: int
) -> None:
    job.world_size = saved_by
    for rank in range(saved_by):
        mesh = make_mesh("cpu", 0, saved_by)
        weight = make_dtensor(torch.zeros(4), mesh, torch.Size([4 * saved_by]))
        coordinator_of(rank=rank, world_size=saved_by).save(4, {"model": {"w": weight}})
    job.commit(4, "model")
    other = coordinator_of(rank=1, world_size=ranks, run_key="next")
    with pytest.raises(CommitError, match="load it with as many ranks"):
        other.load(4)
