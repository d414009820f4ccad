"""A stack as in production: PostgreSQL, a password, workers of their own, jobs that do not meet."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun

from tests.conftest import SPOOLS, running_stack
from tests.integration.prefect_api import Api, key_of
from tests.support.postgres import PASSWORD, Postgres
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.layout import Kind
from trinity_sync.orchestration.deploy import PRIORITIES
from trinity_sync.settings import StackSettings
from trinity_sync.stack import daemon, local_stack, services
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import iter_committed_steps, require_committed
from trinity_sync.storage.restore import load_states

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]

SECRET = "operator:not-to-be-seen"
KINDS: tuple[Kind, ...] = ("checkpoint", "state_dict")


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """URL of Prefect's database; next to it there is an empty database, ``catalog``."""
    if not (tools := Postgres.tools()):
        pytest.skip("no PostgreSQL with pg_trgm; install postgresql and postgresql-contrib")
    with Postgres.running(tools) as server:
        engine = sa.create_engine(driven(server.url), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sa.text("CREATE DATABASE catalog"))
        engine.dispose()
        yield server.url


def driven(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


def catalog_url(url: str) -> str:
    return driven(url).removesuffix("postgres") + "catalog"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, postgres: str) -> Iterator[Settings]:
    spool = Path(tempfile.mkdtemp(prefix=SPOOLS, dir="/dev/shm"))
    yield Settings(home=tmp_path_factory.mktemp("home"), spool=spool)
    shutil.rmtree(spool)


@pytest.fixture(scope="module")
def stack(settings: Settings, postgres: str) -> Iterator[StackState]:
    """Server on PostgreSQL that asks for a password, Ray, and one worker with one place a queue.

    By this name the environment of a test names it, and not the session's.
    """
    named = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": postgres.replace(
            "postgresql:", "postgresql+asyncpg:"
        ),
        "PREFECT_SERVER_API_AUTH_STRING": SECRET,
        "PREFECT_API_AUTH_STRING": SECRET,
        "TRINITY_SYNC_STACK__WORKER__MAX_RUNS": "1",
        "TRINITY_SYNC_STACK__CATALOG__URL": catalog_url(postgres),
    }
    with running_stack(settings, named) as state:
        yield state


def rows(database: str, table: str) -> int:
    engine = sa.create_engine(database)
    with engine.connect() as connection:
        found = connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar()
    engine.dispose()
    return int(found or 0)


def run_of(root: Path, step: int, kind: Kind) -> FlowRun | None:
    runs = Api().runs_of(key_of(root, step, kind))
    return runs[0] if runs else None


def ended(root: Path, step: int, kind: Kind) -> FlowRun:
    def look() -> FlowRun | None:
        run = run_of(root, step, kind)
        return run if run and run.state and run.state.is_final() else None

    return until(look, f"the end of {kind} of step {step} in {root}")


def test_jobs_on_postgresql_and_with_workers_of_their_own_do_not_meet(
    stack: StackState, settings: Settings, postgres: str, tmp_path: Path
) -> None:
    second = subprocess.Popen(
        [sys.executable, "-m", "trinity_sync", "worker"],
        env=services.build_environment(settings, StackSettings(), stack),
        cwd=tmp_path,
        stdout=(tmp_path / "worker.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        until(lambda: local_stack.status(settings).workers_online == 2, "both workers")
        roots = [tmp_path / f"job{number}" for number in range(3)]
        with ExitStack() as jobs:
            saves = [jobs.enter_context(CheckpointCoordinator(r, settings=settings)) for r in roots]
            for number, job in enumerate(saves):
                state = {"w": torch.full((1000,), float(number))}
                job.save(1, {"model": state}, kind="state_dict")
                job.save(1, {"model": state, "optim": state})
            for job in saves:
                job.wait_all(timeout=300)
        workers = set()
        for number, root in enumerate(roots):
            assert [manifest.step for manifest in iter_committed_steps(root)] == [1]
            assert require_committed(root, 1).kinds == KINDS
            assert set(load_states(root, 1, "actor")["model"]["w"].tolist()) == {float(number)}
            for kind in KINDS:
                run = ended(root, 1, kind)
                assert run.state.is_completed()
                workers.add(run.infrastructure_pid)
        assert len(workers) == 2
    finally:
        second.terminate()
        second.wait(250)
    runs, steps = rows(driven(postgres), "flow_run"), rows(catalog_url(postgres), "steps_1")
    assert runs == 6
    assert steps == 3


def test_each_queue_has_its_place_and_its_runs_wait_for_one_another(
    stack: StackState, settings: Settings, tmp_path: Path
) -> None:
    daemon.stop(local_stack.read_state(settings.home).worker, 20)
    (tmp_path / "job").mkdir()
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("reconcile/reconcile")
        parameters = {"root": str(tmp_path / "job")}
        care = [
            client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id
            for _ in range(3)
        ]
    jobs: dict[Kind, Path] = {kind: tmp_path / kind for kind in KINDS}
    with ExitStack() as open_ones:
        for kind, root in jobs.items():
            job = open_ones.enter_context(CheckpointCoordinator(root, settings=settings))
            job.save(1, {"model": {"w": torch.zeros(10)}}, kind=kind)
            until(lambda kind=kind, root=root: run_of(root, 1, kind), f"the run of a {kind}")
        local_stack.up(settings)
        saves = [ended(jobs[kind], 1, kind) for kind in ("state_dict", "checkpoint")]
        others = sorted((Api().ended(run) for run in care), key=lambda run: str(run.start_time))
    assert [run.work_queue_name for run in (*saves, others[0])] == list(PRIORITIES)
    for run in saves:  # while maintenance waits for its turn
        assert run.start_time < others[1].start_time
    for first, second in pairwise(others):
        assert first.end_time <= second.start_time


def test_a_call_without_the_password_is_refused_and_it_is_written_nowhere(
    stack: StackState, settings: Settings, tmp_path: Path
) -> None:
    with CheckpointCoordinator(tmp_path / "job", settings=settings) as job:
        job.save(1, {"model": {"w": torch.zeros(10)}})
    run = ended(tmp_path / "job", 1, "checkpoint")
    answer = httpx.post(f"{stack.api_url}/flow_runs/filter", json={}, timeout=None)
    assert answer.status_code == 401
    env = {
        **services.build_environment(settings, StackSettings(), stack),
        "PREFECT_API_AUTH_STRING": "",
    }
    worker = [sys.executable, "-m", "trinity_sync", "worker"]
    refused = subprocess.run(worker, env=env, capture_output=True, text=True, timeout=250)
    assert refused.returncode == 1
    assert "set PREFECT_API_AUTH_STRING" in refused.stderr.splitlines()[-1]
    with get_client(sync_client=True) as client:
        logs = [log.message for log in client.read_logs()]
    said = [run.model_dump_json(), *map(str, Api().artifacts_of(run)), *logs]
    assert len(logs) > 5
    written = [
        *settings.home.glob("logs/*"),
        settings.home / "stack.json",
        *(path for path in (tmp_path / "job").rglob("*.json")),
        *settings.spool.rglob("*.ticket"),
    ]
    said += [path.read_text() for path in written]
    assert json.loads((settings.home / "stack.json").read_text())["api_url"] == stack.api_url
    for secret in (SECRET, PASSWORD):
        assert [text for text in said if secret in text] == []
