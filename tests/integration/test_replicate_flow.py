"""The copy of a committed step as a flow run, asked for by the save that committed it."""

import asyncio
from pathlib import Path

import pytest
import torch
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.replicate import ask_for_copy
from tests.integration.prefect_api import Api, until
from tests.unit.job import Job
from trinity_sync.orchestration.parts import StackState
from trinity_sync.request import SaveRequest
from trinity_sync.storage.remote import Remote


def request(root: Path, kind: str = "checkpoint") -> SaveRequest:
    return SaveRequest(root=str(root), step=4, run=1, kind=kind)  # type: ignore[arg-type]


def test_a_checkpoint_is_copied_by_a_run_of_its_own(
    stack: StackState, job: Job, tmp_path: Path
) -> None:
    job.stage(4, {"model": {"w": torch.zeros(9)}})
    job.commit(4)
    url, api = f"file://{tmp_path}/store", Api()
    asyncio.run(ask_for_copy(request(job.root, "state_dict"), url))  # syncs are not copied
    for _ in range(2):
        asyncio.run(ask_for_copy(request(job.root), url))
    (run,) = api.runs_of(f"{request(job.root).key}/replicate")
    ended = api.ended(run.id)
    assert ended.state
    assert ended.state.is_completed(), ended.state.message
    assert Remote(url).step(4).state == "whole"
    assert until(lambda: api.artifacts_of(run), "the artifact")[0].key == "replicated"


def test_a_server_that_is_away_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        asyncio.run(ask_for_copy(request(tmp_path), "file:///nowhere"))
    assert "is committed; its copy is not asked for" in caplog.text
