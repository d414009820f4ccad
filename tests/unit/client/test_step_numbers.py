"""What a public method takes, in any form that it may have, and what it refuses at its door."""

import asyncio
import enum
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.job import Job
from tests.unit.client.conftest import Saves
from tests.unit.conftest import Open
from trinity_sync import CheckpointCoordinator, Checkpoints, WeightReader
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
    sealed, *_ = job.spool.read_step(job.save(4))
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
    lambda saves, step: saves.upload(step, dict),
    lambda saves, step: saves.record_metrics(step, {}),
    lambda saves, step: saves.save_async("mine", lambda: None, step),
    lambda saves, step: saves.save_sync(lambda: None, step),
    lambda saves, step: asyncio.run(saves.register_and_monitor(step)),
    lambda saves, step: saves.check_resume(step),
    lambda saves, step: saves.resumed_from(step),
    lambda saves, step: saves.save(4, MODEL, keep=step),
]


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_step_is_refused_before_anything_is_done(
    saves: Saves, job: Job, call: Callable[..., Any]
) -> None:
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


MODULE = torch.nn.Linear(2, 2)
A_DICT, A_STEP = "pass a dict: {'model': model.state_dict()}", "pass an int"
TO_LOAD = "loaded into a module or into tensors by name, and got "
WRONG: list[tuple[str, tuple[Any, ...], str]] = [
    *(("save", (4, each), A_DICT) for each in (None, "model", MODULE, [MODEL])),
    ("save", (MODEL, 4), A_STEP),
    ("save", (4, MODULE.state_dict()), "such as {'model': model.state_dict()}"),
    ("save", (4, {"model": MODULE, "optimizer": {}}), "(optimizer: did you mean optim?)"),
    *(("upload", (4, each), "pass model.state_dict()") for each in (None, "model", 7)),
    *(("upload", (5, {"model": each}), "without other comp") for each in (MODULE, MODEL["model"])),
    *(("upload", (5, lambda each=each: each), "pass model.state_dict()") for each in (None, MODEL)),
    ("upload", (MODULE, 4), A_STEP),
    *(("load_into", (4, each), A_DICT) for each in (None, "model", [MODULE])),
    *((name, (MODULE, 4), A_STEP) for name in ("load_into", "Checkpoints.load_into")),
    *((name, (each,), A_STEP) for name in ("load", "open") for each in (None, 4.0, -1, MODEL)),
    *((name, ("newest",), "is neither the number of a step") for name in ("load", "open")),
    *(("prewarm", ({"model": each},), A_STEP) for each in (None, 1.5, MODULE.state_dict())),
    *(("prewarm", (each,), "pass a dict by component") for each in (None, 9, MODULE)),
    ("prewarm", ({"optimizer": 9},), "did you mean optim?"),
    ("wait_staged_before", (MODULE,), "pass the optimizer"),
    *(("wait_all", (each,), "no number of seconds") for each in ("9", math.nan, [9])),
    ("cut", (4, "critic"), "such as ['critic']"),
    ("on_preemption", ("SIGTERM",), "pass signal.SIGTERM"),
    ("save_async", ("mine", None, 4), "pass a function without arguments"),
    ("save_sync", (MODEL, 4), "pass a function without arguments"),
    ("record_metrics", (4, None), "{'reward': 0.9}"),
    ("record_metrics", (4, 0.5), "{'reward': 0.9}"),
    ("attach", ("position", None), "pass bytes, or the path of a file"),
    ("attach", (None, b""), "a name holds at most"),
    ("attach_folder", ("queue", None), "pass a folder"),
    ("attachment", (4, None), "a name holds at most"),
    ("restore_folder", (4, "queue", None), "pass a new folder"),
    ("Checkpoints.load_into", (4, None), TO_LOAD + "a NoneType"),
    ("Checkpoints.load_into", (4, {"model": MODULE, "optim": {}}), TO_LOAD + "the components"),
    ("Checkpoints.record_metrics", (4, None), "{'reward': 0.9}"),
    ("Checkpoints.record_metrics", ("latest", {}), A_STEP),
    ("CheckpointCoordinator", (None,), "root may not be None; pass a folder"),
    ("Checkpoints", (4,), "root may not be 4; pass a folder"),
    ("WeightReader", (None,), "pass root"),
    *(
        ("WeightReader.load_into", (MODULE, each), "what wait_newer returns")
        for each in (4, "best")
    ),
]
NAMED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("save", (4, MODEL), {"replicated": "model"}, "a tuple, such as ('model',)"),
    ("save", (4, MODEL), {"replicated": True}, "a tuple, such as ('model',)"),
    ("cut", (4, ("critic",)), {"timeout_s": "9"}, "no number of seconds"),
    ("on_preemption", (), {"grace_s": "25"}, "no number of seconds"),
    ("Checkpoints.load", (4,), {"rank": "0"}, "rank '0' is not a whole number"),
    ("Checkpoints.load", (4,), {"world_size": None}, "world size None is not a whole number"),
    ("WeightReader", ("ckpts",), {"timeout_s": "3"}, "no number of seconds"),
    ("CheckpointCoordinator", ("ckpts",), {"roles": "actor"}, "such as ['actor', 'critic']"),
    ("CheckpointCoordinator", ("ckpts",), {"job": "last=2"}, "such as {'keep': 'last=3'}"),
    ("CheckpointCoordinator", ("ckpts",), {"settings": {"slots": 1}}, "pass Settings(...)"),
    ("CheckpointCoordinator", ("ckpts",), {"run_key": 7}, "pass a text"),
]


@pytest.mark.parametrize(
    ("method", "given", "named", "told"),
    ALL := [(*each[:2], {}, each[2]) for each in WRONG] + NAMED,
    ids=[f"{number}-{each[0]}" for number, each in enumerate(ALL)],
)
def test_a_wrong_argument_is_refused_by_the_sentence_that_makes_the_next_try_right(
    saves: Saves,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
    given: tuple[Any, ...],
    named: dict[str, Any],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    saves.save(4, MODEL)
    job.commit(4)
    owner, _, name = method.rpartition(".")
    makers = {"Checkpoints": Checkpoints, "WeightReader": partial(WeightReader, name="reader")}
    of = makers[owner](job.root) if owner else saves
    call = getattr(of, name, None) or makers.get(name, CheckpointCoordinator)
    before = sorted(job.spool.folder.glob("*.ticket"))
    with pytest.raises(ConfigError, match=re.escape(told)):
        call(*given, **named, **({"step": 5} if name in ("attach", "attach_folder") else {}))
    assert sorted(job.spool.folder.glob("*.ticket")) == before
    saves.save(5, MODEL)
