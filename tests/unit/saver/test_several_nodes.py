"""Without a stack, the savers of several nodes commit a save together.

The nodes are spools of this machine, each with a saver of its own. There are three, as what holds
for the first other node need not hold for the next.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked import Program
from tests.support.job import Job
from tests.support.savers import await_that, end_savers, savers_of
from trinity_sync import CheckpointCoordinator, SaveFailedError, Settings
from trinity_sync.client.saver_control import LOG
from trinity_sync.fs.atomic import make_temporary_path
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.storage.commit import acquire_commit_lock
from trinity_sync.storage.discovery import read_latest_pointer, require_committed
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.placement import group_by_node
from trinity_sync.storage.restore import load_states

NODES = 3
TRAINER = """
import os, signal, sys
import torch
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.snapshot.identity import open_identity
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.storage.placement import group_by_node

root, *spools = sys.argv[1:]
nodes = [Settings(node=f"node-{rank}", spool=spool) for rank, spool in enumerate(spools)]
places = group_by_node([(n.node, str(open_job_spool(n.spool, root).folder)) for n in nodes])
ranks = [
    CheckpointCoordinator(root, rank=r, world_size=3, places=places, run_key="1", settings=n)
    for r, n in enumerate(nodes)
]
for rank, saves in enumerate(ranks):
    saves.save(1, {"model": {"w": torch.full((9,), float(rank))}})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def nodes(settings: Settings) -> Iterator[list[Settings]]:
    """Settings of the processes of each node."""
    made = []
    for number in range(NODES):
        spool = settings.spool / f"{number}"
        spool.mkdir(mode=0o700)
        own = {"node": f"node-{number}", "spool": spool, "saver_after_s": 1.0}
        made.append(settings.model_copy(update=own))
    yield made
    for each in made:
        end_savers(each.spool)


@pytest.fixture
def ranks(nodes: list[Settings], job: Job) -> Iterator[list[CheckpointCoordinator]]:
    """A rank on each node."""
    where = [(each.node, str(open_job_spool(each.spool, job.root).folder)) for each in nodes]
    with ExitStack() as closing:
        made = []
        for rank, settings in enumerate(nodes):
            how: dict[str, Any] = {
                "world_size": NODES,
                "places": group_by_node(where),
                "run_key": "a",
            }
            saves = CheckpointCoordinator(job.root, rank=rank, settings=settings, **how)
            closing.callback(saves.close, 0)
            made.append(saves)
        yield made


def save(ranks: list[CheckpointCoordinator], step: int) -> None:
    for rank, saves in enumerate(ranks):
        saves.save(step, {"model": {"w": torch.full((9,), float(rank))}})


def wait_all(ranks: list[CheckpointCoordinator]) -> None:
    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(lambda saves: saves.wait_all(250), ranks))


def require_saved(root: Path, step: int) -> None:
    assert [file.rank for file in require_committed(root, step).files] == [*range(NODES)]
    for rank in range(NODES):
        states = load_states(root, step, "actor", rank=rank, world_size=NODES)
        assert states["model"]["w"].tolist() == [float(rank)] * 9
    await_that(lambda: not [*root.rglob("*.tmp")], "what the commit has left is removed")


def test_each_node_persists_its_ranks_and_the_first_one_commits(
    ranks: list[CheckpointCoordinator], nodes: list[Settings], job: Job
) -> None:
    for step in (1, 2):
        save(ranks, step)
        wait_all(ranks)
        await_that(lambda: not any(s.spool.tickets()[0] for s in ranks), "the slots are freed")
        require_saved(job.root, step)
    assert all(savers_of(each.spool) for each in nodes)


def test_the_record_of_each_node_is_awaited(ranks: list[CheckpointCoordinator], job: Job) -> None:
    *early, late = ranks
    save(early, 1)
    ended = '"ended": true'
    first = job.root / "global_step_1"
    await_that(
        lambda: any(ended in each.read_text() for each in first.glob(".node1.*.tmp")),
        "the second node has persisted",
    )
    late.save(1, {"model": {"w": torch.full((9,), 2.0)}})
    wait_all(ranks)
    require_saved(job.root, 1)


@pytest.mark.parametrize("node", range(NODES))
def test_a_save_function_of_any_node_is_awaited_and_part_of_the_commit(
    ranks: list[CheckpointCoordinator], job: Job, node: int
) -> None:
    begun, go = threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        go.wait(250)
        (job.root / "global_step_1").mkdir(exist_ok=True)
        (job.root / "global_step_1/notes.txt").write_text("of a function")

    ranks[node].save_async("notes", write, 1)
    assert begun.wait(250)
    save(ranks, 1)
    asyncio.run(ranks[0].register_and_monitor(1, checkpoint_thread_count=1))
    go.set()
    wait_all(ranks)
    manifest = require_committed(job.root, 1)
    assert [each.name for each in manifest.callables] == ["notes"]
    assert manifest.find_file("notes.txt")


