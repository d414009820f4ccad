"""What has become of a save, by who began it, who died, who took over and how it ended."""

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.answers import serving
from tests.support.command import invoke
from tests.support.job import Job
from tests.unit.cli.test_wait_command import describe
from tests.unit.retention.test_retention import prune
from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.saver_control import SaveTrigger
from trinity_sync.errors import SaveTimeoutError
from trinity_sync.formats.hf_export import fail_export_request
from trinity_sync.saves.journal import SaveState, append, read_entry
from trinity_sync.saves.save_status import PendingSave, end_images, read_status
from trinity_sync.settings import Settings
from trinity_sync.snapshot.ticket import failure_path, hold_image
from trinity_sync.storage import manifest as manifest_files
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.manifest import FileRecord, write_manifest
from trinity_sync.storage.runs import open_run

STEP = 4
Event = Callable[[Job], object]


def worker(state: SaveState, message: str = "", start: int = 1) -> Event:
    return lambda job: append(job.request(STEP), state, message, start=start)


def saver(state: SaveState, message: str = "") -> Event:
    """The saver tells it, in the place of what the journal has."""
    return lambda job: append(job.request(STEP), state, message, over=read_entry(job.request(STEP)))


def commits(job: Job) -> None:
    job.commit(STEP)


def fails_to_export(job: Job) -> None:
    fail_export_request(job.root, 1, STEP, "actor")


def is_to_be_exported(job: Job) -> None:
    request = replace(require_committed(job.root, STEP), exports={"actor": "hf_model"})
    write_manifest(job.root, request)


def is_superseded(job: Job) -> None:
    open_run(job.root, "second", STEP - 1)
    job.commit_states(STEP + 1, {"model": {"w": torch.zeros(3)}}, run=2)


def is_removed(job: Job) -> None:
    job.commit_states(STEP + 1, {"model": {"w": torch.zeros(3)}})
    prune(job.root, "last=1")


DISK_FULL = "the disk is full"
COMMITTED = "the step is committed, and"
FULL = saver("failed", DISK_FULL)
TOLD_LATE = (worker("failed", "its process died"), worker("left", "it does not see it"))


@pytest.mark.parametrize(
    ("events", "ranks_are_told", "status", "wait_exits_with"),
    [
        ((), None, "pending", 1),
        ((worker("begun", "a text"),), None, "writing", 1),
        ((saver("begun"),), None, "writing", 1),
        ((worker("left", "not seen"),), None, "pending", 1),
        ((worker("left", "not seen"), saver("begun")), None, "writing", 1),
        ((worker("failed", DISK_FULL),), DISK_FULL, "failed", 1),
        ((worker("begun"), saver("begun"), FULL), DISK_FULL, "failed", 1),
        ((worker("left", "not seen"), FULL), DISK_FULL, "failed", 1),
        ((FULL, worker("begun")), None, "writing", 1),
        ((FULL, worker("begun"), saver("failed", "again")), "again", "failed", 1),
        ((worker("begun"), FULL, *TOLD_LATE), DISK_FULL, "failed", 1),
        ((worker("begun"), FULL, worker("begun", start=2)), None, "writing", 1),
        ((worker("begun"), commits), "", "committed", 0),
        ((worker("begun"), commits, saver("completed")), "", "committed", 0),
        ((worker("begun"), FULL, commits), "", "committed", 0),
        ((commits, fails_to_export, worker("failed", "no config")), "no config", "failed", 0),
        ((commits, fails_to_export, saver("failed", "no config")), "no config", "failed", 0),
        ((commits, is_to_be_exported, worker("failed", "Ray died")), "Ray died", "failed", 0),
        ((commits, is_to_be_exported, worker("begun")), None, "committed", 0),
        ((worker("failed", DISK_FULL), is_superseded), DISK_FULL, "superseded", 1),
        ((commits, saver("completed"), is_removed), "", "committed", 1),
    ],
)  # fmt: skip
def test_all_say_the_same_of_a_save(
    job: Job,
    events: tuple[Event, ...],
    ranks_are_told: str | None,
    status: str,
    wait_exits_with: int,
) -> None:
    open_run(job.root, "first", 0)
    job.stage(STEP, {"model": {"w": torch.zeros(3)}})
    for event in events:
        event(job)
    settings = Settings(spool=job.spool.folder.parent, home=job.root.parent / "home")
    request = job.request(STEP, components=("model",))
    exports = "actor" if {fails_to_export, is_to_be_exported} & {*events} else ""
    for rank in (0, 1):
        trigger = SaveTrigger(settings)
        with closing(CommitWatcher(trigger, job.spool, rank=rank)) as watcher:
            trigger.hurry = lambda *_: True  # type: ignore[method-assign]  # there is a saver
            watcher.follow(request, exports=exports)
            if ranks_are_told is None:
                with pytest.raises(SaveTimeoutError):
                    watcher.wait(time.monotonic() + 0.3)
            else:
                failures = watcher.wait(time.monotonic() + 60)
                assert [ranks_are_told in each for each in failures] == [True] * bool(
                    ranks_are_told
                )
    run = partial(invoke, env=settings.to_variables() | {"PREFECT_API_URL": ""})
    rows = json.loads(run("runs", job.root, "-o", "json").stdout)["saves"]
    assert [row["status"] for row in rows if (row["run"], row["step"]) == (1, STEP)] == [status]
    waits = run("wait", job.root, STEP, "--timeout", "0.5")
    assert waits.exit_code == wait_exits_with
    report = json.loads(run("report", job.root, "-o", "json").stdout)["report"]
    told = ranks_are_told
    if exports:
        told = f"{COMMITTED} not exported: {told}"
    assert [each["message"] for each in report["failures"] if each["cause"] == "Failed"] == (
        [told] if status == "failed" else []
    )


