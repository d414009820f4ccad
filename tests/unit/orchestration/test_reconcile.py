"""What crashes leave on disk and in memory, and what reconcile makes of it."""

import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from tests.conftest import environment
from tests.support.answers import server
from tests.support.job import Job
from tests.support.steps import MODEL
from trinity_sync.catalog import get_catalog_url, is_current, open_catalog
from trinity_sync.client.prefect_api import FlowRun, State
from trinity_sync.layout import MANIFEST, attaching_folder, step_folder
from trinity_sync.orchestration import on_node
from trinity_sync.orchestration.recovery.reconcile import GRACE_S, reconcile
from trinity_sync.saves.save_status import end_images
from trinity_sync.settings import Settings
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.snapshot.ticket import seal
from trinity_sync.storage.discovery import read_latest_pointer, require_committed
from trinity_sync.storage.gc import Finding, remove_attached, remove_temporaries

LATER_S = 7200.0


def run(job: Job, settings: Settings, *, later_s: float = 0.0) -> list[Finding]:
    """What it finds without a server, so many seconds from now, except in the catalog."""
    found = reconcile(settings, [job.root], None, grace_s=GRACE_S - later_s)
    return [finding for finding in found if finding.what != "catalog"]


def save(job: Job, *steps: int, run: int = 1) -> None:
    for step in steps:
        job.commit_states(step, {"model": {"w": torch.arange(5000.0) * step}}, run=run)


def written_but_never_committed(job: Job, step: int) -> Path:
    """The temporary file of a save whose flow died, and whose image was evicted later."""
    job.stage(step, {"model": {"w": torch.ones(10)}})
    (written,) = job.persist(step)
    for sealed in job.spool.tickets()[0]:
        Path(f"{sealed.slot}.ticket").unlink()
    return Path(written.temporary)


def test_a_node_whose_clock_is_a_day_ahead_removes_no_file_of_a_save_in_flight(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = written_but_never_committed(job, 1)
    later = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: later)
    run(job, settings)
    assert left.exists()


def test_old_export_files_of_a_removed_step_are_removed(job: Job, settings: Settings) -> None:
    save(job, 1, 2)
    exports = job.root / ".trinity_sync/exports"
    for step in (1, 2):
        half = exports / f"global_step_{step}.actor/model-00001.safetensors"
        half.parent.mkdir(parents=True)
        half.write_bytes(bytes(1000))
    (exports / "global_step_01.actor").touch()  # no name of ours
    shutil.rmtree(step_folder(job.root, 1))
    assert run(job, settings) == []
    (found,) = run(job, settings, later_s=LATER_S)
    assert (found.what, found.state) == ("exports of step 1", "repaired")
    assert {path.name for path in exports.iterdir()} == {
        "global_step_2.actor",
        "global_step_01.actor",
    }


def test_a_pointer_that_lags_was_emptied_or_names_a_removed_step_is_moved(
    job: Job, settings: Settings
) -> None:
    save(job, 1, 2)
    (job.root / "latest_checkpointed_iteration.txt").write_text("1")
    (job.root / "latest_state_dict_iteration.txt").write_text("")
    mended = run(job, settings)
    assert [finding.state for finding in mended] == ["repaired", "repaired"]
    assert "named step 1, names step 2 now" in mended[0].why
    assert (
        read_latest_pointer(job.root, "checkpoint")
        == read_latest_pointer(job.root, "state_dict")
        == 2
    )
    assert run(job, settings) == []
    shutil.rmtree(step_folder(job.root, 2))
    run(job, settings)
    assert read_latest_pointer(job.root, "checkpoint") == 1


