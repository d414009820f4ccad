"""What the flow of a save reports; the tasks themselves run in tests/integration."""

import asyncio
import errno
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch
from prefect.context import FlowRunContext

import flows.save
import tasks.save
from tests.support.job import Job
from trinity_sync.errors import (
    EvictedError,
    HiddenSpoolError,
    MissingShardsError,
    RootAwayError,
    SaveError,
    SaveFailedError,
    StackError,
    SupersededError,
)
from trinity_sync.pipeline import save as pipeline
from trinity_sync.pipeline.save import COMMIT, PERSIST, Follows, Part
from trinity_sync.saves.journal import Entry, append, read_entry
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.storage.job_settings import JobSettings, read_job_settings, write_job_settings
from trinity_sync.storage.manifest import read_run_head

RUN = UUID(int=7)


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events that the flow sends; it runs in no flow run, and its server is away."""
    sent: list[str] = []
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(flows.save, "get_run_logger", logging.getLogger)
    monkeypatch.setattr(flows.save, "emit_step_event", lambda what, *_, **__: sent.append(what))
    return sent


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> list[str]:
    """Names of the parts of the flow that were done, among its events; nothing else is done."""

    class Flow(flows.save.FlowDriver):
        done = SimpleNamespace(by_saver=False, alarms=["bad"])  # type: ignore[assignment]
        _committed_at = 0.0

        async def do(self, part: Part) -> None:
            events.append(part.name)
            if part.name == "tell_commit":
                await super().do(part)

    monkeypatch.setattr(flows.save, "FlowDriver", Flow)
    monkeypatch.setattr(flows.save.metrics.METRICS, "count_committed_save", lambda *_, **__: None)
    return events


def test_a_commit_and_what_is_unhealthy_are_reported_before_what_follows(
    tmp_path: Path, calls: list[str]
) -> None:
    asyncio.run(flows.save.save_step.fn(SaveRequest(root=str(tmp_path), step=1, run=1)))
    told = ["tell_commit", "committed", "unhealthy"]  # the last two are events
    assert calls[-4:] == [*told, "compare_late_images"]


@pytest.mark.parametrize(
    ("kind", "keep", "policy", "prunes"),
    [
        ("state_dict", 0, None, True),
        ("checkpoint", 0, None, False),
        ("checkpoint", 2, None, True),
        ("checkpoint", 0, "all", False),
        ("checkpoint", 0, "last=2", True),
    ],
)
def test_older_steps_are_removed_after_a_commit_of_weights_or_by_its_keep_or_a_policy(
    job: Job, kind: Any, keep: int, policy: str | None, prunes: bool
) -> None:
    write_job_settings(job.root, {"keep": policy} if policy else {})
    job.stage(1, {"model": {"w": torch.ones(9)}}, kind=kind, keep=keep)
    job.commit(1, kind=kind)
    found = Follows.of(job.request(1, kind=kind), read_run_head(job.root, 1, 1))
    assert found.prunes == prunes


@pytest.mark.parametrize("required", [False, True])
def test_a_checkpoint_is_copied_and_by_the_save_itself_if_that_is_required(
    job: Job, required: bool
) -> None:
    url = "file:///nowhere"
    write_job_settings(job.root, {"remote": url, "remote_required": required})
    found = Follows.of(job.request(1), None)
    assert (found.required_remote, found.remote) == ((url, "") if required else ("", url))
    found = Follows.of(job.request(1, kind="state_dict"), None)
    assert (found.required_remote, found.remote) == ("", "")


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (EvictedError("gone"), "Evicted"),
        (SupersededError("a later run"), "Superseded"),
        (MissingShardsError("no rank 1"), None),
    ],
)
def test_a_save_that_is_not_committed_is_counted_reported_and_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    events: list[str],
    error: Exception,
    name: str | None,
) -> None:
    pages: dict[str, str] = {}

    def await_node_shards(*_: object, **__: object) -> None:
        raise error

    async def create(**fields: str) -> None:
        pages[fields["key"]] = fields["markdown"]

    monkeypatch.setattr(pipeline, "await_node_shards", await_node_shards)
    monkeypatch.setattr(flows.save, "list_living_nodes", dict)
    monkeypatch.setattr(tasks.save, "acreate_markdown_artifact", create)
    request = SaveRequest(root=str(tmp_path / "Ckpts 1"), step=1, run=1)
    run = partial(asyncio.run, flows.save.save_step.fn(request))
    outcome = (name or "failed").lower()
    if name is None:
        with pytest.raises(MissingShardsError):
            run()
    else:
        state = run()
        assert (state.name, state.type.value, state.message) == (name, "FAILED", str(error))
    assert events == [outcome]
    ((key, page),) = pages.items()
    assert key.startswith("save-ckpts-1-")
    assert f"Ckpts 1: save actor step 1: {outcome}" in page
    assert str(error) in page
    found = sample("trinity_sync_saves_total", job=request.job, outcome=outcome, by="flow")
    assert found == 1


@pytest.mark.parametrize(
    ("why", "is_own"),
    [
        (SaveError("the disk is full"), True),
        (SaveError("the disk is full"), False),
        (StackError("Ray is away"), False),
    ],
)
def test_a_run_tells_itself_that_it_has_failed_unless_a_user_has_made_it_of_a_save(
    job: Job, monkeypatch: pytest.MonkeyPatch, why: Exception, is_own: bool
) -> None:
    """A run may be deleted while it runs, and a server lose it: it would tell nothing else."""

    async def call(_: str, __: str, function: Callable[..., Any], *args: object) -> Any:
        return function(*args)

    async def fail(*_: object, **__: object) -> None:
        raise why

    run = SimpleNamespace(run_count=2, id=RUN) if is_own else None
    monkeypatch.setattr(flows.save.FlowDriver, "_run", run)
    monkeypatch.setattr(flows.save.FlowDriver, "_persist", fail)
    monkeypatch.setattr(flows.save, "run_on_node", call)
    monkeypatch.setattr(flows.save, "list_living_nodes", lambda: {Settings().node: ""})
    monkeypatch.setattr(tasks.save, "acreate_markdown_artifact", fail)
    job.stage(1, {"model": {"w": torch.ones(9)}})
    with pytest.raises(type(why)):
        asyncio.run(flows.save.save_step.fn(job.request(1)))
    told = read_entry(job.request(1))
    page = f"http://127.0.0.1:9/runs/flow-run/{RUN}"
    assert (told and (told.state, told.start, told.message, told.url)) == (
        ("failed", 2, str(why), page) if is_own else None
    )
    assert [image.failed for image in job.spool.tickets()[0]] == [is_own]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_run_that_a_user_has_made_of_a_save_is_not_its_run(job: Job, is_own: bool) -> None:
    run = SimpleNamespace(idempotency_key=job.request(1).key if is_own else None)
    with FlowRunContext.model_construct(flow_run=run):
        assert flows.save.FlowDriver(job.request(1))._run is (run if is_own else None)


def test_a_run_tells_itself_that_it_has_completed(
    job: Job, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    run = SimpleNamespace(run_count=2, id="1-2-3")  # whose server nothing names
    monkeypatch.setattr(flows.save.FlowDriver, "_run", run)
    monkeypatch.setenv("PREFECT_API_URL", "")
    monkeypatch.setenv("TRINITY_SYNC_HOME", str(job.root.parent))
    asyncio.run(flows.save.save_step.fn(job.request(1)))
    told = read_entry(job.request(1))
    assert told
    assert (told.state, told.start, told.message) == ("completed", 2, "")


def test_a_run_whose_root_is_away_is_left_to_be_retried_and_marks_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    done = flows.save.FlowDriver.do

    async def fail(self: Any, part: Part) -> None:
        await done(self, part)
        if part.name == "persist":
            raise RootAwayError("not mounted")

    monkeypatch.setattr(flows.save.FlowDriver, "do", fail)
    state = asyncio.run(flows.save.save_step.fn(SaveRequest(root=str(tmp_path), step=1, run=1)))
    assert (state.name, state.type.value) == ("Waiting for its root", "CRASHED")
    assert calls == ["find_nodes", "persist"]


def test_a_record_that_cannot_be_read_for_a_moment_fails_no_run(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.stage(1, {"model": {"w": torch.ones(9)}})
    driver = flows.save.FlowDriver(job.request(1))
    monkeypatch.setattr(flows.save, "NODES", Part("find_nodes", repeats_after=(0,)))
    fails = iter([OSError(errno.EIO, "a disk"), None])

    def read(root: str) -> JobSettings:
        if error := next(fails):
            raise error
        return read_job_settings(root)

    monkeypatch.setattr(pipeline, "read_job_settings", read)
    asyncio.run(driver._find_nodes())
    assert [each.shards.ranks for each in driver._nodes] == [{"actor": (0,)}]


def sample(name: str, **labels: str) -> float | None:
    found = {"kind": "checkpoint", **labels}
    return flows.save.metrics.METRICS.registry.get_sample_value(name, found)


def drive(
    request: SaveRequest,
    part: Part,
    why: Exception,
    answer: Callable[[Entry], object],
    *,
    start: int = 1,
    begun: Entry | None = None,
) -> None:
    """Have a part of a flow run fail, and answer what it tells in the journal."""

    async def fail() -> None:
        raise why

    async def await_the_end() -> None:
        driver = flows.save.FlowDriver(request)
        driver._limit_s = 600.0
        setattr(driver, f"_{part.name}", fail)
        waiting = asyncio.create_task(driver.do(part))
        while (known := read_entry(request)) == begun and not waiting.done():
            await asyncio.sleep(0.01)
        if known and known != begun:
            answer(known)
        await waiting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows.save.FlowDriver, "_run", SimpleNamespace(run_count=start, id=RUN))
        asyncio.run(asyncio.wait_for(await_the_end(), 60))


@pytest.mark.parametrize("why", [HiddenSpoolError("not seen"), StackError("Ray"), KeyError("x")])
@pytest.mark.parametrize("part", [PERSIST, COMMIT])
@pytest.mark.parametrize("ends", ["done", "the disk is full"])
def test_a_save_that_the_stack_cannot_do_ends_as_its_saver_tells(
    job: Job, why: Exception, part: Part, ends: str
) -> None:
    job.stage(1, {"model": {"w": torch.ones(9)}})
    request, told = job.request(1), list[Entry]()

    def answer(known: Entry) -> None:
        told.append(known)
        assert (known.state, str(why) in known.message) == ("left", True)
        assert not any(image.failed for image in job.spool.tickets()[0])
        if ends == "done":
            job.commit(1)
        else:
            append(request, "failed", ends, over=known)

    with nullcontext() if ends == "done" else pytest.raises(SaveFailedError, match=ends):
        drive(request, part, why, answer)
    assert told


@pytest.mark.parametrize("start", [1, 2])
def test_a_save_that_a_saver_has_failed_before_its_run_began_is_left_to_none_until_it_is_retried(
    job: Job, start: int
) -> None:
    request = job.request(1)
    append(request, "failed", "non-finite values")  # by the saver
    begun = append(request, "begun", start=start)

    def answer(known: Entry) -> None:
        append(request, "failed", "the disk is full", over=known)

    why = "non-finite values" if start == 1 else "the disk is full"
    with pytest.raises(SaveFailedError, match=why):
        drive(request, PERSIST, HiddenSpoolError("not seen"), answer, start=start, begun=begun)


def test_a_commit_by_the_saver_alone_is_counted_and_told_as_any_other(
    job: Job, events: list[str]
) -> None:
    asyncio.run(flows.save.FlowDriver(job.request(1))._tell_commit())
    assert events == ["committed"]
    labels = {"job": job.request(1).job, "outcome": "committed", "by": "saver"}
    assert sample("trinity_sync_saves_total", **labels) == 1
