"""Save strategies: how many shards are written at once, and that no process waits for the dead."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.dying import in_a_process
from tests.support.job import Job
from tests.support.meanwhile import when_opened
from trinity_sync.layout import WriteConcurrency
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.persist import acquire_write_permit, write_permit_path

SINGLE: tuple[WriteConcurrency, ...] = ("one", "per_node", "per_rank")


def stage(job: Job, step: int, strategy: WriteConcurrency, *, rank: int = 0) -> None:
    job.stage(step, {"model": {"w": torch.full((9,), 1.0)}}, rank=rank, write_concurrency=strategy)


@pytest.mark.parametrize(
    ("strategy", "rank", "node", "another_job"),
    [
        ("all", False, False, False),
        ("per_rank", False, False, False),
        ("per_node", True, False, True),
        ("one", True, True, False),
    ],
)
def test_the_strategy_decides_which_writes_exclude_each_other(
    job: Job, strategy: WriteConcurrency, rank: bool, node: bool, another_job: bool, tmp_path: Path
) -> None:
    """Whether a rank's shard waits for that of another rank, node, or job on the node."""
    stage(job, 1, strategy)
    ticket = job.spool.tickets()[0][0].ticket
    lock = write_permit_path(job.spool, ticket)
    same = write_permit_path(job.spool, replace(ticket, component="optim", step=2))
    assert (lock is not None and lock == same) is (strategy != "all")
    elsewhere = JobSpool(tmp_path / "other node" / job.spool.folder.name)
    neighbour = JobSpool(job.spool.folder.with_name("other-job"))
    others = (
        write_permit_path(job.spool, replace(ticket, rank=1)),
        write_permit_path(elsewhere, ticket),
        write_permit_path(neighbour, replace(ticket, root=str(tmp_path / "other root"))),
    )
    assert [lock is not None and lock == other for other in others] == [rank, node, another_job]


@pytest.mark.parametrize("strategy", SINGLE)
def test_one_shard_is_written_at_a_time(job: Job, strategy: WriteConcurrency) -> None:
    stage(job, 1, strategy)
    ticket = job.spool.tickets()[0][0].ticket
    at_once: list[int] = []
    writing = set()

    def write(_: int) -> None:
        for _ in range(20):
            with acquire_write_permit(job.spool, ticket):
                writing.add(threading.get_ident())
                os.sched_yield()
                at_once.append(len(writing))
                writing.discard(threading.get_ident())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert at_once == [1] * 160


@pytest.mark.parametrize("strategy", SINGLE)
def test_a_permit_ends_with_the_write_of_its_image(job: Job, strategy: WriteConcurrency) -> None:
    """Those of one task would otherwise wait for each other for ever."""
    job.world_size = 3
    for rank in range(3):
        stage(job, 1, strategy, rank=rank)
    job.commit(1)


@pytest.mark.parametrize("strategy", SINGLE)
def test_a_writer_killed_with_its_permit_blocks_no_later_save(
    job: Job, strategy: WriteConcurrency
) -> None:
    """A defect of the system that trinity_sync replaces: later saves waited for ever."""
    stage(job, 1, strategy)
    in_its_turn = job.root / "global_step_1/actor"

    def die_while_it_writes() -> None:
        # to be synced, once the file is written
        with when_opened(in_its_turn, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            job.persist(1)

    assert in_a_process(die_while_it_writes, job.root.parent, die_before=10**6) == 10**6
    assert in_its_turn.is_dir()  # it got as far as that
    stage(job, 2, strategy)
    job.commit(2)
    assert (found := find_newest(job.root))
    assert found.step == 2
    job.commit(1)  # and a retry of its own
