"""The statuses of trainer and explorers, and the handshake before a broadcast."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.errors import ConfigError
from trinity_sync.weights.parties import Handshake, Parties, Status


def test_statuses_are_trinitys_or_ours() -> None:
    class Theirs:
        value = "REQUIRE_SYNC"

    assert Status.of(Theirs()) is Status.of("require_sync") is Status.REQUIRE_SYNC
    with pytest.raises(ConfigError, match="pass one of running"):
        Status.of("asleep")


moves = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from([None, "a", "b", "c"])),
        st.tuples(st.just("withdraw"), st.sampled_from([None, "a", "b", "c"])),
        st.tuples(st.just("stop"), st.sampled_from([None, "a", "b", "c"])),
        st.tuples(st.just("run"), st.sampled_from([None, "a", "b", "c"])),
    ),
    max_size=40,
)


@given(moves)
def test_handshakes_leave_the_statuses_straight_whatever_comes(
    moves: list[tuple[str, str | None]],
) -> None:
    parties, waiting = Parties(), dict[str | None, Handshake]()
    for number, (what, who) in enumerate(moves):
        if what == "arrive":
            waiting[who] = parties.arrive(who, number if who is None else None)
        elif what == "withdraw" and who in waiting:
            parties.withdraw(waiting.pop(who), who)
        elif what in ("stop", "run"):
            status = Status.STOPPED if what == "stop" else Status.RUNNING
            if who is None:
                parties.set_trainer(status)
            else:
                parties.set_explorer(who, status)
        waiting = {who: shake for who, shake in waiting.items() if not shake.over}
        assert sum(parties.counts.values()) == len(parties.explorers)
        for name, status in parties.explorers.items():
            assert status is not Status.REQUIRE_SYNC or name in waiting
        assert parties.trainer is not Status.REQUIRE_SYNC or None in waiting


def test_a_handshake_succeeds_when_all_that_live_are_there() -> None:
    parties = Parties()
    parties.set_trainer(Status.RUNNING)
    parties.set_explorer("gone", Status.STOPPED)
    parties.set_explorer("b", Status.RUNNING)
    first = parties.arrive("a")
    trainer = parties.arrive(None, 6)
    assert not trainer.over
    assert parties.arrive("b").version == trainer.version == first.version == 6
    assert set(parties.counts) == {Status.RUNNING, Status.STOPPED}


def test_a_wait_that_times_out_leaves_the_status_counts_straight() -> None:
    parties = Parties()
    parties.set_trainer(Status.RUNNING)
    parties.set_explorer("b", Status.RUNNING)
    for _ in range(3):
        parties.withdraw(parties.arrive("a"), "a")
        parties.withdraw(parties.arrive(None, 6), None)
    assert parties.counts == {Status.RUNNING: 2}
    assert parties.trainer is Status.RUNNING


def test_when_the_trainer_gives_up_nobody_goes_on_waiting() -> None:
    parties = Parties()
    parties.set_explorer("b", Status.RUNNING)
    trainer, first = parties.arrive(None, 6), parties.arrive("a")
    parties.withdraw(trainer, None)
    assert first.over
    assert first.version is None


def test_an_explorer_that_dies_before_a_broadcast_fails_it_for_all() -> None:
    parties = Parties()
    parties.set_explorer("b", Status.RUNNING)
    trainer, first = parties.arrive(None, 6), parties.arrive("a")
    parties.set_explorer("b", Status.STOPPED)
    assert (trainer.over, trainer.version) == (first.over, first.version) == (True, None)
    assert parties.explorers == {"a": Status.RUNNING, "b": Status.STOPPED}


@pytest.mark.parametrize("alone", ["trainer", "explorer"])
def test_nobody_waits_where_there_is_nobody_to_meet(alone: str) -> None:
    shake = Parties().arrive(None, 3) if alone == "trainer" else Parties().arrive("a")
    assert shake.over
    assert shake.version is None
