"""Every wait for a save learns of its end, whatever the file system does meanwhile."""

import gc
import itertools
import json
import logging
import os
import shutil
import threading
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from tests.integration.fsdp.commits import CommitsHere
from tests.support.answers import server
from tests.support.forked import PRELOADED, forking
from tests.support.job import Job, Noted
from tests.support.meanwhile import fail_to_read
from tests.support.prefect_stand_in import Server, Trigger, without_catalog_and_pages
from tests.support.savers import await_that, end_savers
from tests.unit.conftest import Open
from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.client.saver_control import SaveTrigger
from trinity_sync.errors import SaveFailedError, SaveTimeoutError
from trinity_sync.fs.records import encode_body
from trinity_sync.layout import ITERATION_FILES, MANIFEST, MANIFEST_FORMAT, step_folder
from trinity_sync.retention.policies import ALL, parse_policy
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.saves.journal import Journal, append
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import PendingSave, end_images
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import mark_image_failed
from trinity_sync.snapshot.ticket import failure_path, ticket_path
from trinity_sync.storage import uncommitted as save_files
from trinity_sync.storage.manifest import Manifest, read_manifest, read_run_manifest
from trinity_sync.storage.placement import group_by_node, write_placement
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.save_functions import FunctionStatus, write_status

CARE_S = 0.4


def hear(job: Job, request: SaveRequest, *, rank: int = 0, **what: Any) -> list[str]:
    """The failures that a rank hears of a save that has ended."""
    trigger = Noted(Settings(spool=job.spool.folder.parent))
    with closing(CommitWatcher(trigger, job.spool, rank=rank)) as watcher:
        watcher.follow(request, **what)
        return watcher.wait(time.monotonic() + 30)


@pytest.fixture
def looks_soon_for_what_nothing_will_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_sync.client.commit_watcher.CARE_S", CARE_S)