def test_the_nodes_of_a_stack_that_is_away_do_so_as_well(
    ranks: list[CheckpointCoordinator], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    save(ranks, 1)
    wait_all(ranks)
    require_saved(job.root, 1)
    (timing,) = require_committed(job.root, 1).timings
    assert (timing.by_saver, timing.nodes) == (True, NODES)


def test_what_killed_ranks_have_saved_on_several_nodes_is_committed(
    nodes: list[Settings], job: Job
) -> None:
    own = {"TRINITY_SYNC_SAVER": "auto", "TRINITY_SYNC_HOME": str(nodes[0].home)}
    spools = [each.spool for each in nodes]
    Program(TRAINER, job.root, *spools, env=os.environ | own).end(-signal.SIGKILL)
    await_that(lambda: read_latest_pointer(job.root, "checkpoint") == 1, "the step is committed")
    require_saved(job.root, 1)
    for each in nodes:
        await_that(lambda each=each: not savers_of(each.spool), "its saver ends")  # type: ignore[misc]


def test_a_node_that_is_gone_is_named_with_its_ranks_and_fails_the_save_on_the_others(
    ranks: list[CheckpointCoordinator],
    nodes: list[Settings],
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_job_settings(job.root, {"rank_timeout_s": 3.0})
    ranks[0].save(1, {"model": {"w": torch.ones(3)}})
    ranks[2].save(1, {"model": {"w": torch.ones(3)}})
    monkeypatch.setattr(sys, "executable", "/bin/false")  # its saver never lives
    ranks[1].save(1, {"model": {"w": torch.ones(3)}})
    named = r"within 3 s by node node-1, role actor rank 1\."
    for saves in ranks:
        with pytest.raises(SaveFailedError, match=named):
            saves.wait_all(250)
    await_that(lambda: not [*job.root.rglob("*.tmp")], "what the commit has left is removed")
    assert all(image.failed for image in ranks[0].spool.tickets()[0])
    monkeypatch.undo()
    save(ranks, 1)
    wait_all(ranks)
    require_committed(job.root, 1)


def test_no_node_waits_for_another_once_a_later_run_has_superseded_the_step(
    ranks: list[CheckpointCoordinator], nodes: list[Settings], job: Job
) -> None:
    save(ranks, 1)
    wait_all(ranks)
    ranks[1].save(2, {"model": {"w": torch.ones(3)}})  # the others are killed before
    ranks[0].save(3, {"model": {"w": torch.ones(3)}})
    begun = [job.root / "global_step_2/.node1.*.tmp", job.root / "global_step_3/.node0.*.tmp"]
    await_that(lambda: all([*each.parent.glob(each.name)] for each in begun), "both nodes wait")
    for saves in ranks:
        saves.close(0)
    later = CheckpointCoordinator(job.root, run_key="b", settings=nodes[0])
    later.resumed_from(1)
    for saves in ranks[:2]:
        await_that(
            lambda saves=saves: all(each.failed for each in saves.spool.tickets()[0]),  # type: ignore[misc]
            "its image holds no slot",
        )
    later.close()


def test_a_node_that_cannot_persist_fails_the_save_with_its_reason(
    ranks: list[CheckpointCoordinator], job: Job, nodes: list[Settings]
) -> None:
    ranks[0].save(1, {"model": {"w": torch.ones(3)}})
    (saver,) = savers_of(nodes[0].spool)
    saver.suspend()
    for rank in (1, 2):
        ranks[rank].save(1, {"model": {"w": torch.ones(3)}})
    (image,) = ranks[1].spool.tickets()[0]
    with image.slot.open("r+b") as slot:
        slot.truncate(1)
    log = nodes[1].home / LOG
    await_that(lambda: "is truncated" in log.read_text(), "the saver of the second node fails")
    saver.resume()
    with pytest.raises(SaveFailedError, match=r"rank 1 in .* is truncated"):
        ranks[0].wait_all(250)
    assert read_latest_pointer(job.root, "checkpoint") is None


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("instant", ["begun", "before the commit"])
def test_a_saver_that_is_killed_on_any_node_is_replaced(
    ranks: list[CheckpointCoordinator], nodes: list[Settings], job: Job, number: int, instant: str
) -> None:
    step = job.root / "global_step_1"

    def has_come() -> bool:
        records = [each.read_text() for each in step.glob(".node*.tmp")]
        if instant == "begun":
            return bool(records)
        ended = any('"ended": true' in each for each in records)
        return ended and len([*step.rglob(".model*.tmp")]) == NODES

    with acquire_commit_lock(job.root):
        save(ranks, 1)
        (saver,) = savers_of(nodes[number].spool)
        await_that(has_come, instant)
        saver.kill()
        saver.wait(250)
    wait_all(ranks)
    require_saved(job.root, 1)


def test_a_record_that_a_killed_saver_was_writing_is_removed_with_the_others(
    ranks: list[CheckpointCoordinator], job: Job
) -> None:
    step = job.root / "global_step_1"
    with acquire_commit_lock(job.root):
        save(ranks, 1)
        await_that(lambda: len([*step.glob(".node*.tmp")]) == NODES, "all savers have begun")
        for record in [*step.glob(".node*.tmp")]:
            make_temporary_path(record).touch()
    wait_all(ranks)
    require_saved(job.root, 1)