def test_a_pointer_at_another_systems_checkpoint_is_left_and_one_that_cannot_be_made_good_reported(
    job: Job, settings: Settings
) -> None:
    save(job, 1)
    shard = step_folder(job.root, 9) / MODEL
    shard.parent.mkdir(parents=True)
    shard.touch()
    (job.root / "latest_checkpointed_iteration.txt").write_text("9")
    assert run(job, settings) == []
    assert read_latest_pointer(job.root, "checkpoint") == 9
    shard.rename(step_folder(job.root, 9) / "data.pt")  # what a driver leaves of a lost save
    assert [each.state for each in run(job, settings)] == ["repaired"]
    assert read_latest_pointer(job.root, "checkpoint") == 1
    (step_folder(job.root, 1) / "actor/model_world_size_1_rank_0.pt").unlink()
    found = run(job, settings)
    assert {finding.state for finding in found} == {"left"}
    assert "is missing" in found[0].why


def test_temporary_files_are_removed_once_they_are_not_needed(job: Job, settings: Settings) -> None:
    temporary = written_but_never_committed(job, 3)
    assert run(job, settings) == []
    (finding,) = run(job, settings, later_s=LATER_S)
    assert (finding.state, temporary.exists()) == ("left", True)
    assert "not known here" in finding.why  # no server can be asked

    def remove(**conditions: object) -> list[Finding]:
        default = {"images": set(), "busy": set(), "is_fresh": (time.time() + 1).__le__}
        return list(remove_temporaries(job.root, **{**default, **conditions}))  # type: ignore[arg-type]

    image = temporary.name.removesuffix(".tmp").rpartition(".")[2]
    assert remove(images={image}) == []
    assert remove(busy={3}) == []
    assert remove(is_fresh=(temporary.stat().st_mtime - 1).__le__) == []
    assert [finding.state for finding in remove(busy=None)] == ["left"]
    assert temporary.exists()
    assert [finding.state for finding in remove(busy={4})] == ["repaired"]
    assert not temporary.exists()


def test_what_a_clock_that_was_set_back_dates_in_the_future_is_removed(
    job: Job, settings: Settings
) -> None:
    save(job, 1, 2)
    left = [
        job.root / f".trinity_sync/pins/.1.json.{'0' * 32}.tmp",
        job.root / ".trinity_sync/exports/global_step_1.actor",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (9e9, 9e9))
    shutil.rmtree(step_folder(job.root, 1))
    assert {finding.state for finding in run(job, settings)} == {"repaired"}
    assert not [path for path in left if path.exists()]


def test_files_for_saves_that_were_never_submitted_are_removed_after_a_newer_commit(
    job: Job,
) -> None:
    folder = step_folder(attaching_folder(job.root) / "killed", 3)
    folder.mkdir(parents=True)
    (folder / "data.pt").write_text("of a run that was killed")

    def remove(waiting: set[int] | None, *, before: float = math.inf) -> list[Finding]:
        return list(remove_attached(job.root, waiting=waiting, is_fresh=before.__le__))

    assert remove(set()) == []  # nothing newer was committed
    save(job, 4)
    assert remove(set(), before=folder.stat().st_mtime - 1) == []
    assert remove({3}) == []
    assert remove(None) == []
    committed = (step_folder(job.root, 4) / MANIFEST).stat().st_mtime
    os.utime(folder, (committed + 1, committed + 1))
    assert remove(set()) == []  # its save may follow
    assert (folder / "data.pt").exists()
    os.utime(folder, (committed - 1, committed - 1))
    (finding,) = remove({4})
    assert (finding.state, finding.what) == ("repaired", ".trinity_sync/attaching/killed")
    assert not folder.parent.exists()


def test_those_of_a_save_whose_image_waits_are_kept(job: Job, settings: Settings) -> None:
    save(job, 4)
    job.stage(5, {"model": {"w": torch.ones(10)}})
    folder = step_folder(attaching_folder(job.root) / "waiting", 5)
    folder.mkdir(parents=True)
    os.utime(folder, (0, 0))
    reconcile(settings, [job.root], [], grace_s=0)
    assert folder.exists()
    job.commit(5)
    reconcile(settings, [job.root], [], grace_s=0)
    assert not folder.exists()


