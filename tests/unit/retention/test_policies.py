"""What each policy keeps of a history of steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.steps import info
from trinity_sync.errors import ConfigError
from trinity_sync.retention.policies import parse_policy

HOUR, DAY = 3600, 86400
REWARDS = {6: -math.inf, 10: 0.1, 20: 0.9, 30: 0.5, 40: math.nan, 45: math.inf}


def kept(policy: str, steps: list, now: float = 0.0) -> list[int]:
    return sorted(parse_policy(policy).keeps(steps, now))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("all", [10, 20, 30, 40, 50]),
        ("all,last=1", [10, 20, 30, 40, 50]),
        ("2", [40, 50]),
        ("last=2", [40, 50]),
        ("last=9", [10, 20, 30, 40, 50]),
        ("every=20", [20, 40]),
        ("last=1, every=20", [20, 40, 50]),
        ("newer=25s", [30, 40, 50]),
    ],
)
def test_a_policy_keeps(policy: str, expected: list[int]) -> None:
    assert kept(policy, [info(step) for step in (10, 20, 30, 40, 50)], now=50) == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("best=1:reward:max", [20, 50]),
        ("best=2:reward:max", [20, 30, 50]),
        ("best=1:reward:min", [10, 50]),
        ("best=9:reward:min", [10, 20, 30, 50]),
    ],
)
def test_the_best_are_kept_and_those_that_wait_for_their_metric(
    policy: str, expected: list[int]
) -> None:
    steps = [info(step, metrics={"reward": value}) for step, value in REWARDS.items()]
    assert kept(policy, [info(5), *steps, info(50)]) == expected


def test_a_metric_that_no_step_has_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"no step has the metric 'rewrd' \(known: loss, re"):
        kept("best=1:rewrd:max", [info(1, metrics={"reward": 1, "loss": 2})])
    assert kept("best=1:reward:max", []) == []


def test_a_step_an_hour_and_a_step_a_day_are_kept() -> None:
    steps = [info(n, committed_at=n * HOUR / 2) for n in range(96)]  # two days, two an hour
    assert kept("hourly=3", steps) == [90, 92, 94]
    assert kept("daily=7", steps) == [0, 48]
    assert kept("hourly=3,daily=1", steps) == [48, 90, 92, 94]


def test_the_last_step_of_the_last_run_is_newer_than_a_later_step_of_an_earlier_run() -> None:
    steps = sorted([info(30), info(20, run=2), info(10)], key=lambda each: each.age)
    assert kept("last=1", steps) == [20]


@given(
    times=st.lists(st.integers(0, 10 * DAY), min_size=1, max_size=40),
    policy=st.sampled_from(["hourly=3", "daily=2", "hourly=2,every=7", "last=2,daily=3"]),
)
def test_what_is_kept_once_is_kept_when_the_rest_is_gone(times: list[int], policy: str) -> None:
    steps = [info(step, committed_at=at) for step, at in enumerate(sorted(times))]
    chosen = kept(policy, steps)
    assert kept(policy, [each for each in steps if each.step in chosen]) == chosen


@pytest.mark.parametrize(
    "text",
    ["last=3,every=100,hourly=24,best=2:reward:max", "newer=36h,weekly=4", "newer=90s", "all"],
)
def test_the_short_form_comes_back_as_it_was(text: str) -> None:
    assert str(parse_policy(text)) == text


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "''"),
        ("lst=3", "'lst=3'"),
        ("last=3;every=5", "'last=3;every=5'"),
        ("last=-1", "'last=-1'"),
        ("every=0", "'every=0'"),
        ("last=2,", "''"),
        ("newer=2", "'newer=2'"),
        ("best=2:reward", "'best=2:reward'"),
        ("best=2:reward:most", "'best=2:reward:most'"),
        ("-1", "'-1'"),
    ],
)
def test_a_word_that_is_not_understood_is_a_sentence(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match="is unknown") as error:
        parse_policy(text)
    assert word in str(error.value)
    assert "best=2:reward:max" in str(error.value)
