"""The flows that look after committed steps, through the whole of it: server, worker, Ray, disk."""

import asyncio
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events.clients import get_events_subscriber
from prefect.settings import PREFECT_API_URL, temporary_settings
from transformers import AutoModelForCausalLM

from tests.integration.prefect_api import Api
from tests.support.leases import acquire_lease
from tests.support.models import tiny
from tests.support.steps import commit_files
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.client.prefect_api import ask_server
from trinity_sync.layout import name_job, steps_on_disk
from trinity_sync.orchestration.deploy import deploy, open_client
from trinity_sync.orchestration.job_registry import list_known_roots
from trinity_sync.orchestration.quantities import make_artifact_key
from trinity_sync.orchestration.worker import select_events
from trinity_sync.settings import StackSettings
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import find_newest, read_latest_pointer


@pytest.fixture
def model() -> Any:
    return tiny(layers=1)


@pytest.fixture
def metadata(model: Any, tmp_path: Path) -> Path:
    model.config.save_pretrained(tmp_path / "metadata/huggingface")
    return tmp_path / "metadata"


def run(api: Api, deployment: str, **parameters: Any) -> Any:
    return api.ended(api.start(parameters, deployment))


def table(api: Api, run: Any, root: Path) -> str:
    """The job's table in the run's page, next to that of the node and Prefect's own artifacts."""
    job = make_artifact_key("", root)
    (found,) = [
        artifact
        for artifact in api.artifacts_of(run)
        if artifact.type == "table" and str(artifact.key).endswith(job)
    ]
    return str(found.data)


def test_the_server_plans_the_runs_that_a_schedule_asks_for(stack: StackState) -> None:
    """Some versions of SQLAlchemy break the scheduler of Prefect, with no word but in its log."""
    soon = IntervalSchedule(
        interval=timedelta(days=3650), anchor_date=datetime.now(UTC) + timedelta(days=1)
    )
    with open_client(stack.api_url) as client:
        deployment = client.read_deployment_by_name("reconcile/reconcile").id
        (schedule,) = client.create_deployment_schedules(deployment, [(soon, True)])
        try:
            planned = until(
                lambda: client.get_scheduled_flow_runs_for_deployments([deployment]),
                "a planned run",
            )
        finally:
            client.delete_deployment_schedule(deployment, schedule.id)
        assert {run.deployment_id for run in planned} == {deployment}


def test_a_worker_hears_of_runs_also_once_its_pool_was_created_again(stack: StackState) -> None:
    """As after a reset of the server's database, which gives the pool another id."""

    async def story() -> None:
        pool = WorkPoolCreate(name=f"pool-{uuid4()}", type="process")
        async with get_client() as client, get_events_subscriber(select_events(pool.name)) as heard:
            flow = await client.create_flow_from_name("heard")
            for _ in range(2):
                await client.create_work_pool(pool)
                deployment = await client.create_deployment(flow, "any", work_pool_name=pool.name)
                run = await client.create_flow_run_from_deployment(deployment)
                event = await asyncio.wait_for(anext(heard), 250)
                assert event.resource.id == f"prefect.flow-run.{run.id}"
                await client.delete_flow_run(run.id)
                await client.delete_work_pool(pool.name)
            await client.delete_flow(flow)

    with temporary_settings({PREFECT_API_URL: stack.api_url}):
        asyncio.run(story())


def test_a_job_is_looked_after_from_its_commit_to_its_export(
    saves: CheckpointCoordinator,
    stack_settings: Settings,
    root: Path,
    api: Api,
    model: Any,
    metadata: Path,
) -> None:
    for step, export in ((1, "hf_model"), (2, "")):
        saves.save(step, {"model": model.state_dict()}, metadata=metadata, export=export)
        saves.wait_all(250)
    stack = StackSettings()
    until(lambda: root in list_known_roots(stack_settings, stack), "the node to know of the job")

    folder = root / "global_step_1/actor/huggingface"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)

    shard = root / "global_step_2/actor/model_world_size_1_rank_0.pt"
    with shard.open("r+b") as file:
        file.seek(-3000, os.SEEK_END)
        file.write(b"x")
    verified = run(api, "verify/verify", root=str(root), newest=2)
    assert verified.state.is_failed()
    assert "1 of 2 steps are corrupted" in verified.state.message
    assert "corrupted" in table(api, verified, root)
    assert find_newest(root).step == read_latest_pointer(root, "checkpoint") == 1

    (root / "latest_checkpointed_iteration.txt").write_text("2")
    reconciled = run(api, "reconcile/reconcile", root=str(root))
    assert reconciled.state.is_completed(), reconciled.state.message
    assert "names step 1 now" in table(api, reconciled, root)
    assert read_latest_pointer(root, "checkpoint") == 1


