"""What the worker does with images that no flow run will persist."""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from tests.support.answers import serving
from tests.support.dying import end_of
from tests.support.job import Job, find_orphaned_saves
from tests.support.savers import await_that, end_savers, savers_of
from tests.unit.conftest import Open
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.client.prefect_api import PrefectApi
from trinity_sync.client.saver_control import SERVED, SERVER, SaveTrigger, lock_path
from trinity_sync.fs.locks import try_acquire_file_lock
from trinity_sync.fs.records import add_digest
from trinity_sync.layout import MANIFEST
from trinity_sync.orchestration.on_node import persist_share
from trinity_sync.orchestration.recovery import node
from trinity_sync.orchestration.recovery.flow_runs import allow_eviction
from trinity_sync.orchestration.recovery.node import NodeRecovery
from trinity_sync.pipeline.pending import find_pending_saves, retry_images
from trinity_sync.pipeline.save import Share
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import compare_late_images
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import mark_image_failed, open_job_spool
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.stack.doctor import _check_tickets
from trinity_sync.storage import commit as commits
from trinity_sync.storage.commit import commit
from trinity_sync.storage.discovery import read_latest_pointer, require_committed
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.placement import await_node_shards
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.save_functions import write_request


def find_orphaned_steps(job: Job) -> list[int]:
    """Steps that a flow run would be requested for."""
    return [request.step for request in find_orphaned_saves(job.spool.folder.parent, grace_s=-1)]


@pytest.mark.parametrize("of_functions", [False, True])
def test_a_step_that_another_release_has_committed_is_in_the_way_of_no_other_save(
    job: Job, of_functions: bool
) -> None:
    other = job.request(1).save.folder / MANIFEST
    other.parent.mkdir()
    other.write_text(add_digest('{"format": 9999, "run": 1}'))
    for step in (1, 2):
        if of_functions:
            write_request(job.spool, job.request(step).save, job.request(step).model_dump_json())
        else:
            job.stage(step, {"model": {"w": torch.ones(3)}})
    assert find_orphaned_steps(job) == [2]


