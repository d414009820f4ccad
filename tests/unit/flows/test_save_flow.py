"""The order of what follows a commit; the tasks themselves run in tests/integration."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows.save
import tasks.save
from tests.support.job import Job
from trinity_sync.errors import (
    EvictedError,
    ExportError,
    HiddenSpoolError,
    MissingShardsError,
    RootAwayError,
    SaveFailedError,
    SupersededError,
)
from trinity_sync.saves.journal import append, read_entry
from trinity_sync.saves.save_request import SaveRequest

COMMITTED = SimpleNamespace(has_exports=True, keep=0, by_saver=False, alarms=["bad"])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts of the flow that were called; none of them does anything."""
    made: list[str] = []

    def patch(name: str, result: object = None) -> None:
        async def called(*_: object) -> object:
            made.append(name)
            return result

        monkeypatch.setattr(flows.save, name, called)

    async def run_on_node(
        _: str, _root: str, function: Callable[..., object], *_args: object
    ) -> None:
        made.append(function.__name__)

    class Node:
        name, shards, persisted = "here", None, ()

    patch("find_nodes", [Node])
    patch("persist_images")
    patch("commit_step", COMMITTED)
    patch("free_remaining_slots")
    patch("upload_if_required")
    monkeypatch.setattr(flows.save, "run_on_node", run_on_node)
    patch("request_replication")
    patch("mark_failed")
    patch("prune")
    monkeypatch.setattr(
        flows.save, "emit_step_event", lambda outcome, *_, **__: made.append(outcome)
    )
    monkeypatch.setattr(flows.save.metrics.METRICS, "count_committed_save", lambda *_, **__: None)
    return made


def test_a_copy_is_requested_and_older_steps_go_after_the_export_even_if_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    monkeypatch.setattr(COMMITTED, "keep", 2)
    request = SaveRequest(root=str(tmp_path), step=1, run=1)
    asyncio.run(flows.save.save_step.fn(request))
    after = ["export_requested_models", "request_replication", "prune"]
    assert calls[-5:] == ["committed", "unhealthy", *after]  # the first two are events

    async def fail(*_: object) -> None:
        raise ExportError("no config")

    monkeypatch.setattr(flows.save, "run_on_node", fail)
    with pytest.raises(ExportError):
        asyncio.run(flows.save.save_step.fn(request))
    assert calls[-2:] == ["request_replication", "prune"]


@pytest.mark.parametrize(
    ("kind", "keep", "prunes"),
    [("state_dict", 0, True), ("checkpoint", 0, False), ("checkpoint", 2, True)],
)
def test_older_weights_are_pruned_after_each_commit_of_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[str],
    kind: Any,
    keep: int,
    prunes: bool,
) -> None:
    monkeypatch.setattr(COMMITTED, "keep", keep)  # whoever has requested the save
    request = SaveRequest(root=str(tmp_path), step=1, run=1, kind=kind)
    asyncio.run(flows.save.save_step.fn(request))
    assert ("prune" in calls) == prunes


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (EvictedError("gone"), "Evicted"),
        (SupersededError("a later run"), "Superseded"),
        (MissingShardsError("no rank 1"), None),
    ],
)
def test_a_save_that_is_not_committed_is_counted_reported_and_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str | None
) -> None:
    events: list[str] = []
    pages: dict[str, str] = {}

    async def find_nodes(_: SaveRequest) -> list[flows.save.NodeSave]:
        raise error

    async def create(**fields: str) -> None:
        pages[fields["key"]] = fields["markdown"]

    monkeypatch.setattr(flows.save, "find_nodes", find_nodes)
    monkeypatch.setattr(flows.save, "list_living_nodes", dict)
    monkeypatch.setattr(flows.save, "get_run_logger", lambda: logging.getLogger())
    monkeypatch.setattr(tasks.save, "acreate_markdown_artifact", create)
    monkeypatch.setattr(
        flows.save, "emit_step_event", lambda outcome, *_, **__: events.append(outcome)
    )
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
    found = sample("trinity_sync_saves_total", job=request.job, outcome=outcome)
    assert found == 1


def test_a_run_whose_root_is_away_is_left_to_be_retried_and_marks_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    async def fail(*_: object) -> None:
        raise RootAwayError("not mounted")

    monkeypatch.setattr(flows.save, "persist_images", fail)
    state = asyncio.run(flows.save.save_step.fn(SaveRequest(root=str(tmp_path), step=1, run=1)))
    assert (state.name, state.type.value) == ("Waiting for its root", "CRASHED")
    assert "mark_failed" not in calls


def sample(name: str, **labels: str) -> float | None:
    found = {"kind": "checkpoint", **labels}
    return flows.save.metrics.METRICS.registry.get_sample_value(name, found)


def test_a_save_that_the_stack_does_not_see_fails_for_the_reason_that_its_saver_tells(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = job.request(1)
    monkeypatch.setattr(flows.save, "flow_run", SimpleNamespace(run_count=1))
    monkeypatch.setattr(flows.save, "get_run_logger", logging.getLogger)

    async def await_the_failure() -> None:
        hidden = HiddenSpoolError("the stack does not see it")
        waiting = asyncio.create_task(flows.save.leave_to_saver(request, (), hidden))
        while not (known := read_entry(request)):
            await asyncio.sleep(0.01)
        assert known.state == "hidden"
        append(request, "failed", "the disk is full", over=known)
        await waiting

    with pytest.raises(SaveFailedError, match="the disk is full"):
        asyncio.run(asyncio.wait_for(await_the_failure(), 60))
