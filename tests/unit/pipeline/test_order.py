"""The order of a save in its two drivers: whatever happens between two parts, both end the same."""

import asyncio
import logging
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from prefect.exceptions import PrefectHTTPStatusError
from ray.exceptions import GetTimeoutError, NodeDiedError, WorkerCrashedError

import flows.save
import tasks.on_ray
import tasks.save
from tests.support.job import Job
from tests.support.prefect_stand_in import without_catalog_and_pages
from trinity_sync.errors import (
    ConfigError,
    EvictedError,
    ExportError,
    FormatError,
    HiddenSpoolError,
    ImageError,
    LockTimeoutError,
    MissingPackageError,
    MissingShardsError,
    RootAwayError,
    SaveError,
    StackError,
    SupersededError,
    TicketError,
    is_of_stack,
)
from trinity_sync.layout import step_folder, steps_on_disk
from trinity_sync.orchestration.on_node import call, replicate_step
from trinity_sync.orchestration.recovery.flow_runs import allow_eviction
from trinity_sync.pipeline import save as pipeline
from trinity_sync.pipeline.save import ORDER, Driver, Part, SaverDriver, is_io_error
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import StackSettings
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.manifest import read_manifest

DOCS = Path(__file__).parents[3] / "docs/contributing/design.md"
STATE = {"w": torch.arange(9.0)}
NAMES = [part.name for part in ORDER]


@pytest.mark.parametrize(
    ("error", "is_left", "is_repeated"),
    [
        (OSError(28, "No space left on device"), False, True),  # of the root
        (PermissionError(13, "Permission denied"), False, True),
        (RootAwayError("not mounted"), False, False),
        (LockTimeoutError("the lock of a commit is held"), False, False),
        (ImageError("truncated"), False, False),  # of the image
        (TicketError("torn"), False, False),
        (MissingShardsError("no rank 1"), False, False),
        (EvictedError("gone"), False, False),
        (SupersededError("a later run"), False, False),  # refusals
        (SaveError("non-finite values"), False, False),
        (ConfigError("no flow may work on this root"), False, False),
        (HiddenSpoolError("another /dev/shm"), True, False),
        (FormatError("of another release"), True, False),
        (StackError("node b is not in this Ray cluster"), True, False),
        (MissingPackageError("xxhash is not installed"), True, False),
        (ModuleNotFoundError("No module named tasks"), True, False),
        (NodeDiedError("its node died"), True, False),
        (WorkerCrashedError(), True, False),
        (PrefectHTTPStatusError("409", request=None, response=None), True, False),  # type: ignore[arg-type]
        (MemoryError(), True, False),
        (KeyError("unforeseen"), True, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_a_fault_of_the_stack_is_left_to_the_saver_at_once(
    error: Exception, is_left: bool, is_repeated: bool
) -> None:
    assert (is_of_stack(error), is_io_error(error)) == (is_left, is_repeated)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "session/logs"), GetTimeoutError("Ray")])
def test_an_os_error_of_ray_is_none_of_the_root(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    call_in_ray = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=fail))
    monkeypatch.setattr(tasks.on_ray, "_get_remote_call", lambda: call_in_ray)
    with pytest.raises(StackError, match=r"Ray cannot run .*trinity-sync restart") as failed:
        asyncio.run(tasks.on_ray.run_on_node(None, None, call))
    assert (is_of_stack(failed.value), is_io_error(failed.value)) == (True, False)


class Killed(BaseException):
    """The end of a process; no part catches it."""


@dataclass
class Fault:
    """What goes wrong before or after a part, at so many attempts."""

    part: str
    when: Literal["before", "after"]
    error: type[BaseException] = OSError
    left: int = 1_000

    def strike(self, part: Part, when: str) -> None:
        if (self.part, self.when) == (part.name, when) and self.left:
            self.left -= 1
            raise self.error(f"{when} {part.name}")


Attempt = Callable[[Job, SaveRequest, list[Fault]], str]


def with_faults(driver: type[Driver], faults: list[Fault]) -> Any:
    class Faulty(driver):  # type: ignore[misc, valid-type]
        async def do(self, part: Part) -> None:
            for fault in faults:
                fault.strike(part, "before")
            await super().do(part)
            for fault in faults:
                fault.strike(part, "after")

    return Faulty


def save_as_saver(job: Job, request: SaveRequest, faults: list[Fault]) -> str:
    try:
        with_faults(SaverDriver, faults)(request, StackSettings(), job.spool.folder.parent).save()
    except (Exception, Killed) as error:
        return str(error)
    return ""


def save_as_flow(job: Job, request: SaveRequest, faults: list[Fault]) -> str:
    """Run the flow in this process; the worker ends the images of a run that has failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows.save, "FlowDriver", with_faults(flows.save.FlowDriver, faults))
        try:
            asyncio.run(flows.save.save_step.fn(request))
        except Killed as error:
            return str(error)
        except Exception as error:
            allow_eviction(job.spool.folder.parent, request, str(error))
            return str(error)
    return ""


DRIVERS: dict[str, Attempt] = {"flow": save_as_flow, "saver": save_as_saver}


@dataclass
class Node:
    """A node on which the flow's tasks are functions of this process."""

    folder: Path
    spool: Path
    exports: Callable[[SaveRequest], None] = field(default=lambda _: None)
    numbers: Any = field(default_factory=count)

    def export(self, request: SaveRequest) -> None:
        self.exports(request)
        (self.folder / f"{Path(request.root).name}.exported").touch()

    def begin_job(self, *, required: bool = False) -> tuple[Job, SaveRequest]:
        """Return a job with a committed step, and the request of the next one."""
        job = Job.open(self.folder / f"ckpts{next(self.numbers)}", self.spool)
        job.commit_states(1, {"model": STATE})
        remote = {"remote": f"file://{job.root}-remote", "remote_required": required}
        write_job_settings(job.root, remote)
        job.stage(2, {"model": STATE}, keep=1, export="hf_model")
        return job, job.request(2, components=("model",))

    def end_of(self, job: Job, failure: str) -> dict[str, Any]:
        """What everybody sees of the second step, and what else there is."""
        images = job.spool.tickets()[0]
        job.close()
        return {
            "failure": failure,
            "steps": [step for step in steps_on_disk(job.root) if read_manifest(job.root, step)],
            "copied": 2 in steps_on_disk(Path(f"{job.root}-remote")),
            "exported": (self.folder / f"{job.root.name}.exported").exists(),
            "images": len(images),
            "marked": sum(bool(image.failed) for image in images),
        }