def commit_and_die_after_the_manifest(job: Job, step: int) -> None:
    """The real commit, killed at the instant after the rename of the manifest."""
    job.stage(step, {"model": {"w": torch.ones(10)}})
    write = commits.write_manifest_into

    def write_and_die(*arguments: Any) -> None:
        write(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    def commit_it() -> None:
        commits.write_manifest_into = write_and_die  # type: ignore[assignment]
        job.commit(step)

    assert end_of(commit_it) == -signal.SIGKILL
    assert read_manifest(job.root, step) is not None


def mark(job: Job, step: int) -> Path:
    return job.root / f"global_step_{step}/.full_checkpoint"


@pytest.mark.parametrize("failed", ["", "model", "optim"])
def test_a_save_of_which_one_image_has_failed_is_not_asked_for(job: Job, failed: str) -> None:
    job.stage(4, {name: {"w": torch.zeros(3)} for name in ("model", "optim")})
    for image in job.spool.tickets()[0]:
        if image.ticket.component == failed:
            mark_image_failed(image, "the disk was full")
    assert find_orphaned_steps(job) == ([] if failed else [4])


def test_a_retry_is_of_the_run_that_has_the_number_and_not_of_one_that_a_restored_root_has_lost(
    job: Job,
) -> None:
    job.stage(1, {"model": {"w": torch.zeros(3)}}, run_key="lost", attempt=3)
    job.stage(1, {"optim": {"w": torch.ones(3)}})
    lost, own = sorted(job.spool.tickets()[0], key=lambda each: each.ticket.component)
    for each in (lost, own):
        mark_image_failed(each, "the disk is full")
    retry_images(job.spool, 1, 1, "checkpoint")
    assert (failure_path(lost.slot).exists(), failure_path(own.slot).exists()) == (True, False)


def test_a_commit_that_died_after_its_manifest_is_finished(job: Job) -> None:
    commit_and_die_after_the_manifest(job, 5)
    assert read_latest_pointer(job.root, "checkpoint") is None
    assert not mark(job, 5).exists()
    assert find_orphaned_steps(job) == []
    assert read_latest_pointer(job.root, "checkpoint") == 5
    assert read_latest_pointer(job.root, "state_dict") == 5
    assert mark(job, 5).exists()
    assert job.spool.tickets() == ([], [])


@pytest.mark.parametrize("settle_s", [0.0, 1.0])
def test_a_commit_that_has_just_been_made_frees_its_slots_itself(job: Job, settle_s: float) -> None:
    commit_and_die_after_the_manifest(job, 5)
    due = read_manifest(job.root, 5).committed_at + 2.0 + settle_s

    def recover_at(moment: float) -> None:
        how = {"grace_s": 2.0, "settle_s": settle_s, "clock": lambda: moment}
        assert find_orphaned_saves(job.spool.folder.parent, **how) == []

    recover_at(due - 0.1)
    assert len(job.spool.tickets()[0]) == 1
    recover_at(due + 0.1)
    assert job.spool.tickets() == ([], [])


def test_a_save_has_waited_since_its_newest_image(job: Job) -> None:
    for rank in (0, 1):
        job.stage(5, {"model": {"w": torch.ones(10)}}, rank=rank)
    newest = max(image.ticket.monotonic_s for image in job.spool.tickets()[0])
    least = time.monotonic() - newest
    (age_s,) = find_pending_saves(job.spool, grace_s=-1).values()
    assert least <= age_s <= time.monotonic() - newest


def test_an_image_that_is_not_part_of_a_commit_is_compared_with_it_once(job: Job) -> None:
    job.commit_states(5, {"model": {"w": torch.ones(10)}})
    job.stagers.pop(0).close()  # by a process that was started meanwhile
    job.stage(5, {"model": {"w": torch.zeros(10)}})
    assert find_orphaned_steps(job) == [5]
    compare_late_images(job.spool, job.request(5))  # its flow run has completed
    ((late,), _) = job.spool.tickets()
    assert late.failed
    mark(job, 5).unlink()
    assert find_orphaned_steps(job) == []
    assert not mark(job, 5).exists()  # the commit was not finished again


def test_a_commit_that_died_does_not_move_the_pointer_back_nor_if_it_was_superseded(
    job: Job,
) -> None:
    commit_and_die_after_the_manifest(job, 5)
    job.commit_states(6, {"model": {"w": torch.ones(10)}})
    assert find_orphaned_steps(job) == []
    assert read_latest_pointer(job.root, "checkpoint") == 6
    assert job.spool.tickets() == ([], [])
    open_run(job.root, "first", 0)
    job.commit_states(7, {"model": {"w": torch.ones(10)}})
    commit_and_die_after_the_manifest(job, 8)
    open_run(job.root, "second", 7)
    assert find_orphaned_steps(job) == []
    assert read_latest_pointer(job.root, "checkpoint") == 7
    assert job.spool.tickets() == ([], [])


def test_a_commit_that_cannot_be_finished_leaves_the_others_alone(job: Job) -> None:
    commit_and_die_after_the_manifest(job, 5)
    (job.root / "latest_state_dict_iteration.txt").mkdir()
    job.stage(6, {"model": {"w": torch.ones(10)}})
    assert find_orphaned_steps(job) == [6]
    (job.root / "latest_state_dict_iteration.txt").rmdir()
    assert find_orphaned_steps(job) == [6]
    assert read_latest_pointer(job.root, "state_dict") == 5


def test_a_job_that_cannot_be_looked_at_leaves_the_others_alone_and_is_named_once(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job.stage(6, {"model": {"w": torch.ones(10)}})
    (tmp_path / "a").mkdir()  # comes before the others
    other = open_job_spool(job.spool.folder.parent, tmp_path / "a")
    (other.folder / "actor.model.rank0.0.slot.ticket").mkdir()
    with caplog.at_level(logging.WARNING):
        assert find_orphaned_steps(job) == [6]
        assert find_orphaned_steps(job) == [6]
    assert len([each for each in caplog.records if str(other.folder) in each.message]) == 1


def save_by_a_function_and_die(job: Job, spool: Path) -> None:
    """A trainer that is killed before a server has taken its request."""

    def write() -> None:
        folder = job.root / "global_step_5/actor"
        folder.mkdir(parents=True)
        (folder / "adapter.bin").write_bytes(b"lora")

    def save() -> None:
        settings = Settings(spool=spool)
        trigger = SaveTrigger(settings)
        saves = CheckpointCoordinator(job.root, settings=settings, trigger=trigger)
        saves.save_sync(write, 5)
        asyncio.run(saves.register_and_monitor(5, checkpoint_thread_count=1))
        os.kill(os.getpid(), signal.SIGKILL)

    assert end_of(save) == -signal.SIGKILL


def commit_functions(request: SaveRequest) -> None:
    (share,) = await_node_shards(request.save, rank_timeout_s=0)
    saved = persist_share(request, Share(None, True), share)
    assert len(saved.statuses) == request.expected
    commit(request.save, saved.written, saved.statuses)


def test_a_save_of_functions_alone_is_requested_for_a_trainer_that_died_and_its_commit_finished(
    job: Job, spool_folder: Path
) -> None:
    save_by_a_function_and_die(job, spool_folder)
    (request,) = find_orphaned_saves(spool_folder, grace_s=-1)
    assert find_orphaned_saves(spool_folder, grace_s=60) == []
    assert (request.step, request.kind, request.components) == (5, "checkpoint", ())
    commit_functions(request)
    assert [each.path for each in require_committed(job.root, 5).files] == ["actor/adapter.bin"]
    for name in ("latest_checkpointed_iteration.txt", "latest_state_dict_iteration.txt"):
        (job.root / name).unlink()  # as if it had died after its manifest
    mark(job, 5).unlink()
    assert find_orphaned_saves(spool_folder, grace_s=60) == []
    assert read_latest_pointer(job.root, "checkpoint") is None
    assert find_orphaned_saves(spool_folder, grace_s=-1) == []
    assert read_latest_pointer(job.root, "checkpoint") == 5
    assert mark(job, 5).exists()
    assert not list(job.spool.receipts.iterdir())


def test_no_save_waits_for_a_clock_that_was_set_back(job: Job, spool_folder: Path) -> None:
    earlier = time.time() - 3600
    save_by_a_function_and_die(job, spool_folder)
    (request,) = find_orphaned_saves(spool_folder, grace_s=2, clock=lambda: earlier)
    commit_functions(request)
    (job.root / "latest_checkpointed_iteration.txt").unlink()  # as if it had died
    assert find_orphaned_saves(spool_folder, grace_s=2, clock=lambda: earlier) == []
    assert read_latest_pointer(job.root, "checkpoint") == 5


def test_a_save_of_functions_that_failed_is_not_asked_for_again(
    job: Job, spool_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_by_a_function_and_die(job, spool_folder)
    (request,) = find_orphaned_saves(spool_folder, grace_s=-1)
    allow_eviction(spool_folder, request, "the disk is full")
    assert find_orphaned_saves(spool_folder, grace_s=-1) == []
    commit_functions(request)  # a retry by hand still has its statuses
    require_committed(job.root, 5)
    (job.spool.receipts / "1.6.checkpoint.request.json").write_text("{}")
    assert find_orphaned_saves(spool_folder, grace_s=-1) == []
    assert "1.6.checkpoint.request.json" in caplog.text


def test_the_request_of_functions_waits_for_its_root_also_if_another_job_begins_there(
    job: Job, spool_folder: Path, coordinator_of: Open
) -> None:
    save_by_a_function_and_die(job, spool_folder)
    (request,) = find_orphaned_saves(spool_folder, grace_s=-1)
    away = job.root.rename(job.root.with_name("away"))
    assert find_orphaned_saves(spool_folder, grace_s=-1) == []
    coordinator_of()
    assert find_orphaned_saves(spool_folder, grace_s=-1) == []
    job.root.rename(job.root.with_name("the other's"))  # whose run has its file open
    away.rename(job.root)
    assert find_orphaned_saves(spool_folder, grace_s=-1) == [request]


def test_the_images_of_a_cancelled_save_may_be_evicted_and_are_not_asked_for_again(
    job: Job,
) -> None:
    for step in (5, 6):
        job.stage(step, {"model": {"w": torch.ones(10)}})
    (request, _) = find_orphaned_saves(job.spool.folder.parent, grace_s=-1)
    allow_eviction(job.spool.folder.parent, request, "cancelled by a person")
    cancelled, other = sorted(job.spool.tickets()[0], key=lambda image: image.ticket.step)
    assert (cancelled.ticket.step, cancelled.failed, other.failed) == (5, True, False)
    assert failure_path(cancelled.slot).read_text() == "cancelled by a person"
    assert find_orphaned_steps(job) == [6]


@contextmanager
def worker(
    job: Job, tmp_path: Path, patch: pytest.MonkeyPatch
) -> Iterator[tuple[Callable[[], None], list[str]]]:
    """What a worker does at each poll, and the requests that its server has answered."""
    settings, created = Settings(spool=job.spool.folder.parent, home=tmp_path / "home"), []
    recovery = NodeRecovery(settings, "here/1/1", lambda _: False, lambda _: None)

    def answer(asked: BaseHTTPRequestHandler, body: str) -> tuple[int, str]:
        if asked.path.endswith("/create_flow_run"):
            created.append(json.loads(body)["idempotency_key"])
        run = {"id": str(uuid4()), "name": "save-step", "flow_id": str(uuid4())}
        return 200, "[]" if asked.path.endswith("/filter") else json.dumps(run)

    async def poll() -> None:
        async with PrefectApi(settings) as api:
            await recovery.serve_images(api)

    with serving(answer) as url:
        patch.setenv("PREFECT_API_URL", f"{url}/api")
        patch.setattr(node, "GRACE_S", -1.0)
        yield lambda: asyncio.run(poll()), created
    end_savers(settings.spool)


def test_a_save_whose_saver_died_with_all_trainers_is_committed_by_one_of_the_worker(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = job.spool.folder / SERVED
    served.write_text("alone 027-1-0123abcd")  # in mounts that are gone, and another server's
    job.stage(5, {"model": {"w": torch.ones(10)}})
    with worker(job, tmp_path, monkeypatch) as (poll, created):
        with try_acquire_file_lock(lock_path(job.spool.folder.parent, "027-1-0123abcd")):
            poll()
            assert served.read_text() == "alone 027-1-0123abcd"  # it lives
        poll()
        await_that(lambda: not job.spool.tickets()[0], "its commit")
        assert not created
        (saver,) = savers_of(job.spool.folder.parent)
        poll()
        saver.wait(250)  # nothing waits
    (record,) = require_committed(job.root, 5).files
    assert (job.root / "global_step_5" / record.path).stat().st_mode & 0o027 == 0


def test_a_saver_of_the_worker_requests_the_runs_of_ranks_of_other_nodes_and_stays_until_they_end(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.world_size = 2
    job.stage(5, {"model": {"w": torch.ones(10)}}, rank=1)
    with worker(job, tmp_path, monkeypatch) as (poll, created):
        poll()
        await_that(lambda: created == [job.request(5).key], "the request of its flow run")
        (saver,) = savers_of(job.spool.folder.parent)
        poll()
        saver.kill()
        saver.wait()
        poll()
        await_that(lambda: len(created) == 2, "the request of another one, once that is killed")


def test_a_worker_that_cannot_start_a_saver_says_why(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.stage(5, {"model": {"w": torch.ones(10)}})
    monkeypatch.setattr(sys, "executable", "")
    why = f"the saves in {job.spool.folder} wait, as this worker starts no saver: "
    with worker(job, tmp_path, monkeypatch) as (poll, _):
        poll()
        assert f"{why}the saver cannot be started" in caplog.text
        monkeypatch.setenv("TRINITY_SYNC_STACK__WORKER__ALLOWED_PATHS", "/elsewhere")
        poll()
    assert f"{why}{job.root} is not below a folder that flows may use on this node" in caplog.text
    assert f"wait to be persisted: {job.root} is not below" in _check_tickets(job.spool).found


def test_the_images_of_another_stack_are_left_to_its_own_worker_for_some_minutes(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job.spool.folder / SERVER).write_text("http://another:4200")
    job.stage(5, {"model": {"w": torch.ones(10)}})
    with worker(job, tmp_path, monkeypatch) as (poll, _):
        monkeypatch.setattr(sys, "executable", "")
        poll()
        assert not (job.spool.folder / SERVED).exists()
        monkeypatch.setattr(node, "OTHERS_S", -1.0)  # they have passed
        poll()
        assert (job.spool.folder / SERVED).exists()
        assert (job.spool.folder / SERVER).read_text().startswith("http://127.0.0.1:")
