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
from trinity_sync import CheckpointCoordinator, SaveFailedError, Settings

logging.basicConfig(level=logging.INFO)
with_saver, soon = {"saver": "auto", "saver_after_s": 600.0}, {"rank_timeout_s": 2}
for name, own, job, value in (
    ("committed", with_saver, soon, 1.0),
    ("without a saver", {}, soon, 1.0),
    ("refused", with_saver, {"on_nonfinite": "refuse"}, torch.nan),
):
    print("\\njob", name, file=sys.stderr, flush=True)
    root = f"{sys.argv[1]}/{name}"
    with CheckpointCoordinator(root, job=job, settings=Settings(**own)) as saves:
        try:
            for step in (1, 2):
                saves.save(step, {"model": {"w": torch.full((9,), step * value)}})
                saves.wait_all(90)
        except SaveFailedError as error:
            print("SaveFailedError", error, file=sys.stderr, flush=True)
"""
HIDDEN = "does not see the trainer's"


@pytest.fixture(scope="module")
def trained(
    stack: StackState, stack_settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Path, str]]:
    """What such a trainer has said of each of its jobs, with their roots."""
    folder = tmp_path_factory.mktemp("other-memory")
    mounts = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    command = [*mounts, 'mount -t tmpfs none /dev/shm && exec "$@"', "sh", sys.executable]
    done = subprocess.run(
        [*command, "-c", TRAINER, str(folder)],
        env={**os.environ, **stack_settings.to_variables()},
        capture_output=True,
        text=True,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip(f"no namespace of its own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    _, *jobs = done.stderr.split("\njob ")
    return [(folder / name, said) for name, _, said in (each.partition("\n") for each in jobs)]


def test_the_saver_commits_at_once_what_the_stack_cannot_see_and_all_say_why(
    trained: list[tuple[Path, str]], stack_settings: Settings, api: Api
) -> None:
    root, said = trained[0]
    assert said.count("is left to the saver: ") == 2
    for step in (1, 2):
        assert require_committed(root, step).timings[0].by_saver
        state = api.ended(api.run_of(key_of(root, step)).id).state
        assert state.is_completed()
        assert HIDDEN in str(state.message)
    found = {check.name: check for check in check_root(root, stack_settings)}
    assert (found["last save"].state, HIDDEN in found["last save"].found) == ("warn", True)


def test_without_the_saver_such_a_save_fails_at_once_with_the_reason(
    trained: list[tuple[Path, str]], stack_settings: Settings, api: Api
) -> None:
    root, said = trained[1]
    assert f"{HIDDEN} {stack_settings.spool}" in said.rpartition("SaveFailedError")[2]
    state = api.ended(api.run_of(key_of(root, 1)).id).state
    assert state.is_failed()
    assert HIDDEN in str(state.message)


def test_what_the_saver_cannot_commit_in_its_place_fails_everywhere_with_the_savers_reason(
    trained: list[tuple[Path, str]], api: Api
) -> None:
    root, said = trained[2]
    failure = said.rpartition("SaveFailedError")[2]
    assert ("non-finite" in failure, HIDDEN in failure) == (True, False)
    state = api.ended(api.run_of(key_of(root, 1)).id).state
    assert state.is_failed()
    assert "non-finite" in str(state.message)
