"""The switch for any caller of DCP on two ranks: folders that plain DCP reads, committed first."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.savers import end_savers
from tests.trainers.conftest import Call

PROGRAMS = "dcp_callers"


@pytest.fixture
def call(process: Call, tmp_path: Path, spool_folder: Path) -> Iterator[Call]:
    """Calls a program with a folder of its own, and ends its savers."""
    (out := tmp_path / "out").mkdir()
    yield lambda program, *more: process(program, out, spool_folder, *more)
    end_savers(spool_folder)


@pytest.mark.slow
def test_accelerate_saves_and_loads_its_state_and_refuses_a_corrupted_one(call: Call) -> None:
    call("use_accelerate")


@pytest.mark.parametrize("kind", ["prime_rl", pytest.param("slime", marks=pytest.mark.slow)])
def test_callers_like_prime_rl_and_slime_load_bit_equal_with_the_switch_and_without(
    call: Call, kind: str
) -> None:
    call("save_and_load", kind)


def test_ranks_killed_after_async_save_leave_the_whole_checkpoint_in_its_folder(call: Call) -> None:
    call("die")


def test_calls_that_cannot_be_taken_remain_those_of_dcp(call: Call) -> None:
    call("take_what_can_be_taken")


@pytest.mark.parametrize("program", ["say_what_is_wrong", "make_a_group_later"])
def test_saves_after_an_error_or_before_a_process_group(call: Call, program: str) -> None:
    call(program)
