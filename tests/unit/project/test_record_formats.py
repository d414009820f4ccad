"""Roots, spools, manifests and runs of another release: left alone, named, in the way of no other.

A record is made as the product makes it; then its format is one less or one more, and its digest is
right again.
"""

import asyncio
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from prefect.client.schemas.objects import FlowRun

from tests.conftest import environment
from tests.models.test_records import NAMES, Kind, records  # noqa: F401 (a fixture)
from tests.support.command import invoke
from tests.support.job import Job, find_orphaned_saves
from tests.support.leases import acquire_lease
from tests.support.steps import commit_files
from tests.support.weights import first, upload
from tests.unit.retention.test_retention import prune, rules
from trinity_sync.cli.app import require_existing
from trinity_sync.errors import CommitError, FormatError
from trinity_sync.fs.records import add_digest
from trinity_sync.layout import ITERATION_FILES, step_folder
from trinity_sync.orchestration.recovery.flow_runs import try_allow_eviction
from trinity_sync.orchestration.recovery.reconcile import find_busy_steps, reconcile
from trinity_sync.orchestration.report.collect import collect_report
from trinity_sync.remote.download import fetch
from trinity_sync.remote.prune import prune_remote
from trinity_sync.remote.remote_root import Remote
from trinity_sync.remote.required import fetch_newest
from trinity_sync.remote.upload import replicate
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import end_images
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import open_identity, read_identity, register_root
from trinity_sync.snapshot.spool import get_job_spool, open_job_spool
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.stack.doctor import run_checks
from trinity_sync.storage.discovery import (
    find_newest,
    read_latest_pointer,
    repair_latest_pointer,
    require_committed,
)
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.placement import await_node_shards
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import list_runs, open_run
from trinity_sync.storage.steps_in_use import list_pins, pin, tag
from trinity_sync.storage.verify import check_files, choose_files
from trinity_sync.weights.committed import CommitNotification
from trinity_sync.weights.version_view import SlotReader
from trinity_sync.weights.versions import Version

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


def upgrade(change: int) -> str:
    """What a message asks for, as a pattern."""
    older = "this environment" if change == AHEAD else "the environment that wrote it"
    return rf"has format {1 + change}, .* reads format 1: upgrade trinity-sync in {older}"


def slot_of(job: Job, step: int) -> Path:
    (slot,) = (each.slot for each in job.spool.tickets()[0] if each.ticket.step == step)
    return slot


def find_orphaned_steps(job: Job) -> list[int]:
    return [request.step for request in find_orphaned_saves(job.spool.folder.parent, grace_s=-1)]


# ---------------------------------------------------------------- each record


def test_a_format_has_the_root_the_spool_and_what_is_read_elsewhere_and_more_values_are_passed_over(
    records: dict[str, Kind],  # noqa: F811
) -> None:
    has = {name for name in NAMES if "format" in json.loads(records[name].path.read_text())}
    assert has == {"manifest", "run", "owner"}
    before = {name: records[name].read() for name in NAMES}
    assert all(before.values())
    for name in NAMES:
        changed(records[name].path, since_later="more")
    assert {name: records[name].read() for name in NAMES} == before


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


# ---------------------------------------------------------------- spools and roots


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclass
class Scene:
    """A job with two committed steps, weights in memory, and a third step that waits there."""

    job: Job
    settings: Settings
    version: Version

    def find(self, record: str) -> Path:
        """The file of a record."""
        if record == "spool":
            return self.job.spool.folder / "job.json"
        names = {
            "root": "identity.json",
            "run": "runs/1.json",
            "step": "../global_step_2/manifest.json",
        }
        return (self.job.root / ".trinity_sync" / names[record]).resolve()


@pytest.fixture
def scene(job: Job, tmp_path: Path, spool_folder: Path) -> Scene:
    open_run(job.root, "first", 0)
    for step in (1, 2):
        job.stage(step, STATE)
        job.commit(step)
    version = upload(job, 3, first())
    job.stage(4, STATE)
    return Scene(job, Settings(spool=spool_folder, home=tmp_path), version)


def require_refused(scene: Scene, path: Path, use: Callable[[Scene], object], change: int) -> str:
    """Require that a use refuses a record of another release, and changes no file of the root."""
    of_another_release(path, change)
    before = lasting_files(scene.job.root)
    with environment({}), pytest.raises(FormatError, match=upgrade(change)) as found:
        use(scene)
    assert str(path) in str(found.value)
    assert lasting_files(scene.job.root) == before
    return str(found.value)


def lasting_files(root: Path) -> dict[str, bytes]:
    return {n: c for n, c in content(root).items() if not n.endswith((".lock", ".tmp"))}


