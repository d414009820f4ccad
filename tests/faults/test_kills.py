"""Whatever dies during a save: the last commit loads, the save ends or is seen to have failed."""

import os
import signal
import textwrap
from pathlib import Path

import torch

from tests.conftest import left_of, processes_of
from tests.faults.slow_save import (
    SIZE,
    assert_committed,
    assert_only_step_1_counts,
    assert_saves_on,
    begin_slow_save,
    key,
    kill_server,
    kill_worker,
)
from tests.integration.prefect_api import Api
from tests.support.forked import Program
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.stack import local_stack, services
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import read_latest_pointer, require_committed


def test_a_save_of_a_trainer_that_is_killed_right_after_submitting_commits(
    stack: StackState, stack_settings: Settings, root: Path
) -> None:
    script = textwrap.dedent(
        f"""
        import os, signal, sys, torch
        from trinity_sync import CheckpointCoordinator
        saves = CheckpointCoordinator(sys.argv[1])
        saves.save(2, {{"model": {{"w": torch.full(({SIZE},), 2.0)}}}})
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    environment = {**os.environ, "TRINITY_SYNC_SPOOL": str(stack_settings.spool)}
    Program(script, root, env=environment).end(-signal.SIGKILL)
    assert_committed(root, 2)


def test_the_flows_process_killed_in_mid_write(
    saves: CheckpointCoordinator, root: Path, stack_settings: Settings, api: Api
) -> None:
    begin_slow_save(saves, root, 2)
    kill_worker(stack_settings)
    assert_only_step_1_counts(root)
    local_stack.up(stack_settings)
    assert_committed(root, 2)
    assert api.ended(api.run_of(key(saves, 2)).id).run_count == 2
    saves.wait_all(250)
    assert_saves_on(saves)


def test_the_prefect_server_killed_in_mid_write_and_all_started_again_at_its_addresses(
    saves: CheckpointCoordinator, root: Path, stack_settings: Settings, stack: StackState
) -> None:
    begin_slow_save(saves, root, 2)
    before = local_stack.read_state(stack_settings.home)
    processes = processes_of(before)
    kill_server(stack_settings)
    started = torch.full((SIZE,), 3.0)
    staged = saves.save(3, {"model": {"w": started}})  # training does not notice
    assert staged.nbytes > SIZE
    assert read_latest_pointer(root, "checkpoint") in (1, 2)
    password = stack_settings.home / services.PASSWORD_FILE  # trainers have it
    password.rename(password.with_suffix(".away"))
    after = local_stack.up(stack_settings)
    password.with_suffix(".away").rename(password)
    assert not left_of(processes)
    assert not {*before.daemons} & {*after.daemons}
    assert (after.api_url, after.api_auth) == (before.api_url, before.api_auth)
    assert after.ray_address == before.ray_address
    assert (after.settings, after.config) == (before.settings, before.config)
    assert [each.state for each in local_stack.status(stack_settings).services[:3]] == [
        "running"
    ] * 3
    assert not Path(before.ray_folder).exists()
    assert_committed(root, 3)
    require_committed(root, 1)
