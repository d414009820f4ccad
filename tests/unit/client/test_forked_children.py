"""What a trainer forks (a DataLoader's workers) leaves its saves and its signals alone."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.dying import end_of
from tests.support.forked import Program
from tests.support.job import Job
from tests.support.waiting import until
from tests.unit.client.conftest import Saves
from tests.unit.conftest import Open
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError


def weights(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((5000,), float(step))}}


@pytest.fixture
def ended_by_default() -> Iterator[None]:
    """SIGUSR1 ends a process, as by default."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


def ask_to_end() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


FORKS = """
import signal, sys, threading
from tests.support.dying import end_of
from tests.unit.client.test_forked_children import ask_to_end
from trinity_sync import CheckpointCoordinator

saves, ends = CheckpointCoordinator(sys.argv[1]), []
saves.on_preemption(signal.SIGUSR1)
if sys.argv[2] == "another thread":
    thread = threading.Thread(target=lambda: ends.append(end_of(ask_to_end)))
    thread.start()
    thread.join()
else:
    ends.append(end_of(ask_to_end))
assert ends == [-signal.SIGUSR1], ends
assert not saves.preempted
ask_to_end()
assert saves.preempted
"""


@pytest.mark.parametrize("forks", ["the main thread", "another thread"])
def test_a_child_ends_at_the_signal_that_its_parent_only_notes(
    tmp_path: Path, spool_folder: Path, forks: str
) -> None:
    # in a process without the threads of other tests' libraries, whose locks a child would inherit
    env = os.environ | {"TRINITY_SYNC_SPOOL": str(spool_folder)}
    Program(FORKS, tmp_path / "ckpts", forks, env=env).end()


def test_a_signal_that_comes_right_after_the_fork_ends_the_child() -> None:
    script = """
        import os, signal, sys
        asked = False
        def ask_first():
            if asked:
                os.kill(os.getpid(), signal.SIGUSR1)
        os.register_at_fork(after_in_child=ask_first)
        from trinity_sync.client.preemption import Preemption
        preemption = Preemption()
        preemption.notice(signal.SIGUSR1, 30.0)
        asked = True
        child = os.fork()
        if not child:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR1
        assert not preemption.noticed
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        """
    subprocess.run([sys.executable, "-c", dedent(script)], check=True)


def test_a_child_gets_the_handler_that_was_there_before(
    coordinator_of: Open, ended_by_default: None
) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
    first, second = coordinator_of(), coordinator_of()
    first.on_preemption(signal.SIGUSR1)
    second.on_preemption(signal.SIGUSR1)
    assert end_of(ask_to_end) == 7
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    second.on_preemption(signal.SIGUSR1)
    assert end_of(ask_to_end) == 0


def test_a_child_ends_although_somebodys_handler_passes_the_signal_on(
    saves: Saves, ended_by_default: None
) -> None:
    saves.on_preemption(signal.SIGUSR1)
    inner = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *arguments: inner(*arguments))  # type: ignore[operator,misc]
    assert end_of(ask_to_end) == -signal.SIGUSR1
    ask_to_end()
    assert saves.preempted


def test_a_loaders_worker_ends_at_the_signal_of_its_trainer_alone(saves: Saves) -> None:
    saves.on_preemption()
    batches: Any = iter(DataLoader([3, 4], num_workers=1))
    (worker,) = batches._workers
    assert end_of(lambda: os.kill(worker.pid, signal.SIGTERM)) == 0
    assert [int(batch) for batch in batches] == [3, 4]
    batches = iter(DataLoader([3], num_workers=1))
    (worker,) = batches._workers
    assert end_of(lambda: os.kill(worker.pid, signal.SIGTERM)) == 0
    status = Path(f"/proc/{worker.pid}/status")
    until(lambda: re.search(r"^ShdPnd:\s*0+$", status.read_text(), re.M), "the first is taken")
    worker.terminate()  # of two signals that wait, one is delivered
    worker.join()
    assert worker.exitcode == 0  # not killed by the signal before


def test_a_child_that_leaves_the_block_leaves_the_saves_of_its_parent(
    job: Job, saves: Saves
) -> None:

    class Enough(Exception):
        pass

    def leave() -> None:
        with saves:
            pass  # as at the end of a program
        with closing(saves), saves:
            sys.exit(7)

    with suppress(Enough), saves:
        saves.save(1, weights(1))
        slots = sorted(job.spool.folder.glob("*.slot"))
        assert end_of(leave) == 7
        assert sorted(job.spool.folder.glob("*.slot")) == slots
        assert len(slots) == 2
        saves.save(2, weights(2))
        raise Enough
    for step in (1, 2):
        job.commit(step)
        saved = job.root / f"global_step_{step}/actor/model_world_size_1_rank_0.pt"
        assert torch.equal(torch.load(saved)["w"], weights(step)["model"]["w"])


CALLS: dict[str, Callable[[CheckpointCoordinator], object]] = {
    "save": lambda saves: saves.save(2, weights(2)),
    "upload": lambda saves: saves.upload(2, lambda: weights(2)["model"]),
    "attach": lambda saves: saves.attach("position", b"7", step=2),
    "load": lambda saves: saves.load(1),
    "prewarm": lambda saves: saves.prewarm({"model": 9}),
    "record_metrics": lambda saves: saves.record_metrics(1, {"loss": 1.0}),
    "save_async": lambda saves: saves.save_async("own", lambda: None, 2),
    "save_sync": lambda saves: saves.save_sync(lambda: None, 2),
    "on_preemption": lambda saves: saves.on_preemption(signal.SIGUSR1),
    "resumed_from": lambda saves: saves.resumed_from(1),
    "wait_staged": lambda saves: saves.wait_staged(),
    "wait_all": lambda saves: saves.wait_all(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_coordinator_works_in_the_process_that_made_it_alone(
    job: Job, saves: Saves, call: str
) -> None:
    saves.save(1, weights(1))
    before = sorted(job.spool.folder.rglob("*"))

    def refused() -> None:
        with pytest.raises(
            ConfigError, match=r"process \d+ created this coordinator, and this is process \d+"
        ):
            CALLS[call](saves)

    assert end_of(refused) == 0
    assert sorted(job.spool.folder.rglob("*")) == before


def test_a_child_may_train_with_the_optimizer_of_an_overlapped_save(saves: Saves) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    saves.wait_staged_before(optimizer)
    saves.save(1, {"model": {"w": weight.detach()}}, overlap=True)
    weight.grad = torch.ones(3)
    assert end_of(optimizer.step) == 0
    optimizer.step()
