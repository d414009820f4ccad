"""The switch for any caller of DCP on two ranks: folders that plain DCP reads, committed first."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.savers import end_savers
from tests.trainers.ranks import own_process


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., Any]]:
    with own_process("dcp_callers") as call:
        yield call


@pytest.fixture
def spool(spool_folder: Path) -> Iterator[Path]:
    yield spool_folder
    end_savers(spool_folder)


def test_accelerate_saves_and_loads_its_state_and_refuses_a_corrupted_one(
    call: Callable[..., Any], tmp_path: Path, spool: Path
) -> None:
    call("use_accelerate", tmp_path, tmp_path / "out", spool)


def test_callers_like_prime_rl_and_slime_load_bit_equal_with_the_switch_and_without(
    call: Callable[..., Any], tmp_path: Path, spool: Path
) -> None:
    call("save_and_load", tmp_path, tmp_path / "out", spool)


def test_ranks_killed_after_async_save_leave_the_whole_checkpoint_in_its_folder(
    call: Callable[..., Any], tmp_path: Path, spool: Path
) -> None:
    call("die", tmp_path, tmp_path / "out", spool)


def test_calls_that_cannot_be_taken_remain_those_of_dcp(
    call: Callable[..., Any], tmp_path: Path, spool: Path
) -> None:
    call("take_what_can_be_taken", tmp_path, tmp_path / "out", spool)


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks_and_the_next_save_works(
    call: Callable[..., Any], tmp_path: Path, spool: Path
) -> None:
    call("say_what_is_wrong", tmp_path, tmp_path / "out", spool)


def test_a_program_that_makes_its_process_group_after_a_save_saves_on(
    call: Callable[..., Any], tmp_path: Path, spool: Path
) -> None:
    call("make_a_group_later", tmp_path, tmp_path / "out", spool)
