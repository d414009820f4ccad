"""Which signals a coordinator takes for itself, and for how long."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.conftest import Open
from tests.unit.job import Job
from tests.unit.test_overlap import BIG


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


def test_an_emergency_save_raises_nothing_where_the_root_cannot_be_used(
    coordinator_of: Open, job: Job
) -> None:
    saves = coordinator_of()
    (job.root / ".trinity_sync").write_text("in the way")
    words = saves.emergency_save(4, {"model": {"w": torch.ones(3)}}, deadline_s=5)
    assert (words.submitted, words.committed) == ((), ())
    assert "model: not submitted" in words.undone[0]


def test_an_emergency_save_raises_nothing_whatever_the_states_are(
    coordinator_of: Open, job: Job
) -> None:
    saves = coordinator_of()
    states = {"model": {"w": torch.ones(3)}, "extra_state": {"loader": (i for i in range(3))}}
    words = saves.emergency_save(4, states, deadline_s=0)
    assert words.undone[0].startswith("model: not submitted")
    words = saves.emergency_save(5, {"extra_state": states["extra_state"]}, deadline_s=5)
    assert words.submitted == ()
    assert "extra_state: not submitted" in words.undone[0]
    assert "loader cannot be pickled, TypeError" in words.undone[0]
    words = saves.emergency_save(6, states, deadline_s=5)
    assert words.submitted == ("model",)
    assert any("loader cannot be pickled" in sentence for sentence in words.undone)
    job.commit(6, "model", kind="state_dict")
    words = saves.emergency_save("seven", states, deadline_s=1)  # type: ignore[arg-type]
    assert "step 'seven' is not a whole number" in words.undone[0]


def test_an_emergency_save_tells_of_an_earlier_save_that_failed(coordinator_of: Open) -> None:
    saves = coordinator_of()
    odd = {"w": torch.ones(BIG), "f": lambda: 0}
    saves.save(3, {"model": {"w": torch.ones(3)}})
    saves.save(4, {"model": odd}, overlap=True)
    words = saves.emergency_save(5, {"model": {"w": torch.ones(3)}}, deadline_s=0.5)
    assert words.submitted == ("model",)
    assert any(sentence.startswith("step 4, role actor") for sentence in words.undone)


def test_an_emergency_save_is_made_where_the_first_save_was_torn(coordinator_of: Open) -> None:
    saves = coordinator_of()
    weight = torch.ones(BIG)
    torn = [torch.ones(16 << 20), weight]
    saves.save(4, {"model": torn}, overlap=True)
    weight.add_(1)  # long before the other is copied
    words = saves.emergency_save(5, {"model": torn}, deadline_s=5)
    assert words.submitted == ("model",)


def test_what_interrupts_an_emergency_save_ends_it(coordinator_of: Open) -> None:
    class Interrupts:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coordinator_of().emergency_save(4, {"model": Interrupts()}, deadline_s=5)


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
