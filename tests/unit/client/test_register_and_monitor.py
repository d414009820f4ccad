"""Trinity's calls: save functions, and the request of their flow run, a coroutine among others."""

import asyncio
import itertools
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import torch

from tests.integration.fsdp.commits import CommitsHere
from tests.support.disk import no_opens_of, noted_syncs
from tests.support.dying import in_a_process
from tests.support.job import Job, held
from tests.support.leases import acquire_lease
from tests.support.steps import MODEL, commit_files, save_foreign_step
from tests.unit.client.conftest import Saves
from tests.unit.conftest import Open
from tests.unit.snapshot.test_overlap import BIG
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import LockTimeoutError, SaveError, SaveFailedError, SupersededError
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.layout import Kind
from trinity_sync.storage.commit import commit
from trinity_sync.storage.discovery import find_newest, read_latest_pointer, require_committed
from trinity_sync.storage.gc import remove_replaced
from trinity_sync.storage.manifest import read_manifest, write_manifest
from trinity_sync.storage.replace import displace_step
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.save_functions import (
    FunctionStatus,
    await_save_functions,
    read_statuses,
    write_status,
)
from trinity_sync.storage.steps_in_use import pin


def test_other_coroutines_run_while_it_waits_for_staging(saves: Saves, job: Job) -> None:
    model = {"w": torch.ones(BIG)}
    run = 0

    async def story() -> None:
        nonlocal run
        with held(saves._stager):
            saves.save(10, {"model": model}, overlap=True)
            requested = asyncio.create_task(saves.register_and_monitor(10))
            for _ in range(20):
                await asyncio.sleep(0.01)
                run += not requested.done()
            assert not job.spool.tickets()[0]
        await requested

    asyncio.run(story())
    assert run == 20
    assert len(job.spool.tickets()[0]) == 1


def resumed(coordinator_of: Open, root: Path, step: int = 40) -> CheckpointCoordinator:
    """The second run of a job, whose first one has the checkpoint 40 and the weights after it."""
    open_run(root, "first", 0)
    commit_files(root, 40)
    for later in (41, 42):
        commit_files(root, later, kind="state_dict")
    saves = coordinator_of()
    if step:
        saves.resumed_from(step)
    return saves


def write_model(root: Path, step: int) -> None:
    """What a function does that computes its path by itself."""
    path = root / f"global_step_{step}" / MODEL
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"of the second run")


def commit_of(job: Job, step: int, status: FunctionStatus) -> None:
    commit(job.save(step, run=2, kind=status.kind), [], [status])


@pytest.mark.parametrize("step", [41, 42])
def test_a_function_of_a_resumed_run_leaves_the_files_of_the_step_that_it_replaces(
    coordinator_of: Open, job: Job, step: int
) -> None:
    """Also those that a program has just opened; files beside the commit go with it."""
    saves = resumed(coordinator_of, job.root)
    folder = job.root / f"global_step_{step}"
    before = (folder / MODEL).read_bytes()
    (folder / "data.pt").write_text("by other code, next to the first run's step")
    moved = job.root / f".trinity_sync/replacing/global_step_{step}.replaced"
    seen = []

    def write() -> None:
        write_model(job.root, step)
        seen.append((moved / MODEL).read_bytes())
        seen.append(find_newest(job.root, "state_dict").step)
        seen.append(read_latest_pointer(job.root, "state_dict"))

    with (folder / MODEL).open("rb") as file:
        saves.save_sync(write, step, is_state_dict=True)
        assert file.read() == before
    assert seen == [before, 42 if step == 41 else 41, 42 if step == 41 else 41]
    (status,) = read_statuses(job.spool, job.save(step, run=2, kind="state_dict"))
    assert status.files == (MODEL,)
    assert [each.state for each in remove_replaced(job.root)] == ["left"]
    commit_of(job, step, status)
    assert require_committed(job.root, step).run == 2
    assert not (folder / "data.pt").exists()
    assert not moved.exists()
    assert (
        find_newest(job.root, "state_dict").run,
        read_latest_pointer(job.root, "state_dict"),
    ) == (2, step)