SPOOL_USES: dict[str, Callable[[Scene], object]] = {
    "the trainer opens it": lambda at: open_job_spool(at.settings.spool, at.job.root),
    "the trainer saves": lambda at: at.job.stage(5, STATE),
    "the stack looks for images": lambda at: at.job.spool.tickets(),
    "the flow opens it": lambda at: get_job_spool(at.job.spool.folder, at.job.save(4)),
    "the flow writes": lambda at: at.job.persist(4, rank_timeout_s=3600),
    "a save is marked": lambda at: end_images(at.job.spool, at.job.request(4), "it was cancelled"),
    "weights are found": lambda at: list(at.job.spool.list_versions("actor")),
    "weights are read": lambda at: SlotReader(Path(at.version.images[0].slot)).try_lock(
        at.version.images[0].image
    ),
    "steps are removed": lambda at: prune(at.job.root, spool=at.settings.spool),
}


@both
def test_a_spool_of_another_release_is_named_once_and_the_others_are_swept(
    scene: Scene, change: int, caplog: pytest.LogCaptureFixture
) -> None:
    other = Job.open(scene.job.root.with_name("other"), scene.settings.spool)
    other.stage(7, STATE)
    of_another_release(scene.find("spool"), change)
    with caplog.at_level(logging.WARNING):
        assert find_orphaned_steps(scene.job) == [7]
        assert find_orphaned_steps(scene.job) == [7]
    (said,) = [each.message for each in caplog.records if str(scene.find("spool")) in each.message]
    assert re.search(upgrade(change), said)
    other.close()


def test_reconcile_and_a_doctor_name_a_spool_of_another_release_and_leave_it(scene: Scene) -> None:
    of_another_release(scene.find("spool"))
    scene.job.stagers.pop(0).close()
    scene.job.root.rename(scene.job.root.with_name("gone"))
    before = content(scene.job.spool.folder)
    (finding,) = reconcile(scene.settings, [], None)
    assert finding.state == "left"
    assert re.search(upgrade(AHEAD), finding.why)
    (check,) = [each for each in run_checks(scene.settings) if "another release" in each.name]
    assert check.state == "fail"
    assert re.search(upgrade(AHEAD), check.found)
    assert content(scene.job.spool.folder) == before


ROOT_USES: dict[str, Callable[[Scene], object]] = {
    "a training begins": lambda at: open_identity(at.job.root),
    "the trainer opens its spool": lambda at: open_job_spool(at.settings.spool, at.job.root),
    "the flow looks for nodes": lambda at: await_node_shards(at.job.save(4), rank_timeout_s=0),
    "the flow commits": lambda at: at.job.commit(4),
    "a step is pinned": lambda at: pin(at.job.root, 1),
    "a step is tagged": lambda at: tag(at.job.root, 1, "good"),
    "a step is read": lambda at: acquire_lease(at.job.root, 1, "reader"),
    "steps are removed": lambda at: prune(at.job.root),
    "steps are quarantined": lambda at: rewind(at.job.root, 1),
    "steps are verified": lambda at: choose_files(at.job.root, newest=1),
    "steps are copied": lambda at: replicate(at.job.root, f"file://{at.settings.home}/copies", 1),
    "weights are found": lambda at: CommitNotification(at.job.root, "actor").find_newest([]),
    "a command is given it": lambda at: require_existing(at.job.root),
}


@both
def test_nothing_is_repaired_in_a_root_of_another_release(scene: Scene, change: int) -> None:
    (scene.job.root / ITERATION_FILES["checkpoint"]).write_text("1")
    of_another_release(scene.find("root"), change)
    register_root(scene.settings.home, scene.job.root)
    before = content(scene.job.root)
    found = reconcile(scene.settings, [scene.job.root], None)
    (said,) = [each for each in found if each.where == str(scene.job.root)]
    assert said.state == "left"
    assert re.search(upgrade(change), said.why)
    assert content(scene.job.root) == before


def test_a_root_that_was_written_in_the_formats_of_today_is_read(root: Path) -> None:
    """A change after which this fails needs another number of the format, and other files here."""
    shutil.copytree(Path(__file__).with_name("golden_root"), root, dirs_exist_ok=True)
    assert read_identity(root) == "0d9bb57410964a47a1d9b386116ec8c6"
    manifest = require_committed(root, 40)
    assert (manifest.run, manifest.kinds) == (2, ("checkpoint", "state_dict"))
    (checked,) = check_files(choose_files(root, step=40))
    assert not checked.wrong
    assert [(run.number, run.resumed_from) for run in list_runs(root)] == [(1, 0), (2, 20)]
    assert [(each.step, each.why) for each in list_pins(root)] == [(40, "kept"), (40, "best: good")]
    assert read_metrics(root, 2, 40) == {"reward": 0.5}
    assert read_job_settings(root).keep == "last=3"


def test_a_request_of_a_newer_client_is_taken_and_what_its_run_writes_is_not_tidied_away(
    job: Job,
) -> None:
    request = SaveRequest(root="/ckpts", step=4, run=1)
    known = request.model_dump(mode="json")
    assert SaveRequest.model_validate({**known, "added_later": [1]}) == request
    other = {"root": str(job.root), "step": 5, "format": 2, "since_later": "more"}
    runs = [FlowRun(flow_id=uuid4(), parameters=each) for each in ({"request": other}, {})]
    assert find_busy_steps(runs) == {job.root: {5}}


