"""Ranks on several nodes: how a save knows of them, without Prefect and Ray."""

import asyncio
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.job import Job, Noted, find_orphaned_saves
from tests.unit.conftest import Open
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import CommitError, MissingShardsError, RootAwayError, SaveError
from trinity_sync.layout import FOLDERS
from trinity_sync.orchestration.on_node import persist_share
from trinity_sync.pipeline.save import Share
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import SaveId
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.snapshot.ticket import read_cached_file
from trinity_sync.storage.commit import commit, free_committed_slots
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import read_run_manifest
from trinity_sync.storage.persist import WriteOptions, persist
from trinity_sync.storage.placement import (
    NodeRanks,
    NodeShards,
    await_node_shards,
    format_ranks,
    group_by_node,
    parse_ranks,
    read_placement,
    write_placement,
)
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.save_functions import read_statuses

MODEL = {"model": {"w": torch.arange(100.0)}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def two_nodes(root: Path, spool_folder: Path) -> Iterator[list[Job]]:
    """Ranks 0 and 1 on node a, 2 and 3 on b, each with a memory of its own."""
    jobs = [Job(root, open_job_spool(spool_folder / node, root), world_size=4) for node in "ab"]
    yield jobs
    for job in jobs:
        job.close()


def shares_of(jobs: list[Job]) -> list[NodeShards]:
    folders = [str(job.spool.folder) for job in jobs]
    return [
        NodeShards("a", folders[0], {"actor": (0, 1)}),
        NodeShards("b", folders[1], {"actor": (2, 3)}),
    ]


def save_of(root: Path, run_key: str, *roles: str) -> SaveId:
    return SaveId(str(root), 1, run_key, 4, "checkpoint", roles)


@given(st.sets(st.integers(0, 5000), min_size=1))
def test_ranks_in_few_words_are_the_same_ranks(ranks: set[int]) -> None:
    assert parse_ranks(format_ranks(ranks)) == tuple(sorted(ranks))
    assert format_ranks(range(8)) == "0-7"


def test_what_a_save_asks_for_is_as_small_for_4096_ranks_as_for_one(
    root: Path, spool_folder: Path
) -> None:
    names = [f"ip-10-0-{n // 256}-{n % 256}.eu-west-1.compute.internal" for n in range(512)]
    where = [(names[rank // 8], f"/dev/shm/trinity_sync-1000/{root.name}") for rank in range(4096)]
    sizes = []
    for places in ((), group_by_node(where)):
        trigger = Noted()
        saves = CheckpointCoordinator(
            root,
            world_size=4096 if places else 1,
            places=places,
            run_key="0" * 32,
            settings=Settings(spool=spool_folder),
            trigger=trigger,
        )
        saves.save(len(sizes) + 1, MODEL)
        saves.close()
        (request,) = trigger.requests
        sizes.append(len(json.dumps(request.flow_run["parameters"])))
    assert sizes[0] == sizes[1] < 1000
    shares = await_node_shards(request.save, rank_timeout_s=0)
    assert [share.node for share in shares] == names
    assert shares[511].ranks == {"actor": tuple(range(4088, 4096))}
    assert len(pickle.dumps(shares[511])) < 1000  # what each task is given besides
    (file,) = root.glob(".trinity_sync/placements/*")
    assert file.stat().st_size < 64_000


def test_roles_of_separate_process_groups_may_be_on_other_nodes(root: Path) -> None:
    open_run(root, "key", 0)
    for role, nodes in (("actor", "ab"), ("critic", "bc")):
        write_placement(root, 1, "key", role, group_by_node([(node, "/s") for node in nodes]))
    shares = await_node_shards(save_of(root, "key", "actor", "critic"), rank_timeout_s=0)
    assert [(share.node, share.ranks) for share in shares] == [
        ("a", {"actor": (0,)}),
        ("b", {"actor": (1,), "critic": (0,)}),
        ("c", {"critic": (1,)}),
    ]
    assert [share.has_rank_0 for share in shares] == [True, True, False]


def test_a_role_that_has_not_said_where_it_is_is_named(root: Path) -> None:
    open_run(root, "key", 0)
    write_placement(root, 1, "key", "actor", [NodeRanks("a", "/s", (0,))])
    with pytest.raises(MissingShardsError, match=r"role critic has submitted nothing in run 1"):
        await_node_shards(save_of(root, "key", "actor", "critic"), rank_timeout_s=0)
    assert read_placement(root, 1, "another life of the root", "actor") is None
    (file,) = root.glob(".trinity_sync/placements/*")
    file.write_text("{")
    with pytest.raises(CommitError, match=r"1\.actor\.json.* is torn or edited"):
        read_placement(root, 1, "key", "actor")
    gone = replace(save_of(root / "gone", "key", "actor"), identity="that of a coordinator")
    with pytest.raises(RootAwayError, match="is not mounted here"):
        await_node_shards(gone, rank_timeout_s=0)


def test_nodes_write_their_own_ranks_and_one_of_them_commits(two_nodes: list[Job]) -> None:
    for rank in range(4):
        two_nodes[rank // 2].stage(4, MODEL, rank=rank)
    save, shares = two_nodes[0].save(4), shares_of(two_nodes)
    parts = [persist(share, save, "model", WriteOptions()) for share in shares]
    written = [file for part in parts for file in part]
    commit(save, written)
    free_committed_slots(two_nodes[0].spool, save, written)
    assert len(two_nodes[1].spool.tickets()[0]) == 2  # another node's memory is not touched
    free_committed_slots(two_nodes[1].spool, save, parts[1])
    manifest = require_committed(two_nodes[0].root, 4)
    assert [file.rank for file in manifest.files] == [0, 1, 2, 3]
    for job in two_nodes:
        assert not job.spool.tickets()[0]
        kept = [read_cached_file(slot) for slot in job.spool.folder.glob("*.slot")]
        assert len([note for note in kept if note]) == 2


@pytest.mark.parametrize("run", [1, 2])
def test_files_that_another_node_wrote_to_another_root_fail_the_save_with_both_nodes_named(
    two_nodes: list[Job], run: int
) -> None:
    root = two_nodes[0].root
    open_run(root, "one", 0)
    if run == 2:  # it takes the place of a step
        two_nodes[0].stage(4, MODEL, run=1, world_size=1)
        share = NodeShards("a", str(two_nodes[0].spool.folder), {"actor": (0,)})
        save = two_nodes[0].save(4, run=1)
        commit(save, persist(share, save, "model", WriteOptions()))
        open_run(root, "two", 0)
    before = read_run_manifest(root, 1, 4)
    for rank in range(4):
        two_nodes[rank // 2].stage(4, MODEL, rank=rank, run=run)
    save = two_nodes[0].save(4, run=run)
    written = [
        file
        for share in shares_of(two_nodes)
        for file in persist(share, save, "model", WriteOptions())
    ]
    Path(written[2].temporary).rename(root / "on the disk of node b")
    named = (
        r"model_world_size_4_rank_2\.pt, which node b wrote, is missing on the node of the commit"
    )
    with pytest.raises(SaveError, match=named):
        commit(save, written)
    assert read_run_manifest(root, 1, 4) == before
    assert read_run_manifest(root, 2, 4) is None


def test_ranks_that_submitted_nothing_are_named_with_their_node(two_nodes: list[Job]) -> None:
    """Also if only attachments are looked for, of which a rank has some or none."""
    share, save = shares_of(two_nodes)[1], two_nodes[1].save(4)
    options = WriteOptions(rank_timeout_s=0.05)
    with pytest.raises(MissingShardsError, match=r"model of role actor ranks 2-3 .* on node b"):
        persist(share, save, "model", options)
    two_nodes[1].stage(4, MODEL, rank=2)
    with pytest.raises(MissingShardsError, match="attachments of role actor rank 3"):
        persist(share, save, "attachments", options)
    two_nodes[1].stage(4, MODEL, rank=3)
    assert persist(share, save, "attachments", WriteOptions()) == []


def test_requests_of_all_nodes_make_one_flow_run(two_nodes: list[Job]) -> None:
    for rank in range(4):
        two_nodes[rank // 2].stage(4, MODEL, rank=rank)
    first, second = (
        next(iter(find_orphaned_saves(job.spool.folder.parent, grace_s=-1))) for job in two_nodes
    )
    assert first.key == second.key
    assert first.components == ("model",)
    assert second.components == ("model", *FOLDERS)


def test_a_sweep_that_finishes_a_commit_leaves_notes_of_what_the_slots_hold(
    two_nodes: list[Job],
) -> None:
    for rank in range(4):
        two_nodes[rank // 2].stage(4, MODEL, rank=rank)
    save = two_nodes[0].save(4)
    shares = shares_of(two_nodes)
    commit(save, [f for share in shares for f in persist(share, save, "model", WriteOptions())])
    assert find_orphaned_saves(two_nodes[1].spool.folder.parent, grace_s=-1) == []
    digests = {file.digest for file in require_committed(two_nodes[0].root, 4).files}
    notes = [read_cached_file(slot) for slot in two_nodes[1].spool.folder.glob("*.slot")]
    assert {note.file_digest for note in notes if note} <= digests
    assert len([note for note in notes if note]) == 2


def test_what_functions_wrote_on_another_node_is_in_the_commit_or_fails_it(
    two_nodes: list[Job], spool_folder: Path
) -> None:
    root = two_nodes[0].root
    trigger = Noted()
    saves = CheckpointCoordinator(
        root, run_key="one", settings=Settings(spool=spool_folder / "b"), trigger=trigger
    )

    def write() -> None:
        (root / "global_step_4/actor").mkdir(parents=True)
        (root / "global_step_4/actor/part.bin").write_bytes(b"megatron")

    def fail() -> None:
        raise RuntimeError("no adapter to save")

    saves.save_async("part", write, 4)
    asyncio.run(saves.register_and_monitor(4, checkpoint_thread_count=1))
    (request,) = trigger.requests
    assert request.components == ()
    (share,) = await_node_shards(request.save, rank_timeout_s=0)
    part = persist_share(request, Share(None, True), share)
    manifest = commit(request.save, part.written, part.statuses)
    assert [file.path for file in manifest.files] == ["actor/part.bin"]
    saves.save_async("part", fail, 5)
    with pytest.raises(SaveError, match=r"'part' of rank 0 failed: .*no adapter to save"):
        persist_share(request.model_copy(update={"step": 5}), Share(None, True), share)
    saves.close()


def test_a_function_that_is_called_here_and_now_leaves_its_receipt_and_raises_its_error(
    coordinator_of: Open, job: Job
) -> None:
    saves = coordinator_of()

    def fail() -> None:
        raise ZeroDivisionError("no adapter to save")

    (job.root / "global_step_4").mkdir()
    saves.save_sync(lambda: (job.root / "global_step_4/part.bin").write_bytes(b"lora"), 4)
    with pytest.raises(ZeroDivisionError):
        saves.save_sync(fail, 5, is_state_dict=True)
    (written,) = read_statuses(job.spool, job.save(4))
    (failed,) = read_statuses(job.spool, job.save(5, kind="state_dict"))
    assert (written.state, written.files) == ("finished", ("part.bin",))
    assert (failed.state, "no adapter to save" in failed.error) == ("failed", True)


def test_a_save_does_not_wait_for_images_that_were_evicted(two_nodes: list[Job]) -> None:
    """A flow run that begins late, as after an absence of the server."""
    _, job = two_nodes
    job.stage(1, {**MODEL, "optim": MODEL["model"]}, rank=2)
    for step in (2, 3):  # two slots, so the model of step 1 is evicted
        job.stage(step, MODEL, rank=2)
    share = NodeShards("b", str(job.spool.folder), {"actor": (2,)})
    options = WriteOptions(rank_timeout_s=10)
    with pytest.raises(
        MissingShardsError, match=r"model of role actor rank 2 was evicted .* node b"
    ):
        persist(share, job.save(1), "model", options)
    assert persist(share, job.save(1), "optim", options)


def test_a_save_waits_for_a_rank_that_is_behind(two_nodes: list[Job]) -> None:
    """Also if it has images of later steps, from an earlier start of the run."""
    _, job = two_nodes
    job.stage(3, MODEL, rank=3)
    job.stage(2, MODEL, rank=2)
    job.stage(3, MODEL, rank=2)
    share = NodeShards("b", str(job.spool.folder), {"actor": (2, 3)})
    with pytest.raises(MissingShardsError, match=r"rank 3 was not submitted on node b within"):
        persist(share, job.save(2), "model", WriteOptions(rank_timeout_s=0.05))


def test_a_save_waits_for_the_commit_of_its_sync_also_once_a_later_step_is_sealed(
    two_nodes: list[Job],
) -> None:
    _, job = two_nodes
    job.stage(2, MODEL, rank=2, kind="state_dict", roles=("actor",))
    job.stage(2, {"optim": MODEL["model"]}, rank=2, also=("model",))
    job.stage(3, {"optim": MODEL["model"]}, rank=2)
    share = NodeShards("b", str(job.spool.folder), {"actor": (2,)})
    (written,) = persist(share, job.save(2), "model", WriteOptions(rank_timeout_s=0.2))
    assert written.record.component == "model"