def test_a_function_does_not_write_into_a_step_of_another_system(
    coordinator_of: Open, job: Job
) -> None:
    content = save_foreign_step(job.root, 40)
    saves = coordinator_of()
    job.stage(40, {"optim": {"w": torch.ones(3)}})
    written = job.persist(40, "optim")
    for name in ("one", "other"):
        path = job.root / f"global_step_40/{name}.bin"
        saves.save_sync(partial(path.write_bytes, b"own"), 40)
    commit(job.save(40), written, [*read_statuses(job.spool, job.save(40))])
    names = {each.path for each in require_committed(job.root, 40).files}
    assert names == {"one.bin", "other.bin", "actor/optim_world_size_1_rank_0.pt"}
    (aside,) = (job.root / ".trinity_sync/quarantine").glob("*/global_step_40")
    assert {name: (aside / name).read_bytes() for name in content} == content
    assert not {*content} & {
        path.relative_to(job.root / "global_step_40").as_posix()
        for path in (job.root / "global_step_40").rglob("*")
    }


def test_images_that_are_being_written_are_committed_although_a_function_displaces_their_step(
    coordinator_of: Open, job: Job
) -> None:
    saves = resumed(coordinator_of, job.root)
    job.stage(41, {"optim": {"w": torch.ones(3)}}, run=2)
    written = job.persist(41, "optim", run=2)
    saves.save_sync(lambda: write_model(job.root, 41), 41)
    (status,) = read_statuses(job.spool, job.save(41, run=2))
    commit(job.save(41, run=2), written, [status])
    assert {each.component for each in require_committed(job.root, 41).files} == {"", "optim"}


@pytest.mark.parametrize(
    ("resumes", "step", "claim", "why"),
    [
        (40, 40, None, "is not superseded, because run 2 resumed from step 40"),
        (40, 40, "taken over", "of run 1, which is committed and is not superseded"),
        (40, 41, "pin", "is pinned or tagged"),
        (40, 41, "lease", "is being read"),
        (0, 42, None, "is what a resume would find"),
        (0, 40, None, "is what a resume would find"),
        (40, 44, "checkpoint", "would replace the newest checkpoint"),
    ],
)
def test_a_function_that_would_change_a_step_that_is_needed_is_refused(
    coordinator_of: Open, job: Job, resumes: int, step: int, claim: str | None, why: str
) -> None:
    saves = resumed(coordinator_of, job.root, resumes)
    if claim == "checkpoint":
        commit_files(job.root, step)
    if claim == "taken over":  # by a sync of this run with the same weights
        loaded = require_committed(job.root, step)
        write_manifest(job.root, replace(loaded, run=2, checkpoint_run=1))
    before = require_committed(job.root, step)
    content = (job.root / f"global_step_{step}" / MODEL).read_bytes()

    def save() -> None:
        with pytest.raises(SaveError, match=why):
            saves.save_sync(lambda: write_model(job.root, step), step, is_state_dict=True)
        saves.save_async("own", lambda: write_model(job.root, step), step, is_state_dict=True)
        with pytest.raises(SaveFailedError, match=f"save 'own' of step {step}: .*{why}"):
            saves.wait_all(250)

    if claim == "pin":
        pin(job.root, step)
    if claim == "lease":
        with acquire_lease(job.root, step, "a reader"):
            save()
    else:
        save()
    assert require_committed(job.root, step) == before
    assert (job.root / f"global_step_{step}" / MODEL).read_bytes() == content
    refused = job.save(step, run=2, kind="state_dict")
    assert {each.state for each in read_statuses(job.spool, refused)} == {"failed"}


def test_a_function_of_a_run_that_was_superseded_is_refused(coordinator_of: Open, job: Job) -> None:
    saves = resumed(coordinator_of, job.root)
    open_run(job.root, "third", 42)
    commit_files(job.root, 43)
    with pytest.raises(SupersededError, match="run 3 resumed from step 42"):
        saves.save_sync(lambda: write_model(job.root, 43), 43)
    commit_files(job.root, 42, run=3)
    before = require_committed(job.root, 42)
    with pytest.raises(SupersededError, match="run 3 has committed step 42"):
        saves.save_sync(lambda: write_model(job.root, 42), 42)
    assert require_committed(job.root, 42) == before


def test_a_function_killed_while_its_step_is_displaced_leaves_the_step_whole(
    job: Job, tmp_path: Path
) -> None:
    """In its place, or where a repair finds it."""
    died, outcomes = True, []
    for die_before in itertools.count(1):
        root = tmp_path / f"dies-before-{die_before}"
        root.mkdir()
        open_run(root, "first", 0)
        commit_files(root, 40)
        folder = commit_files(root, 41, kind="state_dict")
        content = (folder / MODEL).read_bytes()
        open_run(root, "second", 40)
        save = replace(job.save(41, run=2, kind="state_dict"), root=str(root))
        died = in_a_process(partial(displace_step, save), tmp_path, die_before=die_before)
        assert find_newest(root, "checkpoint").step == 40
        list(remove_replaced(root))
        moved = root / ".trinity_sync/replacing/global_step_41.replaced"
        outcomes.append(moved.exists())
        assert ((moved if moved.exists() else folder) / MODEL).read_bytes() == content
        if not moved.exists():
            assert require_committed(root, 41).run == 1
        displace_step(save)
        assert not (folder / MODEL).exists()
        assert (moved / MODEL).read_bytes() == content
        if died != die_before:
            break
        shutil.rmtree(root)
    assert outcomes == sorted(outcomes)
    assert {*outcomes} == {False, True}


