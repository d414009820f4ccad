"""The Synchronizer's books: versions, readers, statuses, the handshake."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_sync.errors import ConfigError
from trinity_sync.storage.runs import Run
from trinity_sync.weights.book import HISTORY, MOST_READERS, Book
from trinity_sync.weights.parties import Handshake, Parties, Status
from trinity_sync.weights.version import ImageRef, Source, Version


def version(run: int, step: int, source: Source = "memory") -> Version:
    images = (ImageRef("node", "/slot", "abc", 0, 10),) if source == "memory" else ()
    return Version(step, run, source, "/root", images=images)


def book_of(*keys: tuple[int, int]) -> Book:
    book = Book()
    for now, key in enumerate(keys):
        book.record(version(*key), float(now))
    return book


def newest_of(book: Book) -> tuple[int, int] | None:
    newest = book.newest()
    return (newest.run, newest.step) if newest else None


events = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.integers(1, 4), st.integers(0, 9)),
        st.tuples(st.just("run"), st.integers(2, 4), st.integers(0, 9)),
    ),
    max_size=30,
)


@given(events)
def test_the_newest_never_moves_backwards_but_to_leave_what_is_abandoned(
    events: list[tuple[str, int, int]],
) -> None:
    book, before = Book(), None
    for now, (what, run, step) in enumerate(events):
        if what == "record":
            said = book.record(version(run, step), float(now))
            assert said == (newest_of(book) == (run, step))
        elif run not in book.runs:
            book.begin_runs([Run(run, "key", step)])
        after = newest_of(book)
        assert after is None or not book.abandoned(*after)
        if before is not None and not book.abandoned(*before):
            assert after is not None
            assert after >= before
        before = after


@given(events)
def test_a_book_comes_back_as_it_was(events: list[tuple[str, int, int]]) -> None:
    book = Book()
    for now, (what, run, step) in enumerate(events):
        if what == "record":
            book.record(version(run, step, "checkpoint" if step % 2 else "memory"), float(now))
            book.serve(f"reader-{step}", step, float(now))
        elif run not in book.runs:
            book.begin_runs([Run(run, "key", step)])
    again = Book.from_json(json.loads(json.dumps(book.to_json())))
    assert again.newest() == book.newest()
    assert again.newest("checkpoint") == book.newest("checkpoint")
    assert again.readers(100.0) == book.readers(100.0)
    assert again.to_json() == book.to_json()


def test_a_monitor_that_starts_again_does_not_move_the_pointer_backwards() -> None:
    book = Book.from_json(json.loads(json.dumps(book_of((1, 11)).to_json())))
    assert not book.record(version(1, 10, "checkpoint"), 5.0)
    assert newest_of(book) == (1, 11)


def test_a_resumed_run_never_publishes_an_abandoned_later_version() -> None:
    book = book_of((1, 10), (1, 12))
    book.begin_runs([Run(1, "key", 0), Run(2, "key", 10)])
    assert newest_of(book) == (1, 10)
    assert not book.record(version(1, 14), 9.0)
    assert newest_of(book) == (1, 10)
    assert book.record(version(2, 11), 9.0)


def test_a_rewind_brings_back_what_the_runs_it_annuls_had_left_behind() -> None:
    book = book_of((1, 30), (2, 25))
    book.begin_runs([Run(1, "key", 0), Run(2, "key", 20)])
    assert newest_of(book) == (2, 25)
    book.begin_runs([Run(3, "key", 30, resumed_run=1)])
    assert newest_of(book) is None
    assert not book.record(version(2, 31), 3.0)
    assert book.record(version(1, 30, "checkpoint"), 3.0)
    assert not book.record(version(1, 35), 3.0)
    assert book.record(version(4, 31), 4.0)


@pytest.mark.parametrize(
    ("than", "run", "newer"),
    [
        (10, None, True),
        (11, None, False),
        (13, None, True),  # run 1's, which training has left
        (9, 2, True),
        (11, 2, False),
        (12, 2, False),
        (11, 1, True),
        (13, 1, True),
    ],
)
def test_what_is_newer_than_what_one_has(than: int, run: int | None, newer: bool) -> None:
    book = book_of((1, 10), (1, 13))
    book.begin_runs([Run(1, "key", 0), Run(2, "key", 10)])
    book.record(version(2, 11), 5.0)
    assert (book.newer(than, run) is not None) == newer


def test_who_serves_what_was_left_behind_waits_for_the_new_run() -> None:
    book = book_of((1, 10), (1, 12))
    book.begin_runs([Run(1, "key", 0), Run(2, "key", 10)])
    assert book.newer(12) is None
    book.record(version(2, 11), 5.0)
    assert book.newer(12) == version(2, 11)


def test_a_step_that_is_not_known_yet_waits_for_a_later_one() -> None:
    assert book_of((1, 10)).newer(12) is None
    assert Book().newer(-1) is None


def test_memory_is_preferred_to_a_commit_and_both_to_a_broadcast() -> None:
    book = Book()
    seen = []
    for source in ("nccl", "checkpoint", "memory"):
        book.record(version(1, 5, source), 0.0)
        newest = book.newest()
        assert newest
        seen.append(newest.source)
    assert seen == ["nccl", "checkpoint", "memory"]
    assert book.newest("checkpoint") == version(1, 5, "checkpoint")


def test_what_can_be_read_is_neither_a_broadcast_nor_a_dict() -> None:
    book = Book()
    dict_of_2 = replace(version(1, 2), images=())
    for each in (version(1, 1), dict_of_2, version(1, 2, "checkpoint"), version(1, 3, "nccl")):
        book.record(each, 0.0)
    assert book.newest() == version(1, 3, "nccl")
    assert book.newest("memory") == dict_of_2
    assert book.newest("memory", readable=True) == version(1, 1)
    assert book.newest(readable=True) == version(1, 2, "checkpoint")
    assert book.newer(1, 1, readable=True) == version(1, 2, "checkpoint")
    assert book.newer(2, 1, readable=True) is None
    book.record(version(1, 3, "checkpoint"), 0.0)
    assert book.newer(2, 1, readable=True) == version(1, 3, "checkpoint")


def test_old_versions_are_forgotten_but_not_the_newest_commit() -> None:
    book = Book()
    book.record(version(1, 0, "checkpoint"), 0.0)
    for step in range(1, 10 * HISTORY):
        book.record(version(1, step), float(step))
    assert len(book.to_json()["versions"]) == HISTORY + 1
    assert book.newest("checkpoint") == version(1, 0, "checkpoint")


def test_a_reader_is_stale_since_there_is_something_newer() -> None:
    book = Book()
    book.record(version(1, 5), 10.0)
    book.serve("a", 5, 12.0)
    (fresh,) = book.readers(15.0)
    assert (fresh.since, fresh.behind, fresh.stale_s) == (12.0, 0, 0.0)
    for step in range(6, 40):
        book.record(version(1, step), 14.0 + step)
    (stale,) = book.readers(100.0)
    assert (stale.step, stale.behind, stale.stale_s) == (5, 34, 80.0)
    book.serve("a", 39, 101.0)
    assert book.readers(102.0)[0].stale_s == 0.0
    book.leave("a")
    assert book.readers(102.0) == ()


@pytest.mark.parametrize(("served", "behind"), [((1, 12), 1), ((1, 9), 2), ((2, 11), 0)])
def test_what_was_left_behind_is_as_old_as_where_training_left_it(
    served: tuple[int, int], behind: int
) -> None:
    book = book_of((1, 9), (1, 12))
    book.begin_runs([Run(1, "a", 0), Run(2, "b", 10)])
    book.record(version(2, 11), 0.0)
    book.serve("a", served[1], 0.0, served[0])
    assert book.readers(0.0)[0].behind == behind


def test_a_reader_that_is_late_from_the_start_is_stale_since_the_newer_one() -> None:
    book = book_of((1, 1), (1, 2))
    book.serve("a", 1, 5.0)
    assert book.readers(11.0)[0].stale_s == 10.0


def test_readers_that_came_and_went_do_not_pile_up() -> None:
    book = book_of((1, 1))
    for now in range(MOST_READERS + 5):
        book.serve(f"pod-{now}", 1, float(now))
    names = {reader.name for reader in book.readers(1e4)}
    assert len(names) == MOST_READERS
    assert "pod-4" not in names


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
