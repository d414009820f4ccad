"""A job whose file system hangs holds up no other job."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from prefect.settings import PREFECT_API_URL, temporary_settings
from sqlalchemy import select

from flows.save import FlowDriver
from tests.support.answers import server
from tests.support.hanging import hanging
from tests.support.job import Job
from tests.support.meanwhile import hanging_when_opened
from tests.support.savers import end_savers
from trinity_sync.catalog import Job as JobRow
from trinity_sync.catalog import get_catalog_url, mirror, open_catalog
from trinity_sync.client.prefect_api import PrefectApi
from trinity_sync.client.saver_control import SERVED
from trinity_sync.layout import MANIFEST, step_folder
from trinity_sync.orchestration import job_registry, metrics, step_events
from trinity_sync.orchestration import on_node as retention
from trinity_sync.orchestration.job_registry import list_known_roots
from trinity_sync.orchestration.metrics import RootObserver
from trinity_sync.orchestration.quantities import make_artifact_key
from trinity_sync.orchestration.recovery import flow_runs
from trinity_sync.orchestration.recovery import reconcile as recovery
from trinity_sync.orchestration.recovery.flow_runs import try_allow_eviction
from trinity_sync.orchestration.recovery.node import NodeRecovery
from trinity_sync.orchestration.root_threads import RootVisits, run_in_thread
from trinity_sync.orchestration.step_events import emit_step_event
from trinity_sync.pipeline.save import ORDER
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.identity import register_root
from trinity_sync.snapshot.ticket import hold_image
from trinity_sync.storage.discovery import read_latest_pointer

MODEL = {"model": {"w": torch.zeros(3)}}
POINTER = "latest_checkpointed_iteration.txt"

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flow_runs, job_registry, metrics):
        monkeypatch.setattr(module, "ANSWER_S", 0.5)


@pytest.fixture
def other(tmp_path: Path, spool_folder: Path) -> Iterator[Job]:
    """Another job of the node; by name it comes after the first."""
    with closing(Job.open(tmp_path / "other", spool_folder)) as job:
        yield job


@pytest.fixture
def settings(job: Job, other: Job, tmp_path: Path) -> Settings:
    """Those of a node that knows both jobs, each with a committed step."""
    made = Settings(home=tmp_path / "home", spool=job.spool.folder.parent)
    for each in (job, other):
        each.stage(1, MODEL)
        each.commit(1)
        register_root(made.home, each.root)
    return made


def test_a_root_that_hangs_is_left_out_and_named_once_until_it_answers(
    job: Job, other: Job, caplog: pytest.LogCaptureFixture
) -> None:
    visits, roots = RootVisits("a test"), [job.root, other.root]
    calls: list[Path] = []

    def read(root: Path) -> bool:
        calls.append(root)
        return root.is_dir()

    with hanging(job.root):
        for _ in range(3):
            assert visits.visit(roots, read, limit_s=2.0) == {other.root: True}
    assert calls.count(job.root) == 1
    assert caplog.text.count(f"{job.root} has not answered") == 1
    while job.root not in visits.visit(roots, read, limit_s=1.0):
        time.sleep(0.01)
    assert f"{job.root} answers again" in caplog.text


def test_a_root_that_hangs_is_left_out_although_another_fails(job: Job, other: Job) -> None:
    visits, calls = RootVisits("a test"), []

    def read(root: Path) -> bool:
        calls.append(root)
        if root == other.root:
            raise OSError(5, "Input/output error")
        return root.is_dir()

    with hanging(job.root):
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                visits.visit([other.root, job.root], read, limit_s=0.2)
        assert calls.count(job.root) == 1


@pytest.mark.parametrize("flow", ["retention", "reconcile"])
def test_maintenance_of_other_jobs_goes_on_if_a_root_hangs_in_the_middle_of_it(
    job: Job, other: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch, flow: str
) -> None:
    roots = [job.root, other.root]
    monkeypatch.setattr(retention, "select_roots", lambda *_: roots)
    for module in (retention, recovery):
        monkeypatch.setattr(module, "OTHERS_WAIT_S", 0.2)
    other.stage(2, MODEL)
    other.commit(2)

    def maintain() -> None:
        if flow == "retention":
            retention.prune(None, {"keep": "last=1"}, False)
        else:
            (other.root / POINTER).unlink()
            recovery.reconcile(settings, roots, None)

    def is_done() -> bool:
        if flow == "retention":
            return not step_folder(other.root, 1).exists()
        return read_latest_pointer(other.root, "checkpoint") == 2

    thread = threading.Thread(target=maintain, daemon=True)
    with hanging(job.root):
        thread.start()
        time.sleep(0.2)
        while not is_done():
            time.sleep(0.01)
    thread.join()


def test_the_other_jobs_are_known_and_shown_by_metrics(
    job: Job, other: Job, settings: Settings
) -> None:
    observer = RootObserver(settings, StackSettings(), lambda *_: None)

    def jobs() -> set[str]:
        observer.observe()
        return {sample.labels["job"] for family in observer.collect() for sample in family.samples}

    names = {job.spool.folder.name, other.spool.folder.name}
    assert jobs() == names
    with hanging(job.root):
        assert jobs() == {other.spool.folder.name}
    while jobs() != names:
        time.sleep(0.01)
    with hanging(job.root):
        assert list_known_roots(settings, StackSettings()) == [other.root]


def test_orphaned_saves_of_other_jobs_are_served_at_every_poll(
    job: Job, other: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = Settings(spool=job.spool.folder.parent, home=tmp_path)
    recovery = NodeRecovery(settings, "here/1/1", lambda _: False, lambda _: None)
    asked: list[tuple[str, str]] = []

    async def poll(until: Callable[[], bool]) -> None:
        async with PrefectApi(settings) as api:
            while not until():
                await recovery.serve_images(api)
                await asyncio.sleep(0.1)

    def has_asked(step: int) -> bool:
        return any(f'"step:{step}"' in body for path, body in asked if path.endswith("runs/filter"))

    job.stage(2, MODEL)
    with server({"/flow_runs/filter": (200, "[]")}, asked=asked) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        with hanging(job.root):
            for step in (3, 4):
                other.stage(step, MODEL)
                asyncio.run(poll(lambda: has_asked(step)))  # noqa: B023
            assert (other.spool.folder / SERVED).exists()
            assert not (job.spool.folder / SERVED).exists()
        asyncio.run(poll(lambda: has_asked(2)))
        assert (job.spool.folder / SERVED).exists()
    end_savers(settings.spool)


def test_many_saves_of_jobs_that_hang_use_up_no_threads_of_others(job: Job, other: Job) -> None:
    """The event loop of the worker runs all of them."""
    other.stage(2, MODEL)
    requests = [job.request(step) for step in range(50)]

    async def flows() -> None:
        hung = [asyncio.create_task(FlowDriver(each).do(ORDER[0])) for each in requests]
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in hung)
        found = FlowDriver(other.request(2))
        await asyncio.wait_for(found.do(ORDER[0]), 60)
        assert [each.shards.spool for each in found._nodes] == [str(other.spool.folder)]
        await asyncio.wait_for(asyncio.to_thread(time.time), 60)  # as Prefect's own calls
        for each in hung:
            each.cancel()

    with hanging(job.root):
        asyncio.run(flows())


def test_a_request_and_its_events_need_no_file_system(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made in the event loop of the worker, which serves all jobs."""
    save = job.request(2)
    sent: list[str] = []
    monkeypatch.setattr(step_events, "emit_event", lambda event, **_: sent.append(event))

    def make() -> tuple[str, str]:
        request = SaveRequest.model_validate(save.model_dump(mode="json"))
        emit_step_event("committed", request.root, request.step, job=request.job)
        make_artifact_key("save", request.root)
        return request.key, request.job

    with hanging(job.root), temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        found = asyncio.run(asyncio.wait_for(run_in_thread(make), 60))
    assert found == (save.key, job.spool.folder.name)
    assert sent == ["trinity_sync.step.committed"]