def test_a_function_that_changes_what_its_run_has_committed_of_the_step_fails_the_save(
    saves: Saves, job: Job
) -> None:

    def write(content: bytes) -> Callable[[], object]:
        (job.root / "global_step_4").mkdir(exist_ok=True)
        return lambda: (job.root / "global_step_4/own.bin").write_bytes(content)

    saves.save_sync(write(b"same"), 4, is_state_dict=True)
    sync = job.save(4, kind="state_dict")
    commit(sync, [], [*read_statuses(job.spool, sync)])
    saves.save_sync(write(b"same"), 4)
    same = [*read_statuses(job.spool, job.save(4))]
    saves.save_sync(write(b"else"), 4)
    with pytest.raises(SaveError, match=r"has changed .*own\.bin, which run 1 had committed"):
        commit(job.save(4), [], same)
    write(b"same")()
    commit(job.save(4), [], same)
    require_committed(job.root, 4)


def test_a_save_of_states_and_a_function_that_failed_is_committed_once_both_are_submitted_again(
    coordinator_of: Open, job: Job
) -> None:
    saves = coordinator_of(trigger=CommitsHere())
    path = job.root / "global_step_4/own.bin"
    path.parent.write_text("so that nothing can be written")

    def submit(*, states: bool) -> None:
        saves.save_async("own", lambda: path.write_bytes(b"own"), 4)
        if states:
            saves.save(4, {"model": {"w": torch.ones(3)}})
        asyncio.run(saves.register_and_monitor(4, checkpoint_thread_count=1))

    submit(states=True)
    with pytest.raises(SaveFailedError, match="not committed"):
        saves.wait_all(250)
    path.parent.unlink()
    path.parent.mkdir()
    submit(states=False)
    with pytest.raises(SaveFailedError, match="call save again before register_and_monitor"):
        saves.wait_all(250)
    submit(states=True)
    saves.wait_all(250)
    found = require_committed(job.root, 4)
    assert {file.path for file in found.files} == {"own.bin", f"actor/{Path(MODEL).name}"}


def test_functions_are_committed_after_a_program_has_removed_the_spool(
    coordinator_of: Open, job: Job
) -> None:
    saves = coordinator_of(trigger=CommitsHere())
    for step in (1, 2):
        saves.save_sync(lambda: None, step)
        asyncio.run(saves.register_and_monitor(step, checkpoint_thread_count=1))
        saves.wait_all(250)
        shutil.rmtree(job.spool.folder)
    assert saves.latest_step() == 2


def test_a_function_does_not_wait_for_states_of_a_lost_run_with_the_number_of_its_own(
    coordinator_of: Open, job: Job
) -> None:
    open_run(job.root, "first", 0)
    backup = shutil.copytree(job.root, job.root.with_name("backup"))
    lost = coordinator_of(run_key="lost")
    lost.save(4, {"model": {"w": torch.ones(3)}})
    lost.close(timeout=0)
    shutil.rmtree(job.root)
    backup.rename(job.root)
    quick = {"rank_timeout_s": 0.5}
    saves = coordinator_of(run_key="second", trigger=CommitsHere(), job=quick)
    saves.save_async("own", lambda: write_model(job.root, 4), 4)
    ((image,), _) = job.spool.tickets()
    assert image.ticket.run_key.startswith("lost")
    asyncio.run(saves.register_and_monitor(4, checkpoint_thread_count=1))
    saves.wait_all(20)
    assert require_committed(job.root, 4).run == 2


def test_a_step_that_a_function_of_a_run_without_a_load_replaces_is_quarantined(
    coordinator_of: Open, job: Job
) -> None:
    saves = resumed(coordinator_of, job.root, 0)
    content = (job.root / "global_step_41" / MODEL).read_bytes()
    saves.save_sync(lambda: write_model(job.root, 41), 41, is_state_dict=True)
    commit_of(job, 41, *read_statuses(job.spool, job.save(41, run=2, kind="state_dict")))
    (kept,) = (job.root / ".trinity_sync/quarantine").glob("*/global_step_41")
    assert (kept / MODEL).read_bytes() == content
    kept.rename(job.root / ".trinity_sync/replacing/global_step_41.replaced")  # the commit died
    (found,) = remove_replaced(job.root)
    assert "quarantined" in found.why
    assert (kept / MODEL).read_bytes() == content