def test_what_a_replaced_step_left_is_removed_unless_its_name_has_what_is_no_commit(
    job: Job, settings: Settings
) -> None:
    save(job, 1)
    left = job.root / ".trinity_sync/replacing/global_step_1"
    shutil.copytree(step_folder(job.root, 1), left)
    trash = job.root / ".trinity_sync/trash/global_step_0.x"
    shutil.copytree(step_folder(job.root, 1), trash)
    assert [finding.state for finding in run(job, settings)] == ["repaired", "repaired"]
    assert not left.exists()
    assert not trash.exists()
    require_committed(job.root, 1)
    left = left.with_suffix(".replaced")
    step_folder(job.root, 1).rename(left)
    step_folder(job.root, 1).mkdir()
    what = [(each.what, each.state) for each in run(job, settings)]
    assert (".trinity_sync/replacing/global_step_1.replaced", "left") in what
    step_folder(job.root, 1).rmdir()
    run(job, settings)
    require_committed(job.root, 1)


def test_a_step_that_lost_its_name_to_a_fetched_one_is_restored(
    job: Job, settings: Settings
) -> None:
    save(job, 1, 2)
    fetching = job.root / ".trinity_sync/fetching"
    fetching.mkdir(parents=True)
    step_folder(job.root, 1).rename(fetching / "global_step_1.replaced")
    shutil.copytree(step_folder(job.root, 2), fetching / "global_step_2.replaced")
    run(job, settings)
    require_committed(job.root, 1)
    assert list(fetching.iterdir()) == []


@pytest.mark.parametrize("is_ahead", [False, True], ids=["old", "of a clock that was set back"])
def test_memory_of_a_removed_job_is_freed(
    job: Job, settings: Settings, tmp_path: Path, is_ahead: bool
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    spool = open_job_spool(settings.spool, other)
    slot = Slot(spool.slot("actor", "model", 0, 0))
    slot.image(1 << 20)
    other.rmdir()
    (finding,) = run(job, settings, later_s=LATER_S)
    assert (finding.state, finding.why) == ("left", "a process has it open")
    slot.close(remove=False)
    assert run(job, settings) == []  # it is too young
    for path in (slot.path, spool.folder) if is_ahead else ():
        os.utime(path, (time.time() + LATER_S,) * 2)
    (finding,) = run(job, settings, later_s=0.0 if is_ahead else LATER_S)
    assert finding.state == "repaired"
    assert "bytes of memory freed" in finding.why
    assert not spool.folder.exists()
    assert job.spool.folder.exists()


def test_temporary_files_of_records_are_removed_and_other_files_kept(
    job: Job, settings: Settings
) -> None:
    save(job, 1)
    private = job.root / ".trinity_sync"
    for name in ("runs", "leases", "pins", "metrics", "placements", "exports", "stored"):
        (private / name).mkdir(exist_ok=True)
    folders = (path for path in private.iterdir() if path.is_dir() and path.name != "trash")
    places = (job.root, private, *folders)
    ours = [folder / f".1.json.{uuid4().hex}.tmp" for folder in places]
    others = [job.root / ".editor.tmp", private / "pins/.swap.1a2b.tmp", job.root / "a.tmp"]
    theirs = step_folder(job.root, 1) / "actor/.editor.tmp"
    for path in (*ours, *others, theirs):
        path.touch()
    assert run(job, settings) == []  # they may have their names in a moment
    found = run(job, settings, later_s=LATER_S)
    assert sorted(each.what for each in found) == sorted(
        path.relative_to(job.root).as_posix() for path in ours
    )
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in (*others, theirs))


@pytest.mark.parametrize("torn", [True, False])
def test_memory_of_a_job_that_is_away_is_left_and_named_while_it_has_an_image(
    job: Job, settings: Settings, tmp_path: Path, torn: bool
) -> None:
    job.stage(1, {"model": {"w": torch.ones(10)}})
    (ticket,) = job.spool.folder.glob("*.ticket")
    if torn:
        ticket.write_bytes(b"torn")
    job.stager().close()
    job.root.rename(tmp_path / "away")
    (finding,) = run(job, settings, later_s=LATER_S)
    assert (finding.state, ticket.exists()) == ("left", True)
    assert (f"ticket {ticket} is torn" if torn else "it has 1 unsaved images") in finding.why


