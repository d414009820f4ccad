"""A step may be of any integral type wherever it enters, and nothing else."""

import asyncio
import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.job import Job
from tests.unit.conftest import Open
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.metrics import read_metrics

MODEL = {"model": {"w": torch.ones(9)}}


class Step(enum.IntEnum):
    FOUR = 4


INTEGRAL = [np.int64(4), np.uint8(4), np.array(4), torch.tensor(4), Step.FOUR]


@pytest.mark.parametrize("step", INTEGRAL, ids=lambda step: type(step).__name__)
def test_a_step_of_any_integral_type_is_that_number(
    coordinator_of: Open, job: Job, step: Any
) -> None:
    saves = coordinator_of()
    saves.resumed_from(step - step)
    saves.attach("position", b"17", step=step)
    saves.upload(step, lambda: MODEL["model"])
    saves.record_metrics(step, {"reward": 1.0})
    saves.save_sync(lambda: None, step)
    saves.save(step, MODEL, keep=step)
    asyncio.run(saves.register_and_monitor(step, False, step - step, step))
    ((sealed, *_), _) = job.spool.read_step(1, 4)
    assert (type(sealed.ticket.step), sealed.ticket.keep) == (int, 4)
    job.commit(4, "model", "attachments")
    assert read_manifest(job.root, 4).step == 4
    assert saves.attachment(step, "position") == b"17"
    saves.close(timeout=0)
    assert read_metrics(job.root, 1, 4) == {"reward": 1.0}
    again = coordinator_of(run_key="next")
    assert torch.equal(again.load(step)["model"]["w"], torch.ones(9))


@pytest.mark.parametrize("step", [*INTEGRAL[:1], True, -1])
def test_an_emergency_save_takes_the_steps_that_a_save_takes(
    coordinator_of: Open, job: Job, step: Any
) -> None:
    words = coordinator_of().emergency_save(step, MODEL, deadline_s=0.1)
    if step == 4:
        assert (words.submitted, type(words.step)) == (("model",), int)
    else:
        assert f"step {step} is not a whole number" in words.undone[0]
        assert not job.spool.tickets()[0]


CALLS: list[Callable[[CheckpointCoordinator, Any], Any]] = [
    lambda saves, step: saves.save(step, MODEL),
    lambda saves, step: saves.attach("position", b"", step=step),
    lambda saves, step: saves.attachment(step, "position"),
    lambda saves, step: saves.upload(step, dict),
    lambda saves, step: saves.record_metrics(step, {}),
    lambda saves, step: saves.save_async("mine", lambda: None, step),
    lambda saves, step: saves.save_sync(lambda: None, step),
    lambda saves, step: asyncio.run(saves.register_and_monitor(step)),
    lambda saves, step: saves.load(step),
    lambda saves, step: saves.check_resume(step),
    lambda saves, step: saves.resumed_from(step),
    lambda saves, step: saves.save(4, MODEL, keep=step),
]


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_step_is_refused_before_anything_is_done(
    coordinator_of: Open, job: Job, call: Callable[..., Any]
) -> None:
    saves = coordinator_of()
    before = sorted(job.spool.folder.glob("*"))
    for step in (
        True,
        np.bool_(True),
        torch.tensor(True),
        -1,
        np.int64(-1),
        4.0,
        "4",
        None,
        10**18,
    ):
        with pytest.raises(ConfigError, match="is not a whole number from 0 to"):
            call(saves, step)
    assert sorted(job.spool.folder.glob("*")) == before


def test_ranks_and_world_sizes_are_numbers_too(coordinator_of: Open, job: Job) -> None:
    coordinator_of(np.int64(0), np.int64(1)).save(4, MODEL)
    (sealed,) = job.spool.tickets()[0]
    assert sealed.ticket.path.endswith("model_world_size_1_rank_0.pt")
    with pytest.raises(ConfigError, match="rank -1 is not a whole number"):
        CheckpointCoordinator(job.root, rank=-1)


@pytest.mark.parametrize(
    ("states", "todo"),
    [
        (torch.nn.Linear(2, 2).state_dict(), r"\{'model': model.state_dict\(\)\}"),
        ({"model": torch.nn.Linear(2, 2)}, r"model is a module; pass its state_dict\(\)"),
    ],
)
def test_what_is_no_component_is_refused_with_what_to_pass(
    coordinator_of: Open, states: dict[str, Any], todo: str
) -> None:
    with pytest.raises(ConfigError, match=todo):
        coordinator_of().save(4, states)