@pytest.mark.parametrize(
    ("committed", "kind"),
    [("checkpoint", "checkpoint"), ("checkpoint", "state_dict"), ("state_dict", "state_dict")],
)
@pytest.mark.parametrize("by", ["a function", "images"])
def test_a_function_is_not_called_for_what_its_run_has_committed(
    saves: Saves, job: Job, committed: Kind, kind: Kind, by: str
) -> None:
    """But for a sync that images alone have committed: that of another role may be a function's."""
    saves.begin()
    if by == "a function":
        write = partial(write_model, job.root, 4)
        saves.save_sync(write, 4, is_state_dict=committed == "state_dict")
        save = job.save(4, kind=committed)
        commit(save, [], [*read_statuses(job.spool, save)])
    else:
        job.commit_states(4, {"model": {"w": torch.ones(3)}}, kind=committed)
    before = (job.root / "global_step_4" / MODEL).read_bytes()
    is_sync, called = kind == "state_dict", list[int]()
    if by == "images" and committed == "state_dict":
        saves.save_sync(lambda: called.append(4), 4, is_state_dict=True)
        return

    def save() -> None:
        saves.save_sync(lambda: called.append(4), 4, is_state_dict=is_sync)
        saves.wait_all(250)  # which raises it after the first save

    with pytest.raises(SaveError, match="run 1 has committed that step"):
        save()
    saves.save_async("own", lambda: called.append(4), 4, is_state_dict=is_sync)
    with pytest.raises(SaveFailedError, match="the save function is not run, because run 1"):
        saves.wait_all(250)
    assert not called
    assert (job.root / "global_step_4" / MODEL).read_bytes() == before


