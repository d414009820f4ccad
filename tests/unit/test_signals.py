"""Which signals a coordinator takes for itself, and for how long."""

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.unit.conftest import Open
from tests.unit.job import Job


@pytest.fixture
def others() -> Iterator[list[int]]:
    """What somebody else's handler of SIGUSR1 has seen."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, _: seen.append(signum))
    yield seen
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_noticed_until_the_coordinator_is_closed(
    coordinator_of: Open, others: list[int]
) -> None:
    saves = coordinator_of()
    saves.on_preemption(signal.SIGUSR1)
    saves.on_preemption(signal.SIGUSR1, grace_s=5)
    signal.raise_signal(signal.SIGUSR1)
    assert saves.preempted
    assert others == []
    saves.close(timeout=0)
    signal.raise_signal(signal.SIGUSR1)
    assert others == [signal.SIGUSR1]


def test_last_words_raise_nothing_where_the_root_cannot_be_used(
    coordinator_of: Open, job: Job
) -> None:
    saves = coordinator_of()
    (job.root / ".trinity_sync").write_text("in the way")
    words = saves.last_words(4, {"model": {"w": torch.ones(3)}}, deadline_s=5)
    assert (words.handed_over, words.committed) == ((), ())
    assert "model: not handed over" in words.undone[0]


def test_who_takes_the_signal_later_keeps_it(coordinator_of: Open, others: list[int]) -> None:
    first, second = coordinator_of(), coordinator_of()
    first.on_preemption(signal.SIGUSR1)
    second.on_preemption(signal.SIGUSR1)
    first.close(timeout=0)
    signal.raise_signal(signal.SIGUSR1)
    assert second.preempted
    assert others == []


def test_coordinators_that_are_closed_in_any_order_give_the_signal_back(
    coordinator_of: Open, others: list[int]
) -> None:
    first, second = coordinator_of(), coordinator_of()
    first.on_preemption(signal.SIGUSR1)
    second.on_preemption(signal.SIGUSR1)
    first.close(timeout=0)
    second.close(timeout=0)
    signal.raise_signal(signal.SIGUSR1)
    assert others == [signal.SIGUSR1]