DONE = {"failure": "", "steps": [2], "copied": True, "exported": True, "images": 0, "marked": 0}


@pytest.fixture
def node(tmp_path: Path, spool_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path, spool_folder)

    async def run_on_node(_: str, root: str, function: Any, *args: Any) -> Any:
        return call(root, function, *args).unwrap()

    async def request_replication(request: SaveRequest, url: str) -> None:
        replicate_step(request.root, request.step, url)

    async def show(**_: object) -> None:
        """Show no page."""

    without_catalog_and_pages(monkeypatch)
    monkeypatch.setenv("TRINITY_SYNC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(spool_folder))
    monkeypatch.setattr(pipeline, "export_requested_models", made.export)
    replaced = {
        "PERSIST_TASKS": {"model": tasks.save.persist},
        "commit_step": tasks.save.commit_step.fn,
        "upload": tasks.save.upload.fn,
        "export_requested_models": made.export,
        "request_replication": request_replication,
        "list_living_nodes": lambda: {socket.gethostname(): "1"},
        "emit_step_event": lambda *_, **__: None,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(flows.save, name, value)
    for module in (flows.save, tasks.save):
        monkeypatch.setattr(module, "run_on_node", run_on_node)
        monkeypatch.setattr(module, "get_run_logger", logging.getLogger)
    monkeypatch.setattr(tasks.save, "acreate_markdown_artifact", show)
    return made


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", NAMES)
def test_a_save_that_is_killed_or_fails_between_two_parts_is_repeated_and_ends_as_any_other(
    node: Node, name: str, when: Literal["before", "after"]
) -> None:
    for attempt in DRIVERS.values():
        for error in (Killed, OSError):
            job, request = node.begin_job(required=name == "upload")
            faults = [Fault(name, when, error, left=1)]
            if name == "mark_failed":  # which only a failure needs
                faults.append(Fault("commit", "before", left=1))
            attempt(job, request, faults)
            assert not any(fault.left for fault in faults)
            assert node.end_of(job, attempt(job, request, [])) == DONE


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("part", ORDER, ids=NAMES)
def test_what_fails_for_ever_ends_alike_in_both_drivers_and_as_the_table_says(
    node: Node, part: Part, when: Literal["before", "after"]
) -> None:
    ends = []
    for attempt in DRIVERS.values():
        job, request = node.begin_job(required=part.name == "upload")
        faults = [Fault(part.name, when)]
        if part.name == "mark_failed":
            faults.append(Fault("commit", "before"))
        attempt(job, request, faults)
        ends.append(node.end_of(job, attempt(job, request, faults)))
    flow, saver = ends
    if part.name == "mark_failed":  # the worker marks them nevertheless
        saver["marked"] = 1
    assert flow == saver
    strikes = f"{when} {part.name}"
    expected = dict(DONE, failure="" if part.says else strikes)
    if part.name == "export":
        expected["exported"] = when == "after"
    elif part.name == "copy" and when == "before":
        expected["copied"] = False
    elif part.name == "prune" and when == "before":
        expected["steps"] = [1, 2]
    elif part.name in ("find_nodes", "persist", "mark_failed") or strikes == "before commit":
        failure = "before commit" if part.says else strikes
        expected |= {"failure": failure, "steps": [1], "copied": False, "exported": False}
        expected |= {"images": 1, "marked": 1}
    elif part.name in ("commit", "upload"):
        copied = strikes == "after upload"
        expected |= {"steps": [1, 2], "copied": copied, "exported": False}
    assert flow == expected


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_save_that_was_committed_and_removed_before_anybody_told_it_has_succeeded(
    node: Node, driver: str
) -> None:
    job, request = node.begin_job()
    assert DRIVERS[driver](job, request, [Fault("commit", "after", Killed)]) == "after commit"
    job.commit_states(3, {"model": STATE})
    shutil.rmtree(step_folder(job.root, 2))
    assert DRIVERS[driver](job, request, []) == ""


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_image_that_comes_late_is_compared_although_the_export_has_failed(
    node: Node, driver: str
) -> None:
    job, request = node.begin_job()

    def fail(_: SaveRequest) -> None:
        job.stage(2, {"model": STATE}, keep=1, export="hf_model")
        raise ExportError("no config")

    node.exports = fail
    end = node.end_of(job, DRIVERS[driver](job, request, []))
    assert end == {**DONE, "failure": "no config", "exported": False}


def test_the_documented_table_has_the_parts_in_their_order() -> None:
    text = DOCS.read_text().partition("## Order of a save")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .*? \| .*? \| (.*?) \| (.*?) ?\|$", text, re.MULTILINE)
    found = [
        (name, fails, [int(each) for each in re.findall(r"\d+", after)])
        for name, fails, after in rows
    ]
    assert found == [
        (part.name, "nothing" if part.says else f"the {part.fails}", [*part.repeats_after])
        for part in ORDER
    ]
