"""Runs of a job whose file system hangs, on the real stack, next to another job that saves."""

from pathlib import Path

import pytest
import torch

from tests.integration.prefect_api import Api
from tests.support.hanging import hanging
from trinity_sync import CheckpointCoordinator
from trinity_sync.layout import KINDS
from trinity_sync.orchestration.job_registry import register_job
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.storage.manifest import read_manifest

pytestmark = pytest.mark.slow


def test_another_job_saves_while_the_runs_of_one_hang(
    saves: CheckpointCoordinator, root: Path, tmp_path: Path, stack_settings: Settings, api: Api
) -> None:
    stuck = tmp_path / "stuck"
    CheckpointCoordinator(stuck, job={"rank_timeout_s": 1}, settings=stack_settings).close()
    register_job(stack_settings, stuck)
    runs = []
    with hanging(stuck):
        for step in range(2 * StackSettings().worker.max_runs):
            for kind in KINDS:
                request = SaveRequest(root=str(stuck), step=step, run=1, kind=kind)
                runs.append(api.start(request.flow_run["parameters"]))
        for step in (2, 3):
            saves.save(step, {"model": {"w": torch.ones(10)}})
            saves.wait_all(60)
            assert read_manifest(root, step)
        reconcile = api.start({}, "reconcile/reconcile")
        assert api.ended(reconcile, 120).state_name == "Completed"
        assert not any(api.final(run) for run in runs)
    for run in runs:  # the file system has failed, or the root has no save
        assert (api.ended(run, 120).state_name or "") != "Completed"
