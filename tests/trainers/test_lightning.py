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


def test_lightning_ranks_agree_on_the_last_checkpoint(call: Call) -> None:
    call("agree_on_the_last_checkpoint")


def test_the_memory_of_the_first_save_of_lightnings_shards_is_touched_before_it(call: Call) -> None:
    call("touch_the_memory_of_the_first_save_of_shards")


def test_strategies_that_cannot_be_saved_are_refused_before_training(call: Call) -> None:
    call("refuse_strategies_by_name")


def test_the_memory_of_lightnings_first_save_is_touched_before_it(call: Call) -> None:
    call("touch_the_memory_of_the_first_save")


def test_a_lightning_trainer_resumes_bit_equal_in_mid_epoch(call: Call) -> None:
    call("resume_bit_equal_in_mid_epoch")


def test_what_a_validation_logs_is_recorded_for_the_saved_step(call: Call) -> None:
    call("record_what_a_validation_logs")


def test_fast_dev_run_saves_nothing_and_begins_no_run(call: Call) -> None:
    call("save_nothing_with_fast_dev_run")


def test_a_second_fit_with_the_same_callback_saves_all_of_its_steps(call: Call) -> None:
    call("save_all_steps_of_a_second_fit")


def test_accumulated_gradients_resume_bit_equal_from_a_step_that_is_not_saved_again(
    call: Call,
) -> None:
    call("resume_accumulated_gradients_bit_equal")


def test_last_is_the_newest_committed_step_whatever_else_lightning_has_saved(call: Call) -> None:
    call("load_last_next_to_another_checkpoint")


def test_a_training_that_has_checkpoints_of_lightning_is_told_how_to_go_on_from_them(
    call: Call,
) -> None:
    call("go_on_from_checkpoints_of_lightning")


def test_a_callback_begins_a_new_run_after_an_exception(call: Call) -> None:
    call("resume_with_the_callback_of_an_exception")


def test_a_resume_that_trains_nothing_leaves_nothing_to_the_next_fit(call: Call) -> None:
    call("fit_after_a_resume_that_trains_nothing")


def test_a_step_in_a_root_that_cannot_be_written_is_validated(
    call: Call, tmp_path: Path, read_only: Callable[[Path], object]
) -> None:
    weights = call("train_two_steps")
    read_only(tmp_path / "ckpts")
    assert call("validate_the_newest_step") == weights


def test_a_checkpoint_whose_weights_were_moved_is_refused_by_name(call: Call) -> None:
    call("refuse_a_checkpoint_without_weights")


def test_a_step_of_another_model_is_refused_before_anything_is_loaded(call: Call) -> None:
    call("refuse_a_step_of_another_model_before_it_is_loaded")
