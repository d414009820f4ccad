"""Records of another release of trinity-sync: left alone, named, and in the way of nothing.

A record is made as the product makes it; then its format is one less or one more, and its digest is
right again.
"""

import asyncio
import json
import logging
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from prefect.client.schemas.objects import FlowRun
from typer.testing import CliRunner

from tests.conftest import environment
from tests.models.test_records import NAMES, Kind, records  # noqa: F401 (a fixture)
from tests.support.job import Job
from tests.support.steps import commit_files
from tests.support.weights import first, upload
from tests.unit.conftest import Open
from tests.unit.retention.test_retention import numbers, planned, prune, spared
from trinity_sync.catalog.database import open_catalog
from trinity_sync.catalog.mirror import rebuild
from trinity_sync.cli.commands import app
from trinity_sync.cli.report_html import render_report
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import CommitError, FormatError
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.fs.records import add_digest
from trinity_sync.layout import ITERATION_FILES, step_folder
from trinity_sync.orchestration.job_registry import register_job
from trinity_sync.orchestration.recovery.flow_runs import allow_eviction, find_orphaned_saves
from trinity_sync.orchestration.recovery.reconcile import (
    find_busy_steps,
    reconcile,
    repair_known_roots,
)
from trinity_sync.orchestration.report.collect import collect_report
from trinity_sync.remote.download import fetch
from trinity_sync.remote.remote_root import Remote
from trinity_sync.remote.required import (
    fetch_newest,
    prune_remote,
    replicate_missing,
    replicate_required,
)
from trinity_sync.remote.upload import replicate
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import prune_quarantine
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.snapshot.stager import Stager
from trinity_sync.snapshot.ticket import failure_path, ticket_path, version_tag_path
from trinity_sync.stack.doctor import run_checks
from trinity_sync.storage.discovery import (
    Corruption,
    find_newest,
    iter_committed_steps,
    mark_corrupted,
    read_corruption,
    require_committed,
)
from trinity_sync.storage.export_requests import (
    ExportRequest,
    list_export_requests,
    list_steps_awaiting_export,
    write_export_request,
)
from trinity_sync.storage.gc import remove_dead_spool
from trinity_sync.storage.job_settings import record_replicated, write_job_settings
from trinity_sync.storage.latest_pointer import (
    advance_latest_pointer,
    read_latest_pointer,
    repair_latest_pointer,
)
from trinity_sync.storage.leases import acquire_lease
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.metrics import MetricsLog, read_metrics, write_metrics
from trinity_sync.storage.pins import list_steps_in_use, pin, tag, unpin
from trinity_sync.storage.quarantine import quarantine_folder, rewind
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.save_functions import CallableStatus, write_status
from trinity_sync.storage.verify import check_files, choose_files, judge_steps
from trinity_sync.weights.committed import CommitNotification
from trinity_sync.weights.state_files import (
    read_address,
    read_state,
    write_address,
    write_state,
)
from trinity_sync.weights.version_view import SlotReader
from trinity_sync.weights.versions import VersionRegistry

STATE = {"model": {"w": torch.ones(10)}}
BEHIND, AHEAD = -1, 1
both = pytest.mark.parametrize("change", [BEHIND, AHEAD], ids=["behind", "ahead"])


def changed(path: Path, **values: Any) -> None:
    """Have other values in a record, with the right digest."""
    body = json.loads(path.read_text())
    del body["digest"]
    body |= values
    path.write_text(add_digest(json.dumps(body)))


def of_another_release(path: Path, change: int = AHEAD) -> bytes:
    """Have a record in another format; returns what is in its file."""
    changed(path, format=json.loads(path.read_text())["format"] + change)
    return path.read_bytes()


def upgrade(change: int, writer: str = "the environment that wrote it") -> str:
    """What a message asks for, as a pattern."""
    older = "this environment" if change == AHEAD else writer
    return rf"has format {1 + change}, .* reads format 1: upgrade trinity-sync in {older}"


def slot_of(job: Job, step: int) -> Path:
    (slot,) = (each.slot for each in job.spool.tickets()[0] if each.ticket.step == step)
    return slot