def test_a_save_that_has_completed_and_whose_step_was_removed_has_not_failed(job: Job) -> None:
    """So its saver does not save it again, nor do those of other nodes call it a failure."""
    job.stage(STEP, {"model": {"w": torch.zeros(3)}})
    for event in (commits, worker("completed"), is_removed):
        event(job)
    assert read_status(job.request(STEP), read_entry(job.request(STEP))) == ("removed", "")


def test_a_model_that_rank_0_has_exported_is_seen_by_a_rank_that_reads_its_own_files(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_files, "PART_FILES", 1)
    job.world_size = 2
    for rank in range(2):
        job.stage(STEP, {"model": {"w": torch.zeros(3)}}, rank=rank)
    committed = replace(job.commit(STEP), exports={"actor": "hf_model"})
    exported = FileRecord("actor/huggingface/model.safetensors", 1, "", "actor", "hf_model")
    request = job.request(STEP, components=("model",))
    for files, result in ((), None), ((exported,), ""):
        write_manifest(job.root, replace(committed, files=(*committed.files, *files)))
        pending = PendingSave(request, 0.0, 0.0, 0.0, rank=1, exports={"actor"})
        assert pending.find_result(None, job.spool) == result


def test_an_image_that_is_held_for_longer_than_a_limit_is_not_marked(job: Job) -> None:
    job.stage(STEP, {"model": {"w": torch.zeros(3)}})
    (sealed,) = job.spool.tickets()[0]
    with hold_image(sealed.slot, sealed.ticket.image):
        end_images(job.spool, job.request(STEP), "its run has failed", limit_s=0.0)
    assert not failure_path(sealed.slot).exists()
    end_images(job.spool, job.request(STEP), "its run has failed", limit_s=0.0)
    assert failure_path(sealed.slot).read_text() == "its run has failed"


def is_required(job: Job) -> None:
    remote = {"remote": f"file://{job.root}.remote", "remote_required": True}
    write_job_settings(job.root, remote)


@pytest.mark.parametrize(
    ("events", "state", "status", "reason"),
    [
        ((), "SCHEDULED", "pending", None),
        ((worker("failed", DISK_FULL),), "SCHEDULED", "pending", None),  # it is retried
        ((worker("begun"), FULL), "SCHEDULED", "pending", None),
        ((worker("begun"), FULL), "RUNNING", "failed", DISK_FULL),
        ((worker("begun"), FULL), "CRASHED", "failed", DISK_FULL),
        ((worker("begun"), commits), "CRASHED", "committed", None),
        ((worker("begun"), commits), "RUNNING", "committed", None),
        ((commits, fails_to_export), "FAILED", "failed", f"{COMMITTED} not exported"),
        ((is_required, commits), "FAILED", "failed", f"{COMMITTED} not replicated"),
        ((worker("begun"), is_superseded), "CANCELLED", "superseded", None),
        ((commits, is_removed), "COMPLETED", "committed", None),
    ],
)
def test_a_flow_run_tells_of_its_save_what_files_do_not_tell_better(
    job: Job, events: tuple[Event, ...], state: str, status: str, reason: str | None
) -> None:
    open_run(job.root, "first", 0)
    job.stage(STEP, {"model": {"w": torch.zeros(3)}})
    for event in events:
        event(job)
    env = {"TRINITY_SYNC_SPOOL": str(job.spool.folder.parent), "TRINITY_SYNC_HOME": f"{job.root}.h"}
    at = "2099-01-02T03:04:05Z" if state == "SCHEDULED" else "2026-01-02T03:04:05Z"
    of_save = json.dumps([describe(job.request(STEP), state, 1, at)])
    with serving(
        lambda it, _: (200, of_save if it.path == "/api/flow_runs/filter" else "[]")
    ) as url:
        run = partial(invoke, env=env | {"PREFECT_API_URL": f"{url}/api"})
        rows = json.loads(run("runs", job.root, "-o", "json").stdout)["saves"]
        report = json.loads(run("report", job.root, "-o", "json").stdout)["report"]
    rows = [row for row in rows if (row["run"], row["step"]) == (1, STEP)]
    assert [(row["status"], row["reason"]) for row in rows] == [(status, reason)]
    in_flight = [each["step"] for each in report["in_flight"]]
    assert in_flight == [STEP] * (status in ("pending", "writing"))
    assert [each["steps"] for each in report["failures"] if each["command"]] == (
        [[STEP]] if status == "failed" else []
    )
