"""What a manifest says of values stays true through retries, syncs and later runs of a step."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.job import Job
from trinity_sync.layout import step_folder
from trinity_sync.snapshot.image import LaidOut, lay_out
from trinity_sync.storage.commit import commit
from trinity_sync.storage.manifest import Manifest, encode_manifest, parse_manifest, read_manifest


def read(job: Job, step: int) -> Manifest:
    manifest = read_manifest(job.root, step)
    assert manifest
    return manifest


def save(job: Job, step: int, *, kind: Any = "checkpoint", **states: float) -> Manifest:
    values = {name: {"w": torch.full((50,), float(value))} for name, value in states.items()}
    job.stage(step, values, kind=kind)
    job.commit(step, *states, kind=kind)
    return read(job, step)


def test_a_commit_that_is_retried_says_the_same_of_its_values(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    save(job, 1, model=1)
    job.stage(2, {"model": {"w": torch.ones(50)}})
    written = job.persist(2)
    with caplog.at_level(logging.WARNING):
        commit(job.save(2), written)
        before = (step_folder(job.root, 2) / "manifest.json").read_bytes()
        commit(job.save(2), written)
    assert (step_folder(job.root, 2) / "manifest.json").read_bytes() == before
    assert read(job, 2).alarms == ["actor/model has not changed since step 1"]
    assert caplog.text.count("has not changed") == 1


def test_an_optimizer_is_compared_with_the_last_checkpoint_although_weights_were_synced_since(
    job: Job,
) -> None:
    save(job, 10, model=1, optim=1)
    save(job, 11, kind="state_dict", model=2)
    found = save(job, 20, model=3, optim=1)
    assert found.alarms == ["actor/optim has not changed since step 10"]
    assert save(job, 21, kind="state_dict", model=3).alarms == [
        "actor/model has not changed since step 20"
    ]


def test_the_checkpoint_of_a_synced_step_says_what_the_sync_said_of_its_weights(job: Job) -> None:
    save(job, 1, model=1)
    save(job, 2, kind="state_dict", model=1)
    found = save(job, 2, model=1, optim=2)
    assert found.alarms == ["actor/model has not changed since step 1"]


def test_a_step_that_is_committed_late_is_not_compared_with_a_later_one(job: Job) -> None:
    save(job, 2, model=1)
    assert not save(job, 1, model=1).alarms


def test_the_files_of_dcp_are_compared(job: Job) -> None:
    for step in (1, 2):
        layout, storages = lay_out({"w": torch.full((50,), 1.0)})
        job.commit_states(step, {"dcp": LaidOut("__0_0.distcp", layout, storages)})
    assert not read(job, 1).alarms
    assert read(job, 2).alarms == ["actor/dcp has not changed since step 1"]


def test_a_part_is_unchanged_only_if_it_is_so_on_all_ranks(job: Job) -> None:
    job.world_size = 2
    for step in (1, 2, 3):
        for rank in (0, 1):
            value = float(step) if rank and step < 3 else 1.0 + rank
            job.stage(step, {"model": {"w": torch.full((50,), value)}}, rank=rank)
        job.commit(step)
    assert [bool(read(job, step).alarms) for step in (1, 2, 3)] == [False, False, True]


def test_a_manifest_without_health_is_read_and_its_step_counts_as_healthy(job: Job) -> None:
    manifest = save(job, 1, model=float("nan"))
    assert manifest.nonfinite
    files = tuple(replace(file, health=None) for file in manifest.files)
    text = encode_manifest(replace(manifest, files=files))
    assert parse_manifest(text, "manifest.json", 1).alarms == []


def test_weights_of_whole_numbers_are_compared_as_well(job: Job) -> None:
    for step in (1, 2):
        job.commit_states(step, {"model": {"w": torch.arange(9)}})
    assert read(job, 2).alarms == ["actor/model has not changed since step 1"]