@pytest.mark.parametrize(
    ("deployment", "parameters", "sentence"),
    [
        ("verify/verify", {"root": "no/full/path"}, "not the full path of a folder"),
        ("verify/verify", {"step": 9}, "not committed, so there is nothing to compare"),
        ("retention/retention", {"rot": "a typing error"}, "rot"),
        ("retention/retention", {"keep": "most"}, "'most' is unknown"),
    ],
)
def test_what_cannot_work_is_a_sentence_in_the_ui(
    saves: CheckpointCoordinator,
    api: Api,
    root: Path,
    deployment: str,
    parameters: dict[str, Any],
    sentence: str,
) -> None:
    ended = run(api, deployment, **{"root": str(root), **parameters})
    assert ended.state.is_failed()
    assert sentence in ended.state.message


def test_schedules_are_left_to_people_until_their_settings_change(
    stack: StackState, stack_settings: Settings
) -> None:
    with open_client(stack.api_url) as client:

        def nightly() -> Any:
            schedules = client.read_deployment_by_name("verify/verify").schedules
            (found,) = (each for each in schedules if each.slug.startswith("nightly"))
            return found

        made = nightly()
        assert (made.active, made.parameters) == (False, {"sample_percent": 2})
        deployment = client.read_deployment_by_name("verify/verify").id
        client.update_deployment_schedule(deployment, made.id, active=True)
        try:
            deploy(StackSettings(), stack.api_url)
            assert (nightly().id, nightly().active) == (made.id, True)
            pool = StackSettings().worker.pool
            waiting = ask_server(stack_settings, lambda api: api.count_waiting_runs(pool))
            assert waiting == 0  # those of tonight are not
            by_prefect = DeploymentScheduleCreate(schedule=made.schedule, slug="nightly")
            client.create_deployment_schedules(deployment, [by_prefect])  # prefect deploy --all
            deploy(StackSettings(), stack.api_url)
            assert nightly().id == made.id
            more = StackSettings(maintenance={"verify": "5%", "schedules": True})
            deploy(more, stack.api_url)
            changed = nightly()
            assert (changed.active, changed.parameters) == (True, {"sample_percent": 5})
            client.update_deployment_schedule(deployment, changed.id, active=False)
            deploy(StackSettings(maintenance={"verify": "6%", "schedules": True}), stack.api_url)
            assert (nightly().active, nightly().parameters) == (False, {"sample_percent": 6})
        finally:
            deploy(StackSettings(), stack.api_url)
        assert (nightly().slug, nightly().active) == (made.slug, False)


def test_the_flow_shows_its_plan_and_then_carries_it_out(api: Api, root: Path) -> None:
    for step in (1, 2, 3):
        commit_files(root, step, optim=True)
    wanted = {"root": str(root), "keep": "last=1"}
    trial = api.ended(api.start({**wanted, "dry_run": True}, "retention/retention"))
    (artifact,) = api.artifacts_of(trial)
    rows = json.loads(artifact.data)
    assert [row["state"] for row in rows] == ["would be removed", "would be removed", "kept"]
    assert steps_on_disk(root) == [1, 2, 3]
    with acquire_lease(root, 2, "explorer"):
        done = api.ended(api.start(wanted, "retention/retention"))
    (artifact,) = api.artifacts_of(done)
    rows = {row["step"]: row for row in json.loads(artifact.data)}
    assert rows[2]["why"] == "leased by explorer"
    assert artifact.key == make_artifact_key("retention", root)
    assert done.name == f"{name_job(root)}: retention"
    assert f"1 steps of `{root}` removed, 2.0 kB" in artifact.description
    assert steps_on_disk(root) == [2, 3]
