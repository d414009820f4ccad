"""The callback for Lightning's Trainer: saved by steps, resumed bit-equal, failures raised.

Lightning runs in processes of its own here. Once it is imported, every ``nn.Module`` passes for an
``abc.ABC`` (``lightning.fabric.utilities.apply_func`` has an ABC whose ``__subclasshook__`` accepts
what has ``to``), and veRL 0.9 then wraps models for FSDP2 in a way that Python refuses (``object
layout differs``), which the tests of FSDP in this process would meet.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainers.conftest import Call

PROGRAMS = "lightning_training"


# ranks first: they are forked from the process in which the others train


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_lightning_ranks_that_are_killed_resume_bit_equal(call: Call, kind: str) -> None:
    call("resume_bit_equal_after_a_kill", kind)


def test_a_failed_save_ends_the_training_of_all_lightning_ranks(call: Call) -> None:
    call("end_with_the_failure_on_all_ranks")


@pytest.mark.parametrize(
    "program",
    [
        "agree_on_the_last_checkpoint",  # on ranks, and the next one
        "touch_the_memory_of_the_first_save",
        "record_what_a_validation_logs",
        "save_nothing_with_fast_dev_run",
        "save_all_steps_of_a_second_fit",
        "resume_accumulated_gradients_bit_equal",
        "resume_what_a_validation_has_ended_within_an_epoch",
        "save_at_the_first_batch_beyond_each_interval",
        "load_last_next_to_another_checkpoint",
        "go_on_from_checkpoints_of_lightning",
        "resume_with_the_callback_of_an_exception",
        "fit_after_a_resume_that_trains_nothing",
        "refuse_a_checkpoint_without_weights",
        "refuse_a_step_of_another_model_before_it_is_loaded",
    ],
)
def test_trainings_of_lightning(call: Call, program: str) -> None:
    call(program)


def test_strategies_that_cannot_be_saved_are_refused_before_training(call: Call) -> None:
    call("refuse_strategies_by_name")


def test_a_lightning_trainer_resumes_bit_equal_in_mid_epoch(call: Call) -> None:
    call("resume_bit_equal_in_mid_epoch")


def test_a_step_in_a_root_that_cannot_be_written_is_validated(
    call: Call, tmp_path: Path, read_only: Callable[[Path], object]
) -> None:
    weights = call("train_two_steps")
    read_only(tmp_path / "ckpts")
    assert call("validate_the_newest_step") == weights
