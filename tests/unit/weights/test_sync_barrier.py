"""The barrier of trainer and explorers before a broadcast, and their statuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.errors import ConfigError
from trinity_sync.weights.sync_barrier import Rendezvous, Status, SyncBarrier


def test_statuses_are_trinitys_or_ours() -> None:
    class Theirs:
        value = "REQUIRE_SYNC"

    assert Status.parse(Theirs()) is Status.parse("require_sync") is Status.REQUIRE_SYNC
    with pytest.raises(ConfigError, match="pass one of running"):
        Status.parse("asleep")


MOVES, MEMBERS = ("arrive", "withdraw", "stop", "run"), (None, "a", "b", "c")
moves = st.lists(st.tuples(st.sampled_from(MOVES), st.sampled_from(MEMBERS)), max_size=40)


@given(moves)
def test_rendezvous_leave_the_statuses_straight_whatever_comes(
    moves: list[tuple[str, str | None]],
) -> None:
    barrier, waiting = SyncBarrier(), dict[str | None, Rendezvous]()
    for number, (what, who) in enumerate(moves):
        if what == "arrive":
            waiting[who] = barrier.arrive(who, number if who is None else None)
        elif what == "withdraw" and who in waiting:
            barrier.withdraw(waiting.pop(who), who)
        elif what in ("stop", "run"):
            status = Status.STOPPED if what == "stop" else Status.RUNNING
            if who is None:
                barrier.set_trainer(status)
            else:
                barrier.set_explorer(who, status)
        waiting = {who: rendezvous for who, rendezvous in waiting.items() if not rendezvous.over}
        for name, status in barrier.explorers.items():
            assert status is not Status.REQUIRE_SYNC or name in waiting
        assert barrier.trainer is not Status.REQUIRE_SYNC or None in waiting


def test_a_rendezvous_succeeds_when_all_that_live_are_there() -> None:
    barrier = SyncBarrier()
    barrier.set_trainer(Status.RUNNING)
    barrier.set_explorer("gone", Status.STOPPED)
    barrier.set_explorer("b", Status.RUNNING)
    first = barrier.arrive("a")
    trainer = barrier.arrive(None, 6)
    assert not trainer.over
    assert barrier.arrive("b").version == trainer.version == first.version == 6
    assert {*barrier.explorers.values()} == {Status.RUNNING, Status.STOPPED}


def test_when_the_trainer_gives_up_no_explorer_goes_on_waiting() -> None:
    barrier = SyncBarrier()
    barrier.set_explorer("b", Status.RUNNING)
    trainer, first = barrier.arrive(None, 6), barrier.arrive("a")
    barrier.withdraw(trainer, None)
    assert first.over
    assert first.version is None


def test_a_barrier_that_is_restored_knows_that_its_trainer_has_stopped() -> None:
    barrier = SyncBarrier()
    assert not SyncBarrier(barrier.members).had_trainer, "it has yet to begin"
    barrier.set_trainer(Status.STOPPED)
    assert SyncBarrier(barrier.members).had_trainer


@pytest.mark.parametrize("alone", ["trainer", "explorer"])
def test_a_barrier_without_another_member_is_over_at_once(alone: str) -> None:
    rendezvous = SyncBarrier().arrive(None, 3) if alone == "trainer" else SyncBarrier().arrive("a")
    assert rendezvous.over
    assert rendezvous.version is None
