"""The callback for Hugging Face's Trainer on two ranks: killed after a save, resumed bit-equal."""

import pytest

from tests.trainers.conftest import Call

PROGRAMS = "huggingface_training"
LORA = ("ddp-lora", "fsdp-lora")


@pytest.mark.parametrize(
    "kind", ["ddp", "fsdp", *(pytest.param(each, marks=pytest.mark.slow) for each in LORA)]
)
def test_hugging_face_ranks_that_are_killed_resume_bit_equal_and_others_load_the_step(
    call: Call, kind: str
) -> None:
    call("resume_bit_equal_after_a_kill", kind)


def test_failed_saves_corrupted_steps_and_fsdp1_are_errors_on_all_hugging_face_ranks(
    call: Call,
) -> None:
    call("end_with_errors_on_all_ranks")


def test_fsdp_of_one_hugging_face_rank_is_known_once_its_trainer_is_made(call: Call) -> None:
    call("know_fsdp_with_the_trainer")


def test_what_accelerate_prepared_is_saved_by_a_coordinator_and_resumes_bit_equal(
    call: Call,
) -> None:
    call("save_what_accelerate_has_prepared")