def test_a_failed_save_whose_image_waits_is_named(job: Job, settings: Settings) -> None:
    job.stage(1, {"model": {"w": torch.ones(10)}})
    end_images(job.spool, job.request(1), "disk full")
    (finding,) = run(job, settings)
    assert finding.state == "left"
    assert "model of step 1" in finding.what


def test_a_root_that_cannot_be_written_does_not_hold_up_the_others(
    job: Job, settings: Settings, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    (other / ".trinity_sync/replacing").mkdir(parents=True)
    (other / ".trinity_sync/commit.lock").mkdir()  # not even root can open it
    save(job, 1)
    (job.root / "latest_checkpointed_iteration.txt").unlink()
    found = reconcile(settings, [other, job.root], None)
    assert {finding.state for finding in found if finding.where == str(other)} == {"failed"}
    assert read_latest_pointer(job.root, "checkpoint") == 1


def test_steps_that_the_catalog_missed_are_written_into_it_once_it_is_there(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(job, 1, 2)
    (found,) = reconcile(settings, [job.root], None)
    assert (found.what, found.state) == ("catalog", "repaired")
    assert "differed from the files" in found.why
    with open_catalog(get_catalog_url(settings)) as engine:
        assert is_current(engine, job.root)
    assert reconcile(settings, [job.root], None) == []
    (job.root / "latest_checkpointed_iteration.txt").write_text("1")
    monkeypatch.setenv("TRINITY_SYNC_STACK__CATALOG__URL", "sqlite:////proc/nowhere/catalog.db")
    found = reconcile(settings, [job.root], None)
    assert [(each.what, each.state) for each in found] == [
        ("latest_checkpointed_iteration.txt", "repaired"),
        ("catalog", "failed"),
    ]


def test_files_are_repaired_though_the_server_refuses_the_login(
    job: Job, settings: Settings
) -> None:
    save(job, 1)
    (job.root / "latest_checkpointed_iteration.txt").unlink()
    temporary = written_but_never_committed(job, 3)
    variables = {"TRINITY_SYNC_HOME": str(settings.home), "TRINITY_SYNC_SPOOL": str(settings.spool)}
    with server({}, login="who:what") as url, environment({**variables, "PREFECT_API_URL": url}):
        found = on_node.repair(str(job.root), GRACE_S - LATER_S)
    assert [(each.what, each.state) for each in found if each.what != "catalog"] == [
        ("runs", "left"),
        ("latest_checkpointed_iteration.txt", "repaired"),
        (str(temporary.relative_to(job.root)), "left"),
    ]
    assert "(401): the password is missing or wrong" in found[0].why


@pytest.mark.parametrize("runs", ["unknown", "none", "one saves them"])
def test_images_that_no_run_saves_are_named_with_what_to_do(
    job: Job, settings: Settings, runs: str
) -> None:
    job.stage(2, {"model": {"w": torch.ones(10)}})
    ((image,), _) = job.spool.tickets()
    seal(image.slot, replace(image.ticket, monotonic_s=0.0))  # as if it were sealed at boot
    parameters = {"request": {"root": str(job.root), "step": 2}}
    run = FlowRun(uuid4(), "save", State("RUNNING", "Running"), parameters=parameters)
    known = {"unknown": None, "none": [], "one saves them": [run]}[runs]
    found = [each for each in reconcile(settings, [job.root], known) if each.what != "catalog"]
    is_named = runs != "one saves them"
    assert [(each.what, each.state) for each in found] == [("save actor step 2", "left")] * is_named
    for words in ("wait for a saver", "run: trinity-sync status"):
        assert all(words in each.why for each in found)