def test_a_cancelled_run_whose_task_hangs_with_its_image_holds_up_no_event_loop(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_runs, "MARK_S", 0.2)
    job.stage(2, MODEL)
    request = job.request(2, components=("model",))
    (sealed,) = job.spool.read_step(job.save(2))

    async def cancel() -> None:
        given = request.flow_run["parameters"], request.key
        cancelled = try_allow_eviction(job.spool.folder.parent, *given, "cancelled")
        await asyncio.wait_for(cancelled, 10)

    with hold_image(sealed.slot, sealed.ticket.image):  # as the task that writes it
        asyncio.run(cancel())


def test_a_root_that_hangs_while_it_is_mirrored_keeps_no_lock_of_the_catalog(
    job: Job, other: Job, settings: Settings
) -> None:
    manifest = step_folder(job.root, 1) / MANIFEST
    with open_catalog(get_catalog_url(settings)) as engine:
        thread = threading.Thread(target=mirror, args=(engine, job.root, [1]), daemon=True)
        with hanging_when_opened(manifest) as waits:
            thread.start()
            assert waits.wait(250)
            began = time.monotonic()
            mirror(engine, other.root, [1])
            assert time.monotonic() - began < 10
        thread.join()
        with engine.connect() as connection:
            assert str(other.root) in {*connection.execute(select(JobRow.root)).scalars()}