def test_a_commit_waits_for_a_function_that_is_called_again_after_it_has_ended(
    coordinator_of: Open, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.storage.replace.LIMIT_S", 0.0)
    saves, path = coordinator_of(), job.root / "global_step_4/own.bin"
    path.parent.mkdir()
    saves.save_sync(lambda: path.write_bytes(b"first"), 4)
    ended = [*read_statuses(job.spool, job.save(4))]
    job.stage(4, {"model": {"w": torch.ones(3)}}, kind="state_dict")

    def write_again() -> None:
        with pytest.raises(
            LockTimeoutError, match=rf"the last holder in the file is process {os.getpid()} "
        ):
            commit(job.save(4), [], ended)
        job.commit(4, kind="state_dict")  # which has nothing of the checkpoint's functions
        path.write_bytes(b"again")

    saves.save_sync(write_again, 4)
    commit(job.save(4), [], ended)
    require_committed(job.root, 4)
    assert digest_cached_file(path) == read_manifest(job.root, 4).find_file("own.bin").digest


@pytest.mark.parametrize("name", ["base.bin", "ckpts/global_step_2/own.bin"])
def test_a_hard_link_that_a_function_makes_is_committed_as_a_file_of_its_own(
    coordinator_of: Open, job: Job, tmp_path: Path, name: str
) -> None:
    """Also one to a file of an earlier step, which a write to this one's would change."""
    saves, path, other = coordinator_of(), job.root / "global_step_4/own.bin", tmp_path / name
    for each in (path, other):
        each.parent.mkdir(exist_ok=True)
    other.write_bytes(b"base")
    saves.save_sync(lambda: path.hardlink_to(other), 4)
    commit(job.save(4), [], await_save_functions(job.spool, job.save(4)))
    other.write_bytes(b"later")
    assert path.read_bytes() == b"base"


def test_no_commit_replaces_a_step_into_which_a_function_of_an_earlier_run_writes(
    coordinator_of: Open, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_sync.storage.replace.LIMIT_S", 0.0)
    saves, called = coordinator_of(), list[str]()

    def write_late() -> None:
        open_run(job.root, "second", 0)
        job.stage(4, {"model": {"w": torch.ones(3)}}, run=2)
        with pytest.raises(LockTimeoutError):
            job.commit(4, run=2)
        saves.save_async("own", lambda: called.append("own"), 4)
        write_model(job.root, 4)

    with ThreadPoolExecutor(1) as pool:
        begun = Event()
        saves.save_async("own", lambda: begun.wait(250), 4)
        pool.submit(saves.save_sync, write_late, 4).result()
        begun.set()
    with pytest.raises(SaveFailedError, match="is superseded: run 2"):
        saves.wait_all(250)
    assert not called
    job.commit(4, run=2)
    require_committed(job.root, 4)


@pytest.mark.parametrize("target", ["file", "folder", "nowhere", "../outside"])
def test_a_link_that_a_function_makes_fails_the_save_by_name(
    coordinator_of: Open, job: Job, target: str
) -> None:
    saves, folder = coordinator_of(), job.root / "global_step_4"

    def write() -> None:
        (folder / "folder").mkdir(parents=True)
        (folder / "file").write_bytes(b"x")
        (folder / "link").symlink_to(target)

    saves.save_sync(write, 4)
    with pytest.raises(SaveError, match=r"global_step_4/link of a save function is a link"):
        commit(job.save(4), [], [*read_statuses(job.spool, job.save(4))])


@pytest.mark.parametrize(
    "name", ["manifest.json", "corrupted.json", "manifest-0123456789abcdef.json"]
)
def test_files_of_functions_are_committed_or_refused_by_name(
    coordinator_of: Open, job: Job, name: str
) -> None:
    saves, folder = coordinator_of(), job.root / "global_step_4"
    names = {"compaction.tmp", ".hidden.tmp", ".x.0.1.tmp", ".nfs0001", f"below/{name}"}

    def write(*more: str) -> None:
        (folder / "below").mkdir(parents=True, exist_ok=True)
        for each in (*names, *more):
            (folder / each).write_text(each)

    saves.save_sync(partial(write, name), 4)
    with pytest.raises(SaveError, match=f"lists .*/{name}, a name that trinity_sync uses itself"):
        commit(job.save(4), [], [*read_statuses(job.spool, job.save(4))])
    (folder / name).unlink(missing_ok=True)  # the commit has removed a mark
    for status in read_statuses(job.spool, job.save(4)):
        write_status(job.spool, replace(status, state="failed"))
    saves.save_async("again", write, 4)
    saves.wait_all(250)
    statuses = read_statuses(job.spool, job.save(4))
    commit(job.save(4), [], [each for each in statuses if each.name == "again"])
    assert {each.path for each in require_committed(job.root, 4).files} == names


def test_a_function_that_writes_into_a_shard_of_the_steps_sync_fails_the_save(
    saves: Saves, job: Job
) -> None:
    saves.begin()
    job.stage(4, {"model": {"w": torch.ones(3)}}, kind="state_dict")

    def write(late: Callable[[], object] = lambda: None) -> list[FunctionStatus]:
        saves.save_sync(late, 4)
        return [*read_statuses(job.spool, job.save(4))]

    harmless = write(partial(job.commit, 4, kind="state_dict"))
    assert harmless[0].files == (MODEL,)
    damaging = write(lambda: write_model(job.root, 4))
    with pytest.raises(SaveError, match=rf"has changed .*{Path(MODEL).name}, which run 1"):
        commit(job.save(4), [], damaging)


def test_a_file_of_a_function_that_cannot_be_opened_for_a_moment_fails_nothing_for_good(
    saves: Saves, job: Job
) -> None:
    saves.save_sync(partial(write_model, job.root, 4), 4)
    with no_opens_of(job.root / "global_step_4" / MODEL), pytest.raises(BlockingIOError):
        await_save_functions(job.spool, job.save(4), at_least=1)
    (status,) = await_save_functions(job.spool, job.save(4), at_least=1)
    assert (status.state, status.files) == ("finished", (MODEL,))


def test_what_a_function_wrote_and_could_not_be_synced_is_in_no_commit_of_a_retry(
    coordinator_of: Open, job: Job
) -> None:
    saves, path = coordinator_of(trigger=CommitsHere()), job.root / "global_step_4/own.bin"
    path.parent.mkdir()

    def submit() -> None:
        saves.save_async("own", lambda: path.write_bytes(b"own"), 4)
        asyncio.run(saves.register_and_monitor(4, checkpoint_thread_count=1))

    with noted_syncs(failing="own.bin"):
        submit()
        with pytest.raises(
            SaveFailedError, match=r"own\.bin cannot be written: Input/output error"
        ):
            saves.wait_all(250)
        with pytest.raises(SaveError, match=r"own\.bin cannot be written: Input/output error"):
            await_save_functions(job.spool, job.save(4), at_least=1)
    path.unlink()
    with noted_syncs() as durable:
        submit()
        saves.wait_all(250)
        assert path.stat().st_ino in durable
    require_committed(job.root, 4)