STEP_USES: dict[str, Callable[[Scene], object]] = {
    "a training resumes": lambda at: find_newest(at.job.root),
    "a step is read": lambda at: require_committed(at.job.root, 2),
    "weights are found": lambda at: CommitNotification(at.job.root, "actor").find_newest([]),
    "the flow commits over it": lambda at: at.job.commit(2),
    "pointers are repaired": lambda at: repair_latest_pointer(at.job.root, "checkpoint"),
    "steps are removed": lambda at: prune(at.job.root),
    "steps are quarantined": lambda at: rewind(at.job.root, 1),
    "a step is copied": lambda at: replicate(at.job.root, f"file://{at.settings.home}/copies", 2),
    "a report is made": lambda at: collect_report(at.settings, at.job.root),
}
RUN_USES: dict[str, Callable[[Scene], object]] = {
    "a training begins": lambda at: open_run(at.job.root, "third", 4)
}
USES = {"spool": SPOOL_USES, "root": ROOT_USES, "step": STEP_USES, "run": RUN_USES}


@both
@pytest.mark.parametrize(("record", "use"), [(of, use) for of in USES for use in USES[of]])
def test_what_has_a_record_of_another_release_is_refused_and_left_unchanged(
    scene: Scene, record: str, use: str, change: int
) -> None:
    open_run(scene.job.root, "second", 4)
    before, path = content(scene.job.spool.folder), scene.find(record)
    said = require_refused(scene, path, USES[record][use], change)
    if record == "spool":
        assert f"remove {scene.job.spool.folder}" in said
        after = content(scene.job.spool.folder)
        assert after == before | {str(path): after[str(path)]}
    else:
        assert slot_of(scene.job, 4)


@both
def test_a_sweep_names_a_step_of_another_release_once_and_repairs_nothing(
    scene: Scene, change: int, caplog: pytest.LogCaptureFixture
) -> None:
    scene.job.stage(2, {"optim": {"w": torch.ones(10)}})  # came late
    of_another_release(step_folder(scene.job.root, 2) / "manifest.json", change)
    (scene.job.root / ITERATION_FILES["checkpoint"]).write_text("1")
    register_root(scene.settings.home, scene.job.root)
    before = content(scene.job.root)
    assert find_orphaned_steps(scene.job) == find_orphaned_steps(scene.job) == [4]  # of this one
    said = [each.message for each in caplog.records]
    assert len([each for each in said if re.search(upgrade(change), each)]) == 1
    assert not failure_path(slot_of(scene.job, 2)).exists()
    found = reconcile(scene.settings, [scene.job.root], None)
    pointers = [each for each in found if "pointers" in each.what]
    assert [each.state for each in pointers] == ["failed"]
    assert re.search(upgrade(change), pointers[0].why)
    after = content(scene.job.root)
    assert {name: after[name] for name in before} == before


@both
def test_ls_and_doctor_name_the_environment_to_upgrade(
    job: Job, change: int, settings: Settings
) -> None:
    for step in (1, 2, 3):
        commit_files(job.root, step)
    of_another_release(step_folder(job.root, 2) / "manifest.json", change)
    shown = invoke("ls", job.root)
    assert shown.exit_code
    assert "upgrade trinity-sync in" in shown.stderr
    (check,) = [each for each in run_checks(settings, job.root) if each.name == "records"]
    assert check.state == "fail"
    assert re.search(upgrade(change), check.found)


# ---------------------------------------------------------------- commits, pointers, resumes


@both
def test_next_to_a_step_of_another_release_the_others_are_committed(job: Job, change: int) -> None:
    job.commit_states(5, STATE)
    path = step_folder(job.root, 5) / "manifest.json"
    kept = of_another_release(path, change)
    job.commit_states(7, STATE)
    assert path.read_bytes() == kept
    assert require_committed(job.root, 7)
    (job.root / ITERATION_FILES["checkpoint"]).write_text("5")
    job.commit_states(8, STATE)
    assert read_latest_pointer(job.root, "checkpoint") == 8


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


def test_steps_of_another_release_in_a_store_end_what_looks_at_all_of_them(
    job: Job, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/copies"
    for step in (1, 2):
        commit_files(job.root, step)
        replicate(job.root, url, step)
    of_another_release(tmp_path / "copies/global_step_2/manifest.json")
    before = content(tmp_path / "copies")
    commit_files(job.root, 3)
    for use in (
        lambda: Remote(url).list_steps(),
        lambda: fetch(url, None, tmp_path / "new"),
        lambda: fetch(url, 2, tmp_path),
        lambda: fetch_newest(tmp_path / "new", Remote(url)),
        lambda: replicate(job.root, url, 2),
        lambda: prune_remote(job.root, url, rules()),
    ):
        with pytest.raises(FormatError):
            use()
    assert content(tmp_path / "copies") == before


# ---------------------------------------------------------------- requests


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
    ended = job.spool.folder.parent, {"request": other}, request.key, "its flow run has failed"
    asyncio.run(try_allow_eviction(*ended))
    assert not failure_path(slot_of(job, 5)).exists()
