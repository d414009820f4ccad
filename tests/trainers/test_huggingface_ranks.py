"""The callback for Hugging Face's Trainer on two ranks: killed after a save, resumed bit-equal."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.ranks import own_process


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., Any]]:
    with own_process("huggingface_training") as call:
        yield call


@pytest.mark.parametrize(
    "kind", ["ddp", "fsdp", "fsdp-lora", pytest.param("ddp-lora", marks=pytest.mark.slow)]
)
def test_hugging_face_ranks_that_are_killed_resume_bit_equal_and_others_load_the_step(
    call: Callable[..., Any], tmp_path: Path, spool_folder: Path, kind: str
) -> None:
    call("resume_bit_equal_after_a_kill", tmp_path, spool_folder, kind)


def test_failed_saves_corrupted_steps_and_fsdp1_are_errors_on_all_hugging_face_ranks(
    call: Callable[..., Any], tmp_path: Path, spool_folder: Path
) -> None:
    call("end_with_errors_on_all_ranks", tmp_path, spool_folder)


def test_fsdp_of_one_hugging_face_rank_is_known_once_its_trainer_is_made(
    call: Callable[..., Any], tmp_path: Path, spool_folder: Path
) -> None:
    call("know_fsdp_with_the_trainer", tmp_path, spool_folder)


def test_what_accelerate_prepared_is_saved_by_a_coordinator_and_resumes_bit_equal(
    call: Callable[..., Any], tmp_path: Path, spool_folder: Path
) -> None:
    call("save_what_accelerate_has_prepared", tmp_path, spool_folder)
