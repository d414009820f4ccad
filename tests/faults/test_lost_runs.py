"""A run whose end could not be reported does not stay under way for ever, nor does a wait for it.

The worker of most of these tests gives up at once a call that finds no server; by default it tries
for a minute, and a server that is away for longer has the same effect.
"""

import copy
import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import psutil
import pytest
import torch
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.states import Cancelled, Cancelling, Pending, Running, Scheduled

from tests.conftest import left_of
from tests.faults.slow_save import (
    assert_committed,
    assert_saves_on,
    begin_slow_save,
    key,
    kill_server,
    kill_worker,
    ray_processes,
)
from tests.integration.prefect_api import Api
from tests.support.job import Job
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.client.prefect_api import PAGE, PrefectApi, ask_server
from trinity_sync.errors import SaveFailedError
from trinity_sync.orchestration.deploy import deploy
from trinity_sync.orchestration.recovery.flow_runs import (
    ACQUIRED_BY,
    ATTEMPTS,
    end_unreported_tasks,
)
from trinity_sync.saves.save_request import SAVE_DEPLOYMENT
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.stack import local_stack
from trinity_sync.stack.services import StackState
from trinity_sync.storage.manifest import read_manifest

pytestmark = pytest.mark.slow

DEAD = f"{ACQUIRED_BY}{socket.gethostname()}/1/1"
"""How a run is taken by a process of this node that is dead: pid 1 began at another time."""