def test_an_error_of_the_file_system_ends_no_watcher(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.commit_states(4, {"model": {"w": torch.zeros(3)}})
    watcher = CommitWatcher(SaveTrigger(Settings()), job.spool)
    request = job.request(4)
    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as disk:
            disk.setattr("trinity_sync.storage.discovery.read_uncached", fail_to_read)
            watcher.follow(request)
            with pytest.raises(SaveTimeoutError, match="step4"):
                watcher.wait(time.monotonic() + 0.5)
        assert watcher.wait(time.monotonic() + 30) == []
    watcher.close()
    assert len([each for each in caplog.records if "Cannot read the status" in each.message]) == 1


def test_images_that_join_a_save_in_the_instant_it_ends_are_followed(job: Job) -> None:
    class Joined(CommitWatcher):
        """As if the training thread submitted the step again between look and end."""

        def _end(self, save: PendingSave, failure: str) -> None:
            if not joined.is_set():
                joined.set()
                self.follow(request, images=["of the second submission"])
            super()._end(save, failure)

    joined = threading.Event()
    job.commit_states(4, {"model": {"w": torch.zeros(3)}})
    request = job.request(4)
    watcher = Joined(SaveTrigger(Settings()), job.spool)
    watcher.follow(request)
    assert joined.wait(250)
    with pytest.raises(SaveTimeoutError, match="step4"):  # that image is not part of the commit
        watcher.wait(time.monotonic() + 0.5)
    watcher.close()


def test_no_call_waits_for_a_watcher_that_is_closed(job: Job) -> None:
    job.stage(4, {"model": {"w": torch.zeros(3)}})
    watcher = CommitWatcher(SaveTrigger(Settings()), job.spool)
    watcher.follow(job.request(4))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(watcher.wait, None)
        while not watcher._waiting:
            time.sleep(0.001)
        watcher.close()
        with pytest.raises(SaveTimeoutError, match="when the coordinator was closed"):
            waiting.result(30)
    with pytest.raises(SaveTimeoutError, match="when the coordinator was closed"):
        watcher.wait(None)
    watcher.close()


def test_a_long_wait_is_reported_once_with_its_save(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.client.commit_watcher.SAY_S", 0.1)
    job.stage(4, {"model": {"w": torch.zeros(3)}})
    watcher = CommitWatcher(SaveTrigger(Settings()), job.spool)
    watcher.follow(job.request(4))
    with caplog.at_level(logging.WARNING), pytest.raises(SaveTimeoutError):
        watcher.wait(time.monotonic() + 0.5)
    watcher.close()
    (said,) = [each.message for each in caplog.records if "Still waiting" in each.message]
    assert "save actor step 4" in said


def test_the_root_is_looked_at_less_often_for_an_old_save_and_at_once_for_a_new_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.client.commit_watcher.LOOK_S", (0.01, 0.3))
    looks: dict[int, list[float]] = defaultdict(list)
    enough, find = threading.Event(), PendingSave.find_result

    def noted(save: PendingSave, *how: Any) -> str | None:
        looks[save.request.step].append(time.monotonic())
        if len(looks[9]) == 4:
            enough.set()
        return find(save, *how)

    monkeypatch.setattr(PendingSave, "find_result", noted)
    job.stage(4, {"model": {"w": torch.zeros(3)}})
    watcher = CommitWatcher(Noted(), job.spool)
    old, young = job.request(9), job.request(4)
    watcher.follow(old)
    watcher._pending[old.key].since -= 3600
    assert enough.wait(250)
    moments = itertools.pairwise(looks[9][1:])
    assert all(after - before >= 0.3 for before, after in moments)
    job.commit(4)
    watcher.follow(young)
    with pytest.raises(SaveTimeoutError, match="step9"):
        watcher.wait(time.monotonic() + 0.2)
    watcher.close()
    assert young.key in watcher.commit_seconds


def test_a_manifest_is_read_again_only_when_it_has_changed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.client.commit_watcher.LOOK_S", (0.01, 0.01))
    looks: list[int] = []
    reads: list[int] = []
    find = PendingSave.find_result

    def noted(save: PendingSave, *how: Any) -> str | None:
        looks.append(save.request.step)
        return find(save, *how)

    def read(root: str, run: int, step: int, **of: Any) -> Manifest | None:
        reads.append(step)
        return read_run_manifest(root, run, step, **of)

    monkeypatch.setattr(PendingSave, "find_result", noted)
    monkeypatch.setattr("trinity_sync.saves.save_status.read_run_manifest", read)
    job.commit_states(4, {"model": {"w": torch.zeros(3)}}, kind="state_dict")
    os.utime(step_folder(job.root, 4) / MANIFEST, (1, 1))  # a new one may change unseen
    job.stage(4, {"optim": {"w": torch.zeros(3)}})
    watcher = CommitWatcher(Noted(), job.spool)
    request = job.request(4, components=("optim",))
    watcher.follow(request)
    while len(looks) < 20:
        with pytest.raises(SaveTimeoutError):
            watcher.wait(time.monotonic() + 0.1)
    assert len(reads) == 1
    job.commit(4, "optim")
    assert watcher.wait(time.monotonic() + 30) == []
    watcher.close()


def test_no_run_is_requested_for_evicted_images_and_their_saves_fail(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = str(uuid4())
    run = {"id": str(uuid4()), "flow_id": str(uuid4()), "name": "save"}
    asked: list[tuple[str, str]] = []
    by_name = "/deployments/name/save-step/save-step"
    answers = {
        by_name: (500, "{}"),
        f"/deployments/{deployment}/create_flow_run": (201, json.dumps(run)),
    }
    requests = [job.request(step, components=("model",)) for step in (1, 2, 3, 4)]

    def requested() -> list[int]:
        bodies = [json.loads(body) for path, body in asked if path.endswith("create_flow_run")]
        return [body["parameters"]["request"]["step"] for body in bodies]

    with server(answers, asked=asked) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        watcher = CommitWatcher(SaveTrigger(settings), job.spool)
        for request in requests:  # two slots: the later two evict the images of the first two
            job.stage(request.step, {"model": {"w": torch.zeros(3)}})
            watcher.follow(request, submit=True)
        await_that(lambda: len(asked) > 1, "the saver asks the server, which is away")
        assert not requested()
        answers[by_name] = 200, json.dumps({"id": deployment})
        await_that(lambda: len(requested()) == 2, "the saver requests two runs")
        for step in (3, 4):
            job.commit(step)
        failures = watcher.wait(time.monotonic() + 30)
        watcher.close()
        end_savers(settings.spool)
    assert requested() == [3, 4]
    assert [("step 1" in each, "step 2" in each) for each in failures] == [
        (True, False),
        (False, True),
    ]
    assert all("were evicted" in each for each in failures)


def test_other_nodes_hear_of_images_that_were_evicted_by_the_flow_run(job: Job) -> None:
    places = group_by_node([("here", str(job.spool.folder)), ("there", "/dev/shm/there")])
    write_placement(job.root, 1, "", "actor", places)
    request = job.request(1, components=("model",))
    trigger = SaveTrigger(Settings(spool=job.spool.folder.parent))
    assert trigger._find_lost([request], ()) == {}
    write_placement(job.root, 1, "", "actor", places[:1])
    assert trigger._find_lost([request], ()).keys() == {request.key}


@pytest.mark.usefixtures("looks_soon_for_what_nothing_will_commit")
def test_a_save_whose_root_is_gone_fails_for_the_reason_that_its_images_have(job: Job) -> None:
    request = job.request(1, components=("model",))
    job.stage(1, {"model": {"w": torch.zeros(3)}})
    shutil.rmtree(job.root)
    watcher = CommitWatcher(SaveTrigger(Settings(spool=job.spool.folder.parent)), job.spool)
    watcher.follow(request)
    with pytest.raises(SaveTimeoutError):
        watcher.wait(time.monotonic() + 2 * CARE_S)
    end_images(job.spool, request, "its run was cancelled")
    (failure,) = watcher.wait(time.monotonic() + 30)
    assert failure.endswith("was not committed: its run was cancelled")
    assert not job.root.exists()
    watcher.close()


def test_a_commit_that_the_latest_pointers_do_not_name_is_not_called_a_lost_one(job: Job) -> None:
    job.commit_states(4, {"model": {"w": torch.ones(3)}})
    (job.root / ITERATION_FILES["checkpoint"]).write_text("3")
    append(request := job.request(4, components=("model",)), "failed", "disk full", start=1)
    (failure,) = hear(job, request)
    assert "was not named by the latest pointers, but is committed: disk full" in failure


@pytest.mark.parametrize("told", ["nothing", "completed"])
def test_a_save_whose_root_goes_away_after_its_commit_is_not_taken_for_lost(
    job: Job, told: str
) -> None:
    job.commit_states(1, {"model": {"w": torch.zeros(3)}})
    request = job.request(1, components=("model",))
    entry = append(request, "completed") if told == "completed" else None
    job.root.rename(job.root.with_name("away"))
    pending = PendingSave(request, 0.0, 0.0, 0.0)
    assert pending.find_result(entry, job.spool) is None
    trigger = SaveTrigger(Settings(spool=job.spool.folder.parent, saver="stack"))
    assert trigger.find_failures([request], ()) == {}
    job.root.with_name("away").rename(job.root)
    assert pending.find_result(entry, job.spool) == ""


def test_a_save_that_was_committed_or_is_of_functions_is_not_taken_for_evicted(job: Job) -> None:
    job.commit_states(1, {"model": {"w": torch.zeros(3)}})
    committed = job.request(1)
    of_functions = job.request(2, components=())
    evicted = job.request(3)
    trigger = SaveTrigger(Settings(spool=job.spool.folder.parent, saver="stack"))
    found = trigger.find_failures([committed, of_functions, evicted], ())
    assert found.keys() == {evicted.key}


def test_a_save_all_of_whose_tickets_are_torn_fails_with_their_error(job: Job) -> None:
    job.stage(1, {"model": {"w": torch.zeros(3)}})
    job.stage(2, {"model": {"w": torch.zeros(3)}})
    (first, *_), _ = job.spool.tickets()
    path = ticket_path(first.slot)
    path.write_bytes(path.read_bytes()[:20])
    requests = [job.request(step, components=("model",)) for step in (1, 2)]
    trigger = SaveTrigger(Settings(spool=job.spool.folder.parent, saver="stack"))
    torn = requests[first.ticket.step - 1]
    assert trigger.find_failures(requests, ()).keys() == {torn.key}
    assert f"ticket {path} is torn" in trigger.find_failures(requests, ())[torn.key]


@pytest.mark.usefixtures("looks_soon_for_what_nothing_will_commit")
@pytest.mark.parametrize("what", ["its images are evicted", "it is committed and removed"])
def test_a_wait_ends_whose_save_was_begun_by_a_worker_that_is_dead(job: Job, what: str) -> None:
    for step in (1, 2):
        job.stage(step, {"model": {"w": torch.zeros(3)}})
    request = job.request(1, components=("model",))
    append(request, "begun", start=1)
    settings = Settings(spool=job.spool.folder.parent, saver="stack", saver_after_s=1.0)
    watcher = CommitWatcher(SaveTrigger(settings), job.spool)
    if what.startswith("its"):
        job.persist(1)
        job.stage(3, {"model": {"w": torch.zeros(3)}})
        ended = ["evicted for later steps before its save had written them"]
    else:
        for step in (1, 2):
            job.commit(step)
        prune(job.root, plan_prune(job.root, Rules(parse_policy("last=1"), ALL), 0))
        ended = []
    watcher.follow(request)
    failures = watcher.wait(time.monotonic() + 60)
    assert [text in each for text, each in zip(ended, failures, strict=True)] == [True] * len(ended)
    watcher.close()


def test_a_save_that_was_begun_is_not_lost_as_long_as_it_is_written(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.stage(1, {"model": {"w": torch.zeros(3)}})
    job.persist(1)
    request = job.request(1, components=("model",))
    trigger = SaveTrigger(Settings(spool=job.spool.folder.parent, saver="stack"))
    for image in job.spool.tickets()[0]:
        mark_image_failed(image, "a try has failed")
    assert trigger.find_failures([request], {request.key}) == {}  # what has begun it tells
    shutil.rmtree(job.spool.folder)
    assert trigger.find_failures([request], {request.key}) == {}
    monkeypatch.setattr(save_files, "read_file_system_time", lambda _: time.time() + 3600)
    assert trigger.find_failures([request], {request.key}).keys() == {request.key}


def test_images_of_a_committed_save_are_compared_with_it_as_its_export_fails(job: Job) -> None:
    job.stage(4, {"model": {"w": torch.ones(3)}})
    job.commit(4)
    for value, rank in ((1.0, 0), (2.0, 1)):  # by processes that were started meanwhile
        job.kill()
        job.stage(4, {"model": {"w": torch.full((3,), value)}}, rank=rank)
    request = job.request(4, components=("model",))
    append(request, "failed", "no config", start=1)
    (failure,) = hear(job, request, exports="actor")
    assert "was not exported, but is committed: no config" in failure
    ((other,), _) = job.spool.tickets()
    assert "was committed in" in failure_path(other.slot).read_text()


@pytest.mark.parametrize("what", ["images", "functions"])
def test_what_is_submitted_again_after_its_step_was_removed_is_not_taken_for_committed(
    job: Job, what: str
) -> None:
    for step in (4, 5):
        job.commit_states(step, {"model": {"w": torch.full((3,), step)}})
    prune(job.root, plan_prune(job.root, Rules(parse_policy("last=1"), ALL), 0))
    if what == "images":
        job.stage(4, {"model": {"w": torch.full((3,), 4)}})
        told = "model of step 4, role actor, rank 0 is not saved"
    else:
        write_status(job.spool, FunctionStatus("own", 1, 4, "checkpoint", 0, "1/1", "finished"))
        told = "it completed without that step being committed"
    images = [each.ticket.image for each in job.spool.tickets()[0]]
    components = ("model",) if what == "images" else ()
    append(request := job.request(4, components=components), "completed")
    (failure,) = hear(job, request, images=images)
    assert told in failure


@pytest.mark.parametrize("how", ["removed", "reduced", "replaced", "rewound"])
def test_a_save_that_was_committed_and_is_gone_has_not_failed(job: Job, how: str) -> None:
    open_run(job.root, "first", 0)
    for step in (4, 5):
        job.commit_states(step, {"model": {"w": torch.full((3,), step)}, "optim": {}})
    if how in ("removed", "reduced"):
        rules = Rules(parse_policy("last=1"), ALL, models=ALL if how == "reduced" else None)
        prune(job.root, plan_prune(job.root, rules, 0))
        gone = 4
    elif how == "replaced":
        open_run(job.root, "second", 4)
        job.commit_states(5, {"model": {"w": torch.zeros(3)}, "optim": {}}, run=2)
        gone = 5
    else:
        rewind(job.root, 4)
        gone = 5
    append(request := job.request(gone, components=("model",)), "completed")
    assert hear(job, request, images=["one that was committed"]) == []


def test_a_save_ends_with_its_flow_run_where_another_release_has_committed_the_step(
    job: Job,
) -> None:
    job.commit_states(4, {"model": {"w": torch.zeros(3)}})
    body = {"format": MANIFEST_FORMAT + 1, "run": 1, "step": 4}
    (step_folder(job.root, 4) / MANIFEST).write_text(encode_body(body))
    append(request := job.request(4, components=("model",)), "completed")
    (failure,) = hear(job, request)
    assert "upgrade trinity-sync in this environment" in failure


@pytest.mark.parametrize(("value", "rank"), [(1, 0), (2, 0), (1, 1), (2, 1)])
def test_an_image_that_comes_after_the_commit_is_compared_with_it_also_without_a_worker(
    job: Job, value: int, rank: int
) -> None:
    job.commit_states(4, {"model": {"w": torch.ones(3)}})
    job.stagers.pop(0).close()  # by a process that was started meanwhile
    job.stage(4, {"model": {"w": torch.full((3,), float(value))}})
    ((late,), _) = job.spool.tickets()
    append(request := job.request(4, components=("model",)), "completed")
    failures = hear(job, request, rank=rank, images=[late.ticket.image])
    if value == 1:
        assert failures == []
        assert job.spool.tickets() == ([], [])
    else:
        assert "model of step 4, role actor, rank 0 is not saved" in failures[0]


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("parties", ["roles", "ranks"])
def test_what_is_submitted_again_is_committed_with_what_the_others_submit_again(
    coordinator_of: Open, job: Job, parties: str, changed: bool
) -> None:
    roles = ("actor", "critic") if parties == "roles" else ("actor",)
    ranks = 1 if parties == "roles" else 2
    of_ranks = [
        coordinator_of(rank, ranks, roles=roles, trigger=CommitsHere()) for rank in range(ranks)
    ]
    calls = [(saves, role) for saves in of_ranks for role in roles]
    weights = torch.ones(9)
    in_the_way = job.root / "global_step_4"
    in_the_way.write_text("so that nothing can be written")
    for attempt in (1, 2, 3):
        if attempt == 3:
            in_the_way.unlink()
        handles = {}
        for saves, role in calls:
            handles[saves] = saves.save(4, {"model": {"w": weights}}, role=role)
            if attempt > 1 and (saves, role) == calls[0]:
                with pytest.raises(SaveTimeoutError):  # the flow run waits for the others
                    saves.wait_all(0.5)
        if attempt < 3:
            for saves in of_ranks:
                with pytest.raises(SaveFailedError, match="cannot write model of step 4"):
                    saves.wait_all(250)
                with pytest.raises(SaveFailedError):
                    handles[saves].wait()
                assert not handles[saves].committed
            weights += changed
    for saves in of_ranks:
        saves.wait_all(250)
        handles[saves].wait(0)
        assert handles[saves].committed
    found = [
        load_states(job.root, 4, role, rank=rank, world_size=ranks)
        for rank in range(ranks)
        for role in roles
    ]
    assert all(torch.equal(each["model"]["w"], weights) for each in found)


@pytest.mark.parametrize("parties", ["roles", "ranks"])
def test_a_process_that_has_missed_an_attempt_is_part_of_the_next(
    coordinator_of: Open, job: Job, parties: str
) -> None:
    """A rank that could not stage its state, or a role that was not submitted again."""
    trigger, others = CommitsHere(), {"job": {"rank_timeout_s": 0.5}}
    if parties == "roles":
        names = ("actor", "critic")
        one, other = (coordinator_of(roles=names, trigger=trigger, **others) for _ in names)
    else:
        names = ("actor", "actor")
        one, other = (coordinator_of(rank, 2, trigger=trigger, **others) for rank in (0, 1))
    in_the_way = job.root / "global_step_4"
    for step, attempt in ((3, 1), (4, 1), (4, 2), (4, 3)):
        if attempt == 2:
            in_the_way.unlink()
        elif step == 3:
            in_the_way.write_text("so that nothing can be written")
        one.save(step, {"model": {"w": torch.ones(3)}}, role=names[0])
        if attempt != 2:
            other.save(step, {"model": {"w": torch.ones(3)}}, role=names[1])
        elif parties == "ranks":
            other.save(step, {"model": {"cannot be pickled": lambda: 0}})
        if step == 4 and attempt < 3:
            with pytest.raises(SaveFailedError):
                one.wait_all(250)
            with suppress(SaveFailedError):
                other.wait_all(250)
    for saves in (one, other):
        saves.wait_all(250)
    assert read_manifest(job.root, 4)


def test_a_step_that_is_submitted_once_reads_no_journal(
    coordinator_of: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = ("actor", "critic")
    saves = coordinator_of(1, 2, roles=roles)
    monkeypatch.setattr(Journal, "read", lambda _: pytest.fail("the training thread reads"))
    model, optim = {"w": torch.ones(3)}, {"m": torch.ones(3)}
    for step in (4, 5):
        for role in roles:
            saves.save(step, {"model": model}, role=role, kind="state_dict")
            saves.save(step, {"model": model, "optim": optim}, role=role)


@pytest.mark.parametrize("first", ["sync", "checkpoint"])
@pytest.mark.parametrize("changed", [False, True])
def test_a_checkpoint_has_no_weights_of_a_sync_that_was_submitted_again_after_it(
    coordinator_of: Open, job: Job, monkeypatch: pytest.MonkeyPatch, first: str, changed: bool
) -> None:
    without_catalog_and_pages(monkeypatch)
    server = Server()
    saves = coordinator_of(trigger=Trigger(server))
    weights, optim = torch.ones(9), {"m": torch.ones(9)}
    saves.save(4, {"model": {"w": weights}}, kind="state_dict")
    saves.save(4, {"model": {"w": weights}, "optim": optim})
    sync, checkpoint = server.runs.values()
    attempt = server.begin(sync)
    sync.advance(attempt, OSError("the disk is full"))
    while sync.attempts:
        sync.advance(attempt)
    with pytest.raises(SaveTimeoutError):
        saves.wait_all(1)
    weights += changed
    saves.save(4, {"model": {"w": weights}}, kind="state_dict")
    again = [each for each in server.runs.values() if each.request.attempt == 2]
    for run in [*again, checkpoint] if first == "sync" else [checkpoint, *again]:
        attempt = server.begin(run)
        while run.attempts:
            run.advance(attempt)
    with pytest.raises(SaveFailedError):
        saves.wait_all(250)
    assert [each.state for each in again] == ["completed"]
    assert checkpoint.state == ("failed" if changed else "completed")
    assert torch.equal(load_states(job.root, 4, "actor")["model"]["w"], weights)


def test_a_coordinator_that_is_dropped_without_close_leaves_no_thread_and_no_descriptor(
    job: Job, spool_folder: Path, tmp_path: Path
) -> None:
    with forking(*PRELOADED) as context, ProcessPoolExecutor(1, context) as alone:
        # a process without the threads of other tests
        alone.submit(_drop_a_coordinator, job.root, spool_folder, tmp_path).result()


def _drop_a_coordinator(root: Path, spool: Path, home: Path) -> None:
    def list_descriptors() -> dict[str, str]:
        found = {}
        for fd in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # that of the listing
                found[fd.name] = str(fd.readlink())
        return found

    settings, trigger = Settings(spool=spool, home=home), CommitsHere()
    gc.collect()
    before = list_descriptors()
    saves = CheckpointCoordinator(root, settings=settings, trigger=trigger)
    saves.save(4, {"model": {"w": torch.ones(3)}})
    saves.wait_all()
    trigger.finish()
    thread = saves._watcher._thread
    assert thread is not None
    assert list_descriptors() != before
    del saves  # as a notebook's cell does that runs again
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    gc.collect()
    assert list_descriptors() == before
