"""What a Lightning trainer has besides its model: averaged weights, loaders' workers, other roots.

In a process of its own, as in `test_lightning`.
"""

import pytest

from tests.trainers.conftest import Call

PROGRAMS = "lightning_hosts"


def test_killed_trainings_with_averaged_weights_resume_as_from_a_model_checkpoint(
    call: Call,
) -> None:
    call("resume_averaged_weights_after_a_kill")


@pytest.mark.parametrize(
    ("averaging", "ends"),
    [
        *((averaging, "a stop") for averaging in ("none", "ema", "swa", "swa with batch norm")),
        *(("swa", ends) for ends in ("max_steps", "an epoch's end")),
    ],
)
def test_an_ended_training_resumes_bit_equal_whatever_averages_its_weights(
    call: Call, averaging: str, ends: str
) -> None:
    call("resume_what_has_ended", averaging, ends)


def test_a_path_loads_a_step_of_another_root_and_no_path_the_last_step(call: Call) -> None:
    call("load_by_a_path_and_without_one")


def test_spawned_workers_and_copies_of_a_trainer_do_without_the_callbacks_methods(
    call: Call,
) -> None:
    call("train_with_spawned_workers")
