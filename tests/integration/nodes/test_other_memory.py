"""A trainer with another ``/dev/shm`` than the stack's, as in Slurm's job_container/tmpfs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.prefect_api import Api, key_of
from trinity_sync import Settings
from trinity_sync.stack.doctor_job import check_root
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import require_committed

TRAINER = """
import logging, sys
import torch
from trinity_sync import CheckpointCoordinator

logging.basicConfig(level=logging.INFO)
with CheckpointCoordinator(sys.argv[1], job={"rank_timeout_s": 2}) as saves:
    for step in (1, 2):
        saves.save(step, {"model": {"w": torch.full((9,), float(step))}})
        saves.wait_all(250)
"""
MOUNTS_OF_ITS_OWN = ["unshare", "--user", "--map-root-user", "--mount"]
HIDDEN = "does not see the trainer's"


def train(
    root: Path, settings: Settings, program: str = TRAINER
) -> "subprocess.CompletedProcess[str]":
    command = ["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh", sys.executable]
    done = subprocess.run(
        [*MOUNTS_OF_ITS_OWN, *command, "-c", program, str(root)],
        env={**os.environ, **settings.to_variables()},
        capture_output=True,
        text=True,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"no namespace of its own: {done.stderr.strip()}")
    return done


def test_the_saver_commits_at_once_what_the_stack_cannot_see_and_all_say_why(
    stack: StackState, stack_settings: Settings, api: Api, root: Path
) -> None:
    settings = stack_settings.model_copy(update={"saver": "auto", "saver_after_s": 600.0})
    done = train(root, settings)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is left to the saver: ") == 2
    for step in (1, 2):
        assert require_committed(root, step).timings[0].by_saver
        state = api.ended(api.run_of(key_of(root, step)).id).state
        assert state.is_completed()
        assert HIDDEN in str(state.message)
    found = {check.name: check for check in check_root(root, stack_settings)}
    assert (found["last save"].state, HIDDEN in found["last save"].found) == ("warn", True)


def test_without_the_saver_such_a_save_fails_at_once_with_the_reason(
    stack: StackState, stack_settings: Settings, api: Api, root: Path
) -> None:
    done = train(root, stack_settings)
    assert "SaveFailedError" in done.stderr
    assert f"{HIDDEN} {stack_settings.spool}" in done.stderr
    state = api.ended(api.run_of(key_of(root, 1)).id).state
    assert state.is_failed()
    assert HIDDEN in str(state.message)


def test_what_the_saver_cannot_commit_in_its_place_fails_everywhere_with_the_savers_reason(
    stack: StackState, stack_settings: Settings, api: Api, root: Path
) -> None:
    settings = stack_settings.model_copy(update={"saver": "auto", "saver_after_s": 600.0})
    refused = TRAINER.replace('"rank_timeout_s": 2', '"on_nonfinite": "refuse"')
    done = train(root, settings, refused.replace("float(step)", "torch.nan"))
    assert "SaveFailedError" in done.stderr
    failure = done.stderr.rpartition("SaveFailedError")[2]
    assert ("non-finite" in failure, HIDDEN in failure) == (True, False)
    state = api.ended(api.run_of(key_of(root, 1)).id).state
    assert state.is_failed()
    assert "non-finite" in str(state.message)