def find_orphaned_steps(job: Job) -> list[int]:
    return [request.step for request in find_orphaned_saves(job.spool.folder.parent, grace_s=-1)]


# ---------------------------------------------------------------- each record

HOLDS = {"pin", "tag", "lease", "corruption", "export_request"}
"""Records that are read for what they hold, which they do whatever their format."""
WRITERS = {
    **dict.fromkeys(("ticket", "receipt", "placement"), "the trainer's environment"),
    **dict.fromkeys(("note", "corruption", "export_request"), "the stack's environment"),
}


@both
@pytest.mark.parametrize("name", [name for name in NAMES if name not in HOLDS])
def test_a_record_of_another_release_names_the_one_to_upgrade(
    records: dict[str, Kind],  # noqa: F811
    name: str,
    change: int,
) -> None:
    kind = records[name]
    kept = of_another_release(kind.path, change)
    wanted = upgrade(change, WRITERS.get(name, "the environment that wrote it"))
    with pytest.raises(FormatError, match=wanted) as found:
        kind.read()
    assert (found.value.path, found.value.found, found.value.known) == (kind.path, 1 + change, 1)
    assert kind.path.read_bytes() == kept


@both
@pytest.mark.parametrize("name", sorted(HOLDS))
def test_a_claim_of_another_release_holds_its_step(
    records: dict[str, Kind],  # noqa: F811
    job: Job,
    name: str,
    change: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = of_another_release(records[name].path, change)
    if name == "corruption":
        said = str(read_corruption(job.root, 1))
        with pytest.raises(CommitError):
            require_committed(job.root, 1)
    elif name == "export_request":
        assert (list_export_requests(job.root), list_steps_awaiting_export(job.root)) == (
            [],
            {1: ["actor"]},
        )
        said = caplog.text
    else:
        said = "; ".join(list_steps_in_use(job.root)[1])
    assert "upgrade trinity-sync in" in said
    assert str(records[name].path) in said
    assert records[name].path.read_bytes() == kept


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_a_later_release_has_added_is_passed_over(
    records: dict[str, Kind],  # noqa: F811
    name: str,
) -> None:
    kind = records[name]
    before = kind.read()
    changed(kind.path, since_later="more")
    assert kind.read() == before


@both
def test_a_record_that_is_torn_is_not_taken_for_one_of_another_release(
    job: Job, change: int
) -> None:
    commit_files(job.root, 1)
    path = step_folder(job.root, 1) / "manifest.json"
    content = of_another_release(path, change)
    path.write_bytes(content.replace(b'"run": 1', b'"run": 2'))
    with pytest.raises(CommitError, match="its digest differs"):
        read_manifest(job.root, 1)


# ---------------------------------------------------------------- images in the spool


@both
def test_an_image_of_another_release_waits_and_the_others_are_swept(
    job: Job, change: int, caplog: pytest.LogCaptureFixture
) -> None:
    job.stage(5, STATE)
    slot = slot_of(job, 5)
    job.stage(6, STATE)
    kept, image = of_another_release(ticket_path(slot), change), slot.read_bytes()
    with caplog.at_level(logging.WARNING):
        assert find_orphaned_steps(job) == [6]
        assert find_orphaned_steps(job) == [6]
    (said,) = [each.message for each in caplog.records if str(slot) in each.message]
    assert re.search(upgrade(change, "the trainer's environment"), said)
    job.commit(6)
    assert require_committed(job.root, 6)
    assert (ticket_path(slot).read_bytes(), slot.read_bytes()) == (kept, image)


@both
def test_an_image_of_another_release_keeps_its_slot_and_training_has_others(
    job: Job, change: int
) -> None:
    for step in (1, 2):  # all slots that there are
        job.stage(step, STATE)
    slots = [slot_of(job, step) for step in (1, 2)]
    failure_path(slots[0]).write_text("its save failed")
    job.stagers.pop(0).close()  # a trainer of another release is started
    tickets = [of_another_release(ticket_path(slot), change) for slot in slots]
    images = [slot.read_bytes() for slot in slots]
    for step in (3, 4, 5, 6):
        job.stage(step, STATE)
    job.commit(6)
    assert [ticket_path(slot).read_bytes() for slot in slots] == tickets
    assert [slot.read_bytes() for slot in slots] == images
    assert len(list(job.spool.folder.glob("*.slot"))) == 4


def test_a_save_that_finds_no_room_next_to_images_of_another_release_says_why(
    job: Job, small_disk: Path
) -> None:
    job.spool = open_job_spool(small_disk / "spool", job.root)
    with closing(Stager(job.spool, slots=1, slot_wait_s=0.1)) as stager:
        stager.stage(job.origin(1), STATE)
    kept = of_another_release(ticket := ticket_path(slot_of(job, 1)))
    with (
        closing(Stager(job.spool, slots=1, slot_wait_s=0.1)) as stager,
        pytest.raises(FormatError, match=upgrade(AHEAD)),
    ):
        stager.stage(job.origin(2), {"model": {"w": torch.ones(400_000)}})
    assert ticket.read_bytes() == kept


def test_slots_are_taken_in_order_whatever_release_has_published_what_they_hold(job: Job) -> None:
    for step in (1, 2):
        version = upload(job, step, first())
    of_another_release(version_tag_path(newest := Path(version.images[0].slot)))
    upload(job, 3, first())  # takes the older one
    assert json.loads(version_tag_path(newest).read_text())["step"] == 2
    with pytest.raises(FormatError):
        job.spool.published("actor", 1, 2)
    assert len(job.spool.published("actor", 1, 3)) == 1


@both
def test_a_save_with_an_image_of_another_release_fails_at_once_and_writes_nothing(
    job: Job, change: int
) -> None:
    job.stage(5, STATE)
    kept = of_another_release(ticket_path(slot := slot_of(job, 5)), change)
    with pytest.raises(FormatError, match=upgrade(change, "the trainer's environment")):
        job.persist(5, rank_timeout_s=3600)
    assert not step_folder(job.root, 5).exists()
    assert ticket_path(slot).read_bytes() == kept


def test_a_spool_with_an_image_of_another_release_outlives_its_root(job: Job) -> None:
    job.stage(5, STATE)
    of_another_release(ticket_path(slot := slot_of(job, 5)))
    job.stagers.pop(0).close()
    job.root.rename(job.root.with_name("gone"))
    (finding,) = remove_dead_spool(job.spool, before=2e9)
    assert finding.state == "left"
    assert "upgrade trinity-sync" in finding.why
    assert slot.exists()


def test_reconcile_names_the_image_and_leaves_it(
    job: Job, tmp_path: Path, spool_folder: Path
) -> None:
    job.stage(5, STATE)
    kept = of_another_release(ticket_path(slot := slot_of(job, 5)))
    settings = Settings(spool=spool_folder, home=tmp_path)
    (finding,) = asyncio.run(reconcile(settings, [], None))
    assert (finding.where, finding.state) == (str(job.spool.folder), "left")
    assert "upgrade trinity-sync" in finding.why
    assert ticket_path(slot).read_bytes() == kept


def test_a_doctor_names_the_image_and_does_not_have_it_removed(
    job: Job, tmp_path: Path, spool_folder: Path
) -> None:
    job.stage(5, STATE)
    of_another_release(ticket_path(slot_of(job, 5)))
    found = {each.name: each for each in run_checks(Settings(spool=spool_folder, home=tmp_path))}
    check = found[f"images of {job.spool.folder.name}"]
    assert check.state == "fail"
    assert "upgrade trinity-sync in this environment" in check.found
    assert "remove" not in check.todo


@both
def test_weights_of_another_release_are_not_read_and_their_slot_is_released(
    job: Job, change: int
) -> None:
    version = upload(job, 3, first())
    path = Path(version.images[0].slot)
    kept = of_another_release(version_tag_path(path), change)
    slot = SlotReader(path)
    with pytest.raises(FormatError, match=upgrade(change, "the trainer's environment")):
        slot.try_lock(version.images[0].image)
    for step in (4, 5):
        upload(job, step, first())  # it is free to be filled
    slot.close()
    assert version_tag_path(path).read_bytes() != kept


@both
def test_a_pointer_to_a_step_of_another_release_hides_no_weights(job: Job, change: int) -> None:
    open_run(job.root, "first", 0)
    notification = CommitNotification(job.root, "actor")
    for step in (1, 2):
        job.stage(step, STATE)
        job.commit(step)
        newest = notification.find_newest([])
        assert newest
        assert newest.step == step
    of_another_release(step_folder(job.root, 2) / "manifest.json", change)
    found = notification.find_newest([])
    assert found
    assert found.step == 1


@both
def test_a_kept_image_of_another_release_is_read_from_its_file(
    job: Job, change: int, caplog: pytest.LogCaptureFixture
) -> None:
    job.stage(5, STATE)
    job.commit(5)
    (note,) = job.spool.folder.glob("*.kept")
    of_another_release(note, change)
    assert load_states(job.root, 5, "actor", spool=job.spool)["model"]["w"].tolist() == [1.0] * 10
    assert str(note) in caplog.text


@both
def test_a_sweep_leaves_a_step_that_another_release_has_committed(
    job: Job, change: int, caplog: pytest.LogCaptureFixture
) -> None:
    job.stage(5, STATE)
    job.commit(5)
    job.stage(5, {"optim": {"w": torch.ones(10)}})  # came late
    job.stage(6, STATE)
    kept = of_another_release(path := step_folder(job.root, 5) / "manifest.json", change)
    assert find_orphaned_steps(job) == [6]
    assert re.search(upgrade(change), caplog.text)
    assert not failure_path(slot_of(job, 5)).exists()
    assert path.read_bytes() == kept


# ---------------------------------------------------------------- commits, pointers, resumes


@both
def test_a_step_of_another_release_is_not_committed_over_and_the_others_are_committed(
    job: Job, change: int
) -> None:
    for step in (5, 6):
        job.stage(step, STATE)
        job.commit(step)
    path = step_folder(job.root, 5) / "manifest.json"
    kept = of_another_release(path, change)
    job.stagers.pop(0).close()
    job.stage(5, {"model": {"w": torch.zeros(10)}}, run=2)
    with pytest.raises(FormatError, match=upgrade(change)):
        job.commit(5, run=2)
    job.stage(7, STATE)
    job.commit(7)
    assert path.read_bytes() == kept
    assert [each.step for each in iter_committed_steps(job.root)] == [6, 7]


@both
def test_nothing_is_committed_once_another_release_has_begun_a_run(job: Job, change: int) -> None:
    open_run(job.root, "first", 0)
    open_run(job.root, "second", 4)
    kept = of_another_release(path := job.root / ".trinity_sync/runs/2.json", change)
    job.stage(5, STATE)
    with pytest.raises(FormatError, match=upgrade(change)):
        job.commit(5)
    assert read_manifest(job.root, 5) is None
    assert slot_of(job, 5)
    assert path.read_bytes() == kept


@both
def test_a_training_does_not_begin_next_to_runs_of_another_release(
    job: Job, coordinator_of: Open, change: int
) -> None:
    open_run(job.root, "first", 0)
    of_another_release(job.root / ".trinity_sync/runs/1.json", change)
    with pytest.raises(FormatError, match=upgrade(change)):
        coordinator_of().save(1, STATE)
    assert [path.name for path in (job.root / ".trinity_sync/runs").iterdir()] == ["1.json"]


@both
def test_a_resume_does_not_fall_back_from_the_newest_step_of_another_release(
    job: Job, coordinator_of: Open, change: int
) -> None:
    for step in (1, 2, 3):
        commit_files(job.root, step)
    of_another_release(step_folder(job.root, 1) / "manifest.json", change)
    assert find_newest(job.root).step == 3  # an older step of another release is in no way
    of_another_release(step_folder(job.root, 3) / "manifest.json", change)
    with pytest.raises(FormatError, match=upgrade(change)):
        coordinator_of().latest()


@both
def test_iteration_files_are_not_moved_away_from_a_step_of_another_release(
    job: Job, tmp_path: Path, spool_folder: Path, change: int
) -> None:
    for step in (1, 2):
        commit_files(job.root, step)
    of_another_release(step_folder(job.root, 2) / "manifest.json", change)
    with acquire_commit_lock(job.root):
        assert repair_latest_pointer(job.root, "checkpoint") is None
    advance_latest_pointer(job.root, "checkpoint", 1, 1)
    assert read_latest_pointer(job.root, "checkpoint") == 2
    (job.root / ITERATION_FILES["checkpoint"]).write_text("")
    settings = Settings(spool=spool_folder, home=tmp_path)
    register_job(settings, job.root)
    repair_known_roots(settings)
    assert read_latest_pointer(job.root, "checkpoint") is None
    commit_files(job.root, 3)
    assert read_latest_pointer(job.root, "checkpoint") == 3
    (job.root / ITERATION_FILES["checkpoint"]).write_text("2")
    with acquire_commit_lock(job.root):
        assert repair_latest_pointer(job.root, "checkpoint") == (
            2,
            3,
        )  # which is newer, and our own


def test_a_rewind_quarantines_no_step_of_another_release(job: Job) -> None:
    for step in (1, 2, 3):
        commit_files(job.root, step)
    of_another_release(step_folder(job.root, 2) / "manifest.json")
    with pytest.raises(FormatError):
        rewind(job.root, 1)
    assert find_newest(job.root).step == 3
    assert not quarantine_folder(job.root).exists()


def test_a_checkpoint_whose_metrics_are_of_another_release_is_taken_over_without_them(
    job: Job,
) -> None:
    job.stage(5, {**STATE, "optim": STATE["model"]})
    job.commit(5, "model", "optim")
    write_metrics(job.root, 1, 5, {"reward": 1.0})
    kept = of_another_release(path := job.root / ".trinity_sync/metrics/5.json")
    open_run(job.root, "first", 0)
    open_run(job.root, "second", 5)
    job.stage(5, STATE, run=2, kind="state_dict")
    assert job.commit(5, run=2, kind="state_dict").run == 2
    assert path.read_bytes() == kept


@both
def test_placements_of_another_release_fail_the_save_and_no_other(job: Job, change: int) -> None:
    from trinity_sync.storage.placement import await_node_shards

    for run in (1, 2):
        job.stage(run, STATE, run=run)
    of_another_release(job.root / ".trinity_sync/placements/1.actor.json", change)
    with pytest.raises(FormatError, match=upgrade(change, "the trainer's environment")):
        await_node_shards(job.save(1), rank_timeout_s=3600)
    assert await_node_shards(job.save(2, run=2), rank_timeout_s=0)


# ---------------------------------------------------------------- retention and care


def _manifest(job: Job) -> Path:
    return step_folder(job.root, 1) / "manifest.json"


def _run(job: Job) -> Path:
    open_run(job.root, "first", 0)
    return job.root / ".trinity_sync/runs/1.json"


def _pin(job: Job) -> Path:
    pin(job.root, 1)
    return job.root / ".trinity_sync/pins/1.json"


def _tag(job: Job) -> Path:
    tag(job.root, 1, "good")
    return job.root / ".trinity_sync/pins/good.json"


def _lease(job: Job) -> Path:
    return acquire_lease(job.root, 1, "reader", ttl_s=0.0).path


def _metrics(job: Job) -> Path:
    write_metrics(job.root, 1, 1, {"reward": 1.0})
    return job.root / ".trinity_sync/metrics/1.json"


def _export_request(job: Job) -> Path:
    write_export_request(job.root, ExportRequest(1, 1, "actor", failed=True))
    return job.root / ".trinity_sync/exports/global_step_1.actor.request"


def _damage(job: Job) -> Path:
    mark_corrupted(job.root, 1, Corruption({}, 0.0))
    return step_folder(job.root, 1) / "corrupted.json"


def _receipt(job: Job) -> Path:
    write_status(job.spool, CallableStatus("f", 1, 1, "checkpoint", 0, "1/1", "failed"))
    return next(job.spool.receipts.iterdir())


def _ticket(job: Job) -> Path:
    job.stage(1, STATE)
    return ticket_path(slot_of(job, 1))


def _job(job: Job) -> Path:
    write_job_settings(job.root, {"remote": "file:///copies", "remote_required": True})
    return job.root / ".trinity_sync/job.json"


def _stored(job: Job) -> Path:
    write_job_settings(job.root, {"remote": "file:///copies", "remote_required": True})
    for step in (each.step for each in iter_committed_steps(job.root)):
        record_replicated(job.root, "file:///copies", require_committed(job.root, step))
    return job.root / ".trinity_sync/stored/1.json"


@both
@pytest.mark.parametrize(
    ("record", "removed"),
    [
        *(
            (each, [2])
            for each in (_manifest, _pin, _tag, _lease, _metrics, _export_request, _damage)
        ),
        *((each, [2]) for each in (_receipt, _ticket, _stored)),
        *((each, []) for each in (_run, _job)),  # which steps they are about is not known
    ],
    ids=lambda each: each.__name__.strip("_") if callable(each) else "",
)
def test_retention_keeps_what_a_record_of_another_release_may_be_about(
    job: Job,
    record: Callable[[Job], Path],
    removed: list[int],
    change: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for step in (1, 2, 3):
        commit_files(job.root, step)
    kept = of_another_release(path := record(job), change)
    with caplog.at_level(logging.WARNING):
        made = planned(job.root)
        done = prune(job.root, spool=job.spool.folder.parent)
    assert numbers(done.removed) == removed
    if not removed:
        assert made.removed == ()
    assert path.read_bytes() == kept
    why = [why for _, why in made.kept] + [*spared(done).values(), caplog.text]
    assert any("upgrade trinity-sync in" in each and str(path) in each for each in why)
    other = job.root.with_name("other")
    for step in (1, 2, 3):
        commit_files(other, step)
    assert numbers(prune(other).removed) == [1, 2]


def test_what_another_release_has_claimed_is_removed_by_name_and_not_replaced(job: Job) -> None:
    for step in (1, 2):
        commit_files(job.root, step)
    kept = of_another_release(_pin(job)), of_another_release(_tag(job))
    with pytest.raises(FormatError):
        pin(job.root, 1, "mine")
    with pytest.raises(FormatError):
        tag(job.root, 1, "good")
    private = job.root / ".trinity_sync/pins"
    assert ((private / "1.json").read_bytes(), (private / "good.json").read_bytes()) == kept
    assert tag(job.root, 2, "good", force=True).step == 2
    assert unpin(job.root, 1)


def test_metrics_of_another_release_are_not_replaced(job: Job) -> None:
    commit_files(job.root, 1)
    kept = of_another_release(path := _metrics(job))
    with pytest.raises(FormatError):
        write_metrics(job.root, 1, 1, {"reward": 2.0})
    with pytest.raises(FormatError):
        read_metrics(job.root, 1, 1)
    assert path.read_bytes() == kept


def test_a_trainer_logs_that_its_metrics_are_not_recorded(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    commit_files(job.root, 1)
    of_another_release(_metrics(job))
    log = MetricsLog(job.root, lambda step: 1, lambda: True)
    log.record(1, {"reward": 2.0})
    log.record(2, {"reward": 3.0})
    log.close()
    assert re.search(upgrade(AHEAD), caplog.text)
    assert read_metrics(job.root, 1, 2) == {"reward": 3.0}


def test_a_mark_of_another_release_is_not_removed_by_a_verification(job: Job) -> None:
    commit_files(job.root, 1)
    kept = of_another_release(path := _damage(job))
    (verdict,) = judge_steps(check_files(choose_files(job.root, step=1)))
    assert verdict.state == "corrupted"
    assert "upgrade trinity-sync" in verdict.wrong
    assert path.read_bytes() == kept


def test_a_step_that_another_release_commits_while_it_is_verified_is_not_judged(job: Job) -> None:
    commit_files(job.root, 1)
    chosen = choose_files(job.root, step=1)
    (step_folder(job.root, 1) / chosen[0].record.path).write_bytes(b"other")
    kept = of_another_release(path := step_folder(job.root, 1) / "manifest.json")
    (verdict,) = judge_steps(check_files(chosen))
    assert verdict.state == "replaced"
    assert read_corruption(job.root, 1) is None
    assert path.read_bytes() == kept


def test_what_was_quarantined_stays_where_a_step_of_it_is_of_another_release(job: Job) -> None:
    for step in (1, 2, 3):
        commit_files(job.root, step)
    folders = [rewind(job.root, step, clock=lambda at=1e9 + step: at).folder for step in (2, 1)]
    of_another_release(step_folder(folders[0], 3) / "manifest.json")
    assert prune_quarantine(job.root, parse_policy("newer=1s"), 2e9) == [folders[1].name]
    assert step_folder(folders[0], 3).is_dir()


def test_what_another_release_has_left_in_mid_commit_is_left_to_it(
    job: Job, tmp_path: Path, spool_folder: Path
) -> None:
    for step in (1, 2):
        commit_files(job.root, step)
    replacing = job.root / ".trinity_sync/replacing"
    for step in (1, 2):
        shutil.copytree(step_folder(job.root, step), step_folder(replacing, step))
    of_another_release(step_folder(replacing, 1) / "manifest.json")
    settings = Settings(spool=spool_folder, home=tmp_path)
    register_job(settings, job.root)
    found = {each.what: each for each in repair_known_roots(settings)}
    assert "upgrade trinity-sync" in found[".trinity_sync/replacing/global_step_1"].why
    assert [path.name for path in replacing.iterdir()] == ["global_step_1"]


def test_a_catalog_and_a_report_have_the_other_steps(job: Job, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit_files(job.root, step)
    of_another_release(_metrics(job))
    of_another_release(step_folder(job.root, 2) / "manifest.json")
    write_address(job.root, "synchronizer", "weights")
    write_state(job.root, {"registry": VersionRegistry().to_json()})
    of_another_release(job.root / ".trinity_sync/weights/state.json")
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as engine:
        assert rebuild(engine, job.root) == 2
    with environment({}):
        facts = collect_report(Settings(home=tmp_path), job.root)
    assert [each.status for each in facts.steps][::2] == ["valid", "valid"]
    assert "upgrade trinity-sync" in facts.steps[1].reason
    assert "upgrade trinity-sync" in render_report(facts)
    assert [use.kind for use in facts.uses] == []


def test_what_a_run_of_another_release_writes_is_not_tidied_away(job: Job) -> None:
    request = {"root": str(job.root), "step": 5, "format": 2, "since_later": "more"}
    runs = [FlowRun(flow_id=uuid4(), parameters=each) for each in ({"request": request}, {})]
    assert find_busy_steps(runs) == {job.root: {5}}


@both
def test_ls_and_doctor_show_the_other_steps_and_name_the_environment_to_upgrade(
    job: Job, tmp_path: Path, spool_folder: Path, change: int
) -> None:
    for step in (1, 2, 3):
        commit_files(job.root, step)
    of_another_release(step_folder(job.root, 2) / "manifest.json", change)
    for record in (_run, _pin, _job):
        of_another_release(record(job), change)
    shown = CliRunner().invoke(app, ["ls", str(job.root), "-o", "json"])
    rows = json.loads(shown.stdout)["steps"]
    assert [row["status"] for row in rows] == ["valid", "another format", "valid"]
    assert shown.stderr.count("upgrade trinity-sync in") == 4
    settings = Settings(spool=spool_folder, home=tmp_path)
    found = {each.name: each for each in run_checks(settings, job.root)}
    for name in ("records", "steps", "remote"):
        assert found[name].state == "fail"
        assert "upgrade trinity-sync in" in found[name].found
    assert found["latest checkpoint"].state == "ok"


def test_a_job_whose_newest_step_is_of_another_release_is_looked_at_all_the_same(
    job: Job, tmp_path: Path, spool_folder: Path
) -> None:
    commit_files(job.root, 1)
    of_another_release(_stored(job))
    shown = CliRunner().invoke(app, ["ls", str(job.root), "-o", "json"])
    assert [row["in_remote"] for row in json.loads(shown.stdout)["steps"]] == [None]
    of_another_release(step_folder(job.root, 1) / "manifest.json")
    settings = Settings(spool=spool_folder, home=tmp_path)
    found = {each.name: each for each in run_checks(settings, job.root)}
    assert found["latest checkpoint"].state == "fail"
    assert re.search(upgrade(AHEAD), found["latest checkpoint"].found)
    register_job(settings, job.root)
    said = [each.why for each in repair_known_roots(settings)]
    assert len(said) == 2  # an iteration file each
    assert all(re.search(upgrade(AHEAD), why) and "no other can be loaded" in why for why in said)


# ---------------------------------------------------------------- stores


def test_a_step_of_another_release_in_a_store_is_shown_and_not_passed_over(
    job: Job, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/copies"
    for step in (1, 2):
        commit_files(job.root, step)
        replicate(job.root, url, step)
    kept = of_another_release(path := tmp_path / "copies/global_step_2/manifest.json")
    assert [each.state for each in Remote(url).list_steps()] == ["valid", "another format"]
    assert "another format" in CliRunner().invoke(app, ["ls", url]).stdout
    for other in (lambda: fetch(url, None, tmp_path / "new"), lambda: fetch(url, 2, tmp_path)):
        with pytest.raises(FormatError):
            other()
    with pytest.raises(FormatError):
        fetch_newest(tmp_path / "new", Remote(url))
    with pytest.raises(FormatError):
        replicate(job.root, url, 2)
    commit_files(job.root, 3)
    assert replicate(job.root, url, 3, keep_last=1).removed == (1,)
    assert path.read_bytes() == kept


def test_a_note_of_another_release_that_a_store_has_a_step_keeps_it_there(
    job: Job, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/copies"
    write_job_settings(job.root, {"remote": url, "remote_required": True})
    open_run(job.root, "first", 0)
    for step in (1, 2, 3, 4):
        commit_files(job.root, step)
    for step in (1, 2, 3):
        replicate_required(job.root, url, step)
    kept = of_another_release(path := job.root / ".trinity_sync/stored/1.json")
    assert replicate_missing(job.root, url) == [4]
    assert prune_remote(job.root, url, "last=1", 0) == (2, 3)
    assert [each.step for each in Remote(url).list_steps()] == [1, 4]
    assert path.read_bytes() == kept


# ---------------------------------------------------------------- requests and the Synchronizer


@both
def test_a_request_of_another_release_names_the_side_to_upgrade(job: Job, change: int) -> None:
    job.stage(5, STATE)
    (request,) = find_orphaned_saves(job.spool.folder.parent, grace_s=-1)
    body = request.model_dump(mode="json")
    assert SaveRequest.model_validate(body) == request
    other = {**body, "format": body["format"] + change, "since_later": "more"}
    older = "stack" if change == AHEAD else "trainer"
    with pytest.raises(
        FormatError, match=rf"step 5 in .*upgrade trinity-sync in the {older}'s env"
    ):
        SaveRequest.model_validate(other)
    allow_eviction(job.spool.folder.parent, {"request": other}, "its flow run has failed")
    assert not failure_path(slot_of(job, 5)).exists()


@both
def test_a_synchronizer_of_another_release_keeps_what_it_knows(job: Job, change: int) -> None:
    write_address(job.root, "synchronizer", "weights")
    write_state(job.root, {"registry": {}})
    for path in (job.root / ".trinity_sync/weights").iterdir():
        of_another_release(path, change)
    for read in (read_state, read_address):
        with pytest.raises(FormatError, match=upgrade(change)):
            read(job.root)
