"""A ledger counts each rollout once, through any number of resumes."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_sync import RolloutLedger
from trinity_sync.errors import ConfigError


def resumed(ledger: RolloutLedger, step: int) -> RolloutLedger:
    again = RolloutLedger()
    again.load_state_dict(ledger.state_dict(), step)
    return again


def test_a_rollout_that_was_generated_twice_is_new_once() -> None:
    ledger = RolloutLedger()
    ledger.issue(["a", "b"])
    assert ledger.finish(["a"]) == ["a"]
    assert ledger.finish(["a", "b", "b"]) == ["b"]
    ledger.train(["a"], 1)
    assert ledger.finish(["a"]) == []
    assert ledger.step_of("a") == 1
    assert ledger.step_of("b") is None
    assert ledger.to_train() == ["b"]
    assert ledger.count() == {"issued": 0, "finished": 1, "trained": 1, "dropped": 0}


def test_no_rollout_is_trained_twice_and_nothing_is_recorded_of_a_refused_call() -> None:
    ledger = RolloutLedger()
    ledger.issue(range(4))
    ledger.train([0], 0)
    ledger.drop([1])
    for ids, why in (
        ([2, 0], "rollout 0 cannot be trained at step 7: it was trained at step 0"),
        ([2, 1], "rollout 1 cannot be trained at step 7: it was dropped"),
        ([2, 2], r"rollouts \[2\] come twice"),
        ([2, 9], "rollout 9 was never issued"),
    ):
        with pytest.raises(ConfigError, match=why):
            ledger.train(ids, 7)
    for ids in ([5, 5], [5, 3]):
        with pytest.raises(ConfigError, match="issued before"):
            ledger.issue(ids)
    assert ledger.to_issue() == [2, 3]
    assert resumed(ledger, 7).to_issue() == [2, 3]


@pytest.mark.parametrize("bad", [(0, 18), np.int64(18), True, 1.0, b"18", None, 2**64, "\ud800"])
def test_an_id_that_a_saved_state_would_not_have_is_refused(bad: Any) -> None:
    ledger, loaded = RolloutLedger(), RolloutLedger()
    with pytest.raises(ConfigError):
        ledger.issue([17, bad])
    ledger.issue([19, "20"])
    ledger.finish(["20"])
    loaded.load_state_dict(ledger.state_dict(), step=0)
    assert (loaded.to_issue(), loaded.to_train()) == ([19], ["20"])
    assert loaded.count() == ledger.count()


def test_what_was_trained_after_the_step_is_trained_again_and_what_was_in_flight_issued() -> None:
    ledger = RolloutLedger()
    ledger.issue(range(6))
    ledger.finish([0, 1, 2, 3])
    ledger.train([0], 10)
    ledger.train([1], 11)
    ledger.drop([5])
    again = resumed(ledger, 10)
    assert (again.to_train(), again.to_issue()) == ([1, 2, 3], [4])
    # the queue lost 2, and had got 4 before it was saved, and 0 after it was trained
    assert again.resume(held=[0, 1, 3, 4, 77]) == [2]
    assert again.to_train() == [1, 3, 4]
    assert resumed(again, 10).to_issue() == [2]


def test_the_ages_of_a_step_are_those_of_the_weights_that_made_its_tokens() -> None:
    ledger = RolloutLedger()
    ledger.issue(["a", "b", "c", "d"])
    # the weights were updated in mid-generation of a, and twice of b; nothing is known of d
    spans = {"a": [(4, 0, 9), (5, 10, 11)], "b": [(3, 0, 0), (4, 1, 4), (6, 5, 5)]}
    assert ledger.finish(["a", "d"], spans) == ["a", "d"]
    assert ledger.finish(["a", "b"], {"a": [(1, 0, 99)], **{"b": spans["b"]}}) == ["b"]
    ledger.finish(["c"], {"c": [(9, 0, 2)]})
    ledger.train(["a", "b", "d"], 6)
    ledger.train(["c"], 7)
    assert ledger.ages(6) == {0: 1, 1: 2, 2: 14, 3: 1}
    assert ledger.ages(7) == {0: 3}  # a superseded run made it
    assert ledger.ages(5) == {}
    again = resumed(ledger, 6)
    assert (again.ages(6), again.ages(7)) == (ledger.ages(6), {})
    again.train(["c"], 8)  # as it was generated before
    assert again.ages(8) == {0: 3}


def test_a_rollout_that_is_generated_again_has_the_versions_of_the_last_time() -> None:
    ledger = RolloutLedger()
    ledger.issue([1, 2])
    ledger.finish([1, 2], {1: [(1, 0, 4)], 2: [(1, 0, 4)]})
    assert ledger.resume(held=[]) == [1, 2]
    ledger.finish([1], {1: [(3, 0, 2)]})
    ledger.finish([2])
    ledger.train([1, 2], 3)
    assert ledger.ages(3) == resumed(ledger, 3).ages(3) == {0: 3}


@pytest.mark.parametrize(
    "spans",
    [
        *([(1, 1, 4)], [(1, 0, 4), (2, 4, 6)], [(1, 0, 4), (2, 6, 7)], [(-1, 0, 4)], [(1, 0, -1)]),
        # a state with these could be saved, and not loaded
        *([(True, 0, 4)], [(1.5, 0, 4)], [("1", 0, 4)], [(1, 0)], [1], 1, None),
        [(2**64, 0, 4)],  # nor with this
    ],
)
def test_versions_that_do_not_name_each_token_once_are_refused(spans: Any) -> None:
    ledger = RolloutLedger()
    ledger.issue([1])
    with pytest.raises(ConfigError, match=r"do not name each token|cannot be saved"):
        ledger.finish([1], {1: spans})
    assert resumed(ledger, 1).to_issue() == [1]


def test_its_state_is_not_changed_by_later_events() -> None:
    ledger = RolloutLedger()
    ledger.issue(range(3))
    state = ledger.state_dict()
    before = state["log"].clone()
    ledger.issue(range(3, 100_000))  # the log moves
    ledger.train(range(100_000), 1)
    assert torch.equal(state["log"], before)
    assert resumed(ledger, 1).count()["trained"] == 100_000
    assert len(ledger.state_dict()["log"]) < 20 * 100_000


def test_another_state_is_refused_and_leaves_it_empty() -> None:
    ledger = RolloutLedger()
    other = RolloutLedger()
    other.issue(["a", "b"])
    cut = other.state_dict()["log"][:-1]
    for state in ({}, {"log": torch.ones(9, dtype=torch.uint8)}, {"log": 3}, {"log": cut}):
        with pytest.raises(ConfigError, match="not the state of a RolloutLedger"):
            ledger.load_state_dict(state, 1)
    assert ledger.to_issue() == []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_every_rollout_is_trained_once_whatever_dies_when(seed: int) -> None:
    """A controller and a queue whose states are saved at different moments of a cut."""
    chance, size = random.Random(seed), 30
    ledger, queue, step = RolloutLedger(), list[int](), 0
    cursor, workers, trained = 0, list[int](), dict[int, list[int]]()
    saved = (0, 0, ledger.state_dict(), list[int]())
    while sum(map(len, trained.values())) < size:
        event = chance.choice(("issue", "finish", "train", "save", "die"))
        if event == "issue" and cursor < size:
            ledger.issue([cursor])
            workers.append(cursor)
            cursor += 1
        elif event == "finish" and workers:
            done = workers.pop(chance.randrange(len(workers)))
            queue += ledger.finish([done])
        elif event == "train" and queue:
            step += 1
            batch = [queue.pop(0) for _ in range(min(2, len(queue)))]
            ledger.train(batch, step)
            trained[step] = batch
        elif event == "save":
            of_controller, at = ledger.state_dict(), cursor
            if chance.random() < 0.5 and workers:  # before the queue is asked
                done = workers.pop()
                queue += ledger.finish([done])
            saved = (step, at, of_controller, list(queue))
        elif event == "die":
            step, cursor, state, queue = saved[0], saved[1], saved[2], list(saved[3])
            trained = {each: batch for each, batch in trained.items() if each <= step}
            ledger = RolloutLedger()
            ledger.load_state_dict(state, step)
            workers = ledger.resume(held=queue)
            queue = [each for each in queue if each in ledger.to_train()]
    counted = sorted(each for batch in trained.values() for each in batch)
    assert counted == list(range(size))