@pytest.fixture(scope="class")
def impatient(stack: StackState, stack_settings: Settings) -> Iterator[None]:
    """A worker that asks the server once."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
        kill_worker(stack_settings)
        local_stack.up(stack_settings)
    yield
    kill_worker(stack_settings)
    local_stack.up(stack_settings)


@pytest.fixture
def no_worker(stack: StackState, stack_settings: Settings) -> Iterator[None]:
    kill_worker(stack_settings)
    yield
    local_stack.up(stack_settings)


def worker_log(settings: Settings) -> str:
    return (settings.home / "logs/worker.log").read_text()


def await_broken_off(settings: Settings, before: str) -> None:
    """Until the worker has failed to report the end of a run."""
    until(lambda: "was interrupted" in worker_log(settings)[len(before) :], "the lost report")


def assert_nothing_is_under_way(api: Api, run_id: UUID) -> None:
    run = api.ended(run_id)
    assert run.state.name == "Completed"

    def under_way() -> list[str]:
        tasks = api.tasks_of(run)
        return [task.name for task in tasks if not (task.state and task.state.is_final())]

    until(lambda: not under_way(), f"the end of the tasks {under_way()}")


@pytest.mark.usefixtures("impatient")
class TestTheServerIsAwayWhenARunEnds:
    def test_the_run_is_shown_as_completed_once_it_is_back(
        self, saves: CheckpointCoordinator, root: Path, stack_settings: Settings, api: Api
    ) -> None:
        before = worker_log(stack_settings)
        begin_slow_save(saves, root, 2)
        run = api.run_of(key(saves, 2))
        kill_server(stack_settings)
        saves.wait_all()
        assert_committed(root, 2)  # the server has no part in it
        await_broken_off(stack_settings, before)
        local_stack.up(stack_settings)
        assert_nothing_is_under_way(api, run.id)

    def test_a_save_that_failed_meanwhile_is_told_at_once_and_its_run_ends_once_it_is_back(
        self, saves: CheckpointCoordinator, root: Path, stack_settings: Settings, api: Api
    ) -> None:
        """With `TRINITY_SYNC_SAVER=stack`: otherwise the saver commits what the stack cannot."""
        before = worker_log(stack_settings)
        begin_slow_save(saves, root, 2)
        run = api.run_of(key(saves, 2))
        kill_server(stack_settings)
        (writer,) = ray_processes(stack_settings, "ray::persist-model")
        writer.kill()
        with pytest.raises(SaveFailedError, match="Ray cannot run persist-model"):
            saves.wait_all()
        assert read_manifest(root, 2) is None
        await_broken_off(stack_settings, before)
        local_stack.up(stack_settings)
        # completed if its node finds it before the server misses heartbeats: then it is retried
        assert api.ended(run.id).state.name in ("Crashed", "Completed")
        assert_saves_on(saves)


def test_a_run_whose_node_is_silent_is_crashed_by_the_server_and_begun_again_once_it_is_back(
    saves: CheckpointCoordinator, root: Path, stack_settings: Settings, api: Api
) -> None:
    deploy(StackSettings(worker={"heartbeat_timeout": "10s"}))
    try:
        begin_slow_save(saves, root, 2)
        run = api.run_of(key(saves, 2))
        kill_worker(stack_settings)
        crashed = api.ended(run.id)
        assert (crashed.state.name, crashed.run_count) == ("Crashed", 1)
        assert "No heartbeat" in crashed.state.message
    finally:
        deploy(StackSettings())
        local_stack.up(stack_settings)
    assert_committed(root, 2)
    assert api.ended(run.id).run_count == 2


def test_each_node_repairs_its_own_runs_and_cancels_the_cancelled(
    saves: CheckpointCoordinator, no_worker: None, stack_settings: Settings, api: Api
) -> None:
    request = api.run_of(key(saves, 1)).parameters["request"]
    runs = [api.start({"request": request}) for _ in range(3)]
    here, cancelled, elsewhere = runs
    api.set_states(here, *[Pending(message=DEAD)] * ATTEMPTS)
    api.set_states(cancelled, Pending(message=DEAD), Running(), Cancelling())
    api.set_states(elsewhere, Pending(message=f"{ACQUIRED_BY}another-node/1/1"), Running())
    local_stack.up(stack_settings)
    assert api.ended(here).state.name == "Crashed"
    await_cancelled(api, cancelled)
    with api.client as client:
        assert client.read_flow_run(elsewhere).state.name == "Running"
    api.set_states(elsewhere, Cancelled())


def test_tasks_whose_reports_a_server_lost_end_like_their_run(
    saves: CheckpointCoordinator, api: Api, stack_settings: Settings
) -> None:
    run = api.ended(api.run_of(key(saves, 1)).id)
    tasks = until(lambda: (found := api.tasks_of(run))[1:] and found, "its tasks")
    assert_nothing_is_under_way(api, run.id)
    with api.client as client:
        client.set_task_run_state(tasks[0].id, Running(), force=True)

    def end_late_tasks(late_s: float) -> None:
        pool = StackSettings().worker.pool
        ask_server(stack_settings, lambda api: end_unreported_tasks(api, pool, late_s=late_s))

    end_late_tasks(60.0)
    assert "Running" in [
        task.state.name for task in api.tasks_of(run)
    ]  # its report may be in flight
    end_late_tasks(0.0)
    assert {task.state.name for task in api.tasks_of(run)} == {"Completed"}


def test_no_run_is_forgotten_among_more_than_a_response_has(api: Api) -> None:
    """A server that is behind with the runs of schedules has many for a pool."""
    tomorrow = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(days=1))
    with api.client as client:
        client.create_work_pool(WorkPoolCreate(name="crowded", type="process"))
        flow = client.create_flow_from_name("crowd")
        made = [
            client.create_deployment(flow, name, work_pool_name="crowded", entrypoint="a:b")
            for name in ("one", "two")
        ]
        for deployment in made:
            for _ in range(PAGE // 2 + 10):
                client.create_flow_run_from_deployment(deployment, state=tomorrow)

    def look(deployment: str | None) -> set[UUID]:
        async def ask(api: PrefectApi) -> set[UUID]:
            runs = await api.read_pool_runs("crowded", "SCHEDULED", deployment=deployment)
            return {run.id for run in runs}

        return ask_server(Settings(), ask)

    try:
        assert len(look(None)) == PAGE + 20
        assert len(look("two")) == PAGE // 2 + 10
    finally:
        with api.client as client:
            for deployment in made:
                client.delete_deployment(deployment)


def test_a_save_that_the_server_refuses_does_not_hold_up_the_others(
    stack: StackState, stack_settings: Settings, root: Path, api: Api
) -> None:
    job = Job.open(root, stack_settings.spool)
    with api.client as client:
        deployment = client.read_deployment_by_name(SAVE_DEPLOYMENT)
        known = deployment.parameter_openapi_schema
        narrow = copy.deepcopy(known)
        narrow["definitions"]["SaveRequest"]["properties"]["step"]["minimum"] = 3
        client.update_deployment(deployment.id, DeploymentUpdate(parameter_openapi_schema=narrow))
        try:
            for step in (2, 3):  # sealed, and never requested
                job.stage(step, {"model": {"w": torch.ones(3)}})
            until(lambda: read_manifest(root, 3), "the commit of step 3")
            assert read_manifest(root, 2) is None
            until(lambda: len(job.spool.tickets()[0]) == 1, "the slot of step 3 to be freed")
            (refused,) = job.spool.tickets()[0]
            why = failure_path(refused.slot).read_text()
            assert f"the Prefect server at {stack.api_url} refuses" in why
        finally:
            client.update_deployment(
                deployment.id, DeploymentUpdate(parameter_openapi_schema=known)
            )
    job.close()


def test_what_a_killed_ray_node_has_left_is_ended_before_the_next_one_starts(
    stack: StackState, stack_settings: Settings, saves: CheckpointCoordinator, root: Path
) -> None:
    begin_slow_save(saves, root, 2)
    node = local_stack.read_state(stack_settings.home).ray
    processes = psutil.Process(node.pid).children(recursive=True)
    for process in processes:
        if process.name() == "raylet":
            process.kill()
    until(lambda: not node.lives, "the end of the node")
    local_stack.up(stack_settings)
    assert not left_of(processes)
    saves.save(3, {"model": {"w": torch.ones(3)}})
    saves.wait_all(250)
    assert read_manifest(root, 3)


def await_cancelled(api: Api, run_id: UUID) -> None:
    """A run that is stopped where it stands is shown as crashed for an instant."""
    until(lambda: api.ended(run_id).state.name == "Cancelled", "the run to be cancelled")
