"""Steps are copied to a store: by a flow run of their own, or as part of the save."""

import asyncio
from pathlib import Path

import pytest
import torch

from flows.maintenance import request_replication
from tests.integration.prefect_api import Api, key_of, kind_of
from tests.support.job import Job
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator, SaveFailedError, Settings
from trinity_sync.client.prefect_api import ask_server
from trinity_sync.layout import name_job
from trinity_sync.orchestration.quantities import make_artifact_key
from trinity_sync.remote.remote_root import Remote
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.stack.services import StackState
from trinity_sync.storage.job_settings import write_job_settings


def request(root: Path) -> SaveRequest:
    return SaveRequest(root=str(root), step=4, run=1)


def test_a_checkpoint_is_copied_by_a_run_of_its_own(
    stack: StackState, job: Job, tmp_path: Path
) -> None:
    job.stage(4, {"model": {"w": torch.zeros(9)}})
    job.commit(4)
    url, api = f"file://{tmp_path}/store", Api()
    write_job_settings(job.root, {"remote": url})
    for _ in range(2):
        asyncio.run(request_replication(request(job.root), url))
    (run,) = api.runs_of(f"{request(job.root).key}/replicate")
    ended = api.ended(run.id)
    assert ended.state.is_completed(), ended.state.message
    assert ended.name == run.name == f"{name_job(job.root)}: replicate step 4"
    assert Remote(url).read_step(4).state == "valid"
    (artifact,) = until(lambda: api.artifacts_of(run), "the artifact")
    assert artifact.key == make_artifact_key("replicated", job.root)
    saves = ask_server(Settings(), lambda api: api.read_saves(request(job.root).job))
    assert saves == []  # it is no save


def test_a_save_that_counts_in_a_store_ends_there_or_fails_and_goes_on_elsewhere(
    stack: StackState, stack_settings: Settings, root: Path, tmp_path: Path, api: Api
) -> None:
    url = f"file://{tmp_path}/store"
    required = {"remote": url, "remote_required": True}
    with CheckpointCoordinator(root, job=required, settings=stack_settings) as saves:
        saves.save(4, {"model": {"w": torch.ones(9)}})
        saves.wait_all(250)
        assert Remote(url).read_step(4).state == "valid"
        names = {"persist-model", "commit", "upload-to-required-remote"}
        run = api.ended(api.run_of(key_of(root, 4)).id)
        assert {kind_of(task) for task in api.ended_tasks(run, *names)} == names

        other = tmp_path / "elsewhere"
        aside = root.rename(tmp_path / "aside")  # another machine does not see it
        others = CheckpointCoordinator(other, job=required, settings=stack_settings)
        aside.rename(root)
        with others:
            assert others.latest_step() == 4
            assert torch.equal(others.load(4)["model"]["w"], torch.ones(9))
            others.save(5, {"model": {"w": torch.zeros(9)}})
            others.wait_all(250)
        saves.save(5, {"model": {"w": torch.ones(9)}})
        with pytest.raises(SaveFailedError, match=r"brought to file://.* resumed from step 4"):
            saves.wait_all(250)
    assert Remote(url).read_manifest(5).run == 2
