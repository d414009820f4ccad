"""Copies in a store that speaks S3, and in a folder: whole or not committed, whatever dies."""

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
import torch
from fsspec.core import url_to_fs
from s3fs import S3FileSystem

from tests.support.disk import flip_a_byte, noted_syncs
from tests.support.dying import end_of
from tests.support.forked import Program
from tests.support.job import Job
from tests.support.steps import commit_files
from tests.unit.conftest import SECRET
from trinity_sync.client.init_root import set_job_settings
from trinity_sync.errors import CommitError, ConfigError, RemoteError, SupersededError
from trinity_sync.fs.locks import try_acquire_file_lock
from trinity_sync.layout import KINDS, MANIFEST, step_folder
from trinity_sync.pipeline.save import replicate_step
from trinity_sync.remote import download
from trinity_sync.remote import prune as prune_of_remote
from trinity_sync.remote.download import fetch
from trinity_sync.remote.prune import RemoteSteps, prune_remote
from trinity_sync.remote.remote_root import UPLOADED, Remote
from trinity_sync.remote.required import replicate_missing
from trinity_sync.remote.upload import replicate, sending_lock
from trinity_sync.retention.policies import ALL, parse_policy
from trinity_sync.retention.removal import Rules, carry_out, describe_steps, plan_removals
from trinity_sync.snapshot.identity import open_identity
from trinity_sync.storage.discovery import find_newest, iter_committed_steps, read_latest_pointer
from trinity_sync.storage.manifest import Manifest, encode_manifest, read_manifest
from trinity_sync.storage.replace import fetching_folder
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.steps_in_use import list_leases, pin, tag
from trinity_sync.storage.verify import check_files, choose_files


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/job"


@pytest.fixture(params=["s3", "file"])
def any_url(request: pytest.FixtureRequest, url: str) -> str:
    return url if request.param == "file" else f"s3://{request.getfixturevalue('bucket')}/job"


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5000,), value)}


@pytest.fixture
def commit(job: Job) -> Callable[..., Job]:
    def commit(step: int, *, run: int = 1, value: float | None = None) -> Job:
        """Commit a step, of run 2 in the place of run 1's after a start that loads nothing."""
        for key in ("first", "second") if run == 2 else ():
            open_run(job.root, key, 0)
        states = {"model": state(step if value is None else value), "optim": state(0)}
        job.stage(step, states, run=run)
        job.commit(step, "model", "optim", run=run)
        return job

    return commit


def file_of(step: int, component: str = "model") -> str:
    return f"actor/{component}_world_size_1_rank_0.pt"


def test_a_copy_is_the_step_file_by_file_and_back_again(
    commit: Callable[..., Job], any_url: str, tmp_path: Path
) -> None:
    job = commit(4)
    done = replicate(job.root, any_url, 4)
    assert (done.uploaded, done.nbytes) == (2, read_manifest(job.root, 4).nbytes)
    (there,) = Remote(any_url).list_steps()
    assert (there.manifest, there.state) == (read_manifest(job.root, 4), "valid")
    assert set(Remote(any_url).list_file_sizes(4)) == {file_of(4), file_of(4, "optim"), MANIFEST}
    assert list_leases(job.root) == []

    back = tmp_path / "another machine"
    assert fetch(any_url, None, back)[1]
    assert find_newest(back) == read_manifest(job.root, 4)
    assert torch.equal(load_states(back, 4, "actor")["model"]["w"], state(4)["w"])
    assert read_latest_pointer(back, "checkpoint") == read_latest_pointer(back, "state_dict") == 4
    assert not fetch(any_url, 4, back)[1]


@pytest.mark.parametrize("ends", ["killed", "Input/output error"])
def test_a_pull_commits_no_file_that_one_before_it_did_not_sync(
    commit: Callable[..., Job],
    url: str,
    tmp_path: Path,
    ends: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicate(commit(4).root, url, 4)
    back, before, sync = tmp_path / "back", set[int](), os.fsync

    def die(fd: int) -> None:
        is_shard = "_world_size_" in Path(f"/proc/self/fd/{fd}").resolve().name
        signal.raise_signal(signal.SIGKILL) if is_shard else sync(fd)

    if ends == "killed":
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", die)
            assert end_of(lambda: fetch(url, 4, back, parallel=1)) == -signal.SIGKILL
    else:
        with noted_syncs(failing="model_world") as before, pytest.raises(OSError, match=ends):
            fetch(url, 4, back)
    with noted_syncs() as durable:
        fetch(url, 4, back)
    files = [path for path in (back / "global_step_4/actor").iterdir() if path.is_file()]
    assert {path.name for path in files} == {Path(file_of(4, c)).name for c in ("model", "optim")}
    assert {path.stat().st_ino for path in files} <= durable | before


def test_a_pull_that_died_after_its_commit_has_its_pointers_after_the_next(
    commit: Callable[..., Job], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicate(commit(4).root, url, 4)
    back = tmp_path / "back"
    with monkeypatch.context() as patch:
        patch.setattr(download, "update_latest_pointers", lambda *_: 1 / 0)  # it dies there
        with pytest.raises(ZeroDivisionError):
            fetch(url, 4, back)
    assert find_newest(back) == read_manifest(back, 4)
    assert read_latest_pointer(back, "checkpoint") is None
    assert not fetch(url, 4, back)[1]
    assert [read_latest_pointer(back, kind) for kind in KINDS] == [4, 4]


def test_reading_and_copying_tell_of_every_byte(
    commit: Callable[..., Job], url: str, tmp_path: Path
) -> None:
    root, told = commit(1).root, list[tuple[int, int]]()

    def tell(done: int, whole: int) -> None:
        told.append((done, whole))

    nbytes = read_manifest(root, 1).nbytes
    for work, whole in (
        (lambda: check_files(choose_files(root, step=1), on_progress=tell), nbytes),
        (lambda: replicate(root, url, 1, on_progress=tell), nbytes),
        (lambda: replicate(root, url, 1, on_progress=tell), 0),  # it is there
        (lambda: fetch(url, 1, tmp_path / "back", on_progress=tell), nbytes),
    ):
        told.clear()
        work()
        assert (sum(done for done, _ in told), {each for _, each in told}) == (
            whole,
            {whole} if whole else set(),
        )


def test_equal_files_of_a_step_are_sent_and_fetched_once(
    job: Job, any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.world_size = 3
    for rank in range(3):
        job.stage(4, {"model": state(min(rank, 1))}, rank=rank)
    manifest = job.commit(4)
    done = replicate(job.root, any_url, 4)
    assert (done.uploaded, done.nbytes) == (3, sum(each.nbytes for each in manifest.files[:2]))
    assert [each.state for each in Remote(any_url).list_steps()] == ["valid"]

    reads, read = list[str](), Remote.read_chunks

    def note_read(remote: Remote, step: int, name: str) -> Iterator[bytes]:
        reads.append(name)
        return read(remote, step, name)

    monkeypatch.setattr(Remote, "read_chunks", note_read)
    fetch(any_url, 4, tmp_path / "back")
    assert sorted(reads) == [each.path for each in manifest.files[:2]]
    for rank in range(3):
        back = load_states(tmp_path / "back", 4, "actor", rank=rank, world_size=3)
        assert torch.equal(back["model"]["w"], state(min(rank, 1))["w"])


def replicate_frozen(job: Job, url: str, step: int) -> int:
    """Copy a step whose model is that of all others; return the bytes that were not sent."""
    job.stage(step, {"model": {"w": torch.arange(300_000.0)}, "optim": state(step)})
    nbytes = job.commit(step, "model", "optim").nbytes
    return nbytes - replicate(job.root, url, step).nbytes


def require_equal(url: str, manifest: Manifest) -> None:
    for record in manifest.files:
        assert Remote(url).find_mismatch(manifest.step, record, lambda _: None) == ""


def test_a_file_that_has_not_changed_since_the_step_before_is_copied_by_the_remote(
    job: Job, any_url: str
) -> None:
    assert replicate_frozen(job, any_url, 1) == 0
    assert replicate_frozen(job, any_url, 2) > 1_200_000
    Remote(any_url).remove_step(1)
    require_equal(any_url, read_manifest(job.root, 2))
    assert replicate_frozen(job, any_url, 3) > 1_200_000
    Remote(any_url).remove_step(3)  # the next one finds it in no remote
    assert replicate_frozen(job, any_url, 4) == 0


def test_a_file_that_is_corrupted_in_the_remote_is_sent_again(job: Job, url: str) -> None:
    replicate_frozen(job, url, 1)
    flip_a_byte(Remote(url).folder / "global_step_1" / file_of(1), 100_000)
    assert replicate_frozen(job, url, 2) == 0
    require_equal(url, read_manifest(job.root, 2))


def test_a_file_that_is_truncated_in_the_remote_is_sent_again(job: Job, any_url: str) -> None:
    replicate_frozen(job, any_url, 1)
    Remote(any_url).write_file(1, file_of(1), b"short")
    assert replicate_frozen(job, any_url, 2) == 0
    require_equal(any_url, read_manifest(job.root, 2))


def test_a_file_that_differs_now_is_not_written_into_the_one_that_it_equaled(
    job: Job, any_url: str
) -> None:
    job.world_size = 2
    for run, values in enumerate([(1, 1), (1, 2)], 1):
        open_run(job.root, f"run {run}", 0)
        for rank, value in enumerate(values):
            job.stage(4, {"model": state(value)}, rank=rank, run=run)
        manifest = job.commit(4, run=run)
        replicate(job.root, any_url, 4)
        require_equal(any_url, manifest)


KILLED = """
import os, signal, sys
from trinity_sync.remote.remote_root import Remote
from trinity_sync.remote.upload import replicate
note = Remote.record_upload
def note_and_die(self, step, record):
    note(self, step, record)
    os.kill(os.getpid(), signal.SIGKILL)
Remote.record_upload = note_and_die
replicate(sys.argv[1], sys.argv[2], 4, parallel=1)
"""


def kill_after_the_first_file(job: Job, url: str) -> None:
    Program(KILLED, job.root, url).end(-signal.SIGKILL)


@pytest.mark.parametrize("altered", [False, True], ids=["goes on", "sends what has changed since"])
def test_a_killed_upload_is_not_committed_and_resumes(
    commit: Callable[..., Job], any_url: str, altered: bool
) -> None:
    job, remote = commit(4), Remote(any_url)
    kill_after_the_first_file(job, any_url)
    assert [(step.step, step.state) for step in remote.list_steps()] == [(4, "not committed")]
    if altered:
        remote.write_file(4, file_of(4), bytes(remote.list_file_sizes(4)[file_of(4)]))
    assert replicate(job.root, any_url, 4).uploaded == 1 + altered
    assert remote.read_step(4).state == "valid"
    assert not any(UPLOADED in name for name in remote.list_file_sizes(4))


def test_the_copy_of_a_step_brings_those_that_the_jobs_remote_lacks(
    commit: Callable[..., Job], tmp_path: Path, url: str
) -> None:
    for step in (1, 2, 3):
        job = commit(step)
    set_job_settings(job.root, {"remote": url})
    replicate_step(str(job.root), 2, f"file://{tmp_path}/other")
    replicate_step(str(job.root), 3, url)
    assert [each.step for each in Remote(f"file://{tmp_path}/other").list_steps()] == [2]
    assert [each.step for each in Remote(url).list_steps()] == [1, 2, 3]
    Remote(url).remove_step(1)  # as its policy or a user does
    assert replicate_missing(job.root, url) == []


@pytest.mark.parametrize("by", ["a push", "the next save"])
def test_a_second_upload_of_a_step_waits_for_the_first_and_writes_no_file_again(
    commit: Callable[..., Job], url: str, by: str
) -> None:
    job = commit(4)
    set_job_settings(job.root, {"remote": url, "remote_required": True})
    seconds: list[Future[object]] = []

    def second() -> object:
        if by == "the next save":
            return replicate_missing(job.root, url)
        return replicate(job.root, url, 4).uploaded

    def hold(_sent: int, _total: int) -> None:
        if not seconds:
            seconds.append(threads.submit(second))
        wait(seconds, 1.0)  # it would have sent all by then
        assert Remote(url).read_manifest(4) is None, "a file is sent next to the manifest"

    with ThreadPoolExecutor(2) as threads:
        first = replicate(job.root, url, 4, parallel=1, on_progress=hold)
        written = {path: path.stat().st_ino for path in Path(url[7:]).rglob("*.pt")}
        assert (first.uploaded, len(written)) == (2, 2)
        assert seconds[0].result(60) == (0 if by == "a push" else [4])
    assert {path: path.stat().st_ino for path in written} == written


@pytest.mark.parametrize("killed", [False, True], ids=["at once", "after a kill"])
def test_a_step_that_a_later_run_committed_again_replaces_the_old_copy(
    commit: Callable[..., Job], any_url: str, tmp_path: Path, killed: bool
) -> None:
    job = commit(4)
    replicate(job.root, any_url, 4)
    commit(4, run=2, value=-4)
    if killed:  # it is not committed meanwhile
        kill_after_the_first_file(job, any_url)
        assert Remote(any_url).read_step(4).state == "not committed"
    assert replicate(job.root, any_url, 4).uploaded == 1  # the optimizer's file is the same
    assert Remote(any_url).read_step(4).manifest == read_manifest(job.root, 4)
    fetch(any_url, 4, tmp_path / "back")
    again = load_states(tmp_path / "back", 4, "actor")["model"]["w"]
    assert torch.equal(again, state(-4)["w"])
    assert open_run(tmp_path / "back", "resumed", 4).number == 3


def test_a_copy_has_no_file_that_an_earlier_commit_of_the_step_had(
    job: Job, any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks, attachments, an export: what reads a folder takes files by their names."""
    back = tmp_path / "back"
    for run, components in ((1, ("model", "optim")), (2, ("model",))):
        open_run(job.root, str(run), 0)
        job.stage(4, dict.fromkeys(components, state(run)), run=run)
        manifest = job.commit(4, *components, run=run)
        replicate(job.root, any_url, 4)
        if run == 1:
            with monkeypatch.context() as patch:
                patch.setattr(download, "sync_folders", lambda *_: 1 / 0)  # it dies there
                with pytest.raises(ZeroDivisionError):
                    fetch(any_url, 4, back)
    assert {*Remote(any_url).list_file_sizes(4)} == {file_of(4), MANIFEST}
    fetch(any_url, 4, back)
    found = {each.relative_to(back).as_posix() for each in back.glob("global_step_4/actor/*")}
    assert found == {f"global_step_4/{each.path}" for each in manifest.files}


@pytest.mark.parametrize("before", ["nothing", "fewer files"])
def test_of_two_processes_that_copy_other_steps_of_one_number_the_second_is_refused(
    commit: Callable[..., Job], any_url: str, before: str
) -> None:
    job, remote = commit(4), Remote(any_url)
    mine = read_manifest(job.root, 4)
    theirs = encode_manifest(replace(mine, run=7))
    if before == "fewer files":
        replicate(job.root, any_url, 4)
        remote.write_file(4, MANIFEST, encode_manifest(replace(mine, files=mine.files[:1])))
    with pytest.raises(RemoteError, match="was committed by another process meanwhile"):
        replicate(
            job.root, any_url, 4, on_progress=lambda *_: remote.write_file(4, MANIFEST, theirs)
        )
    assert remote.read_file(4, MANIFEST) == theirs


def test_what_is_corrupted_or_not_committed_here_is_not_copied(
    commit: Callable[..., Job], url: str
) -> None:
    job = commit(4)
    path = job.root / "global_step_4" / file_of(4)
    flip_a_byte(path, path.stat().st_size // 2)
    with pytest.raises(CommitError, match="is corrupted"):
        replicate(job.root, url, 4)
    assert Remote(url).read_step(4).state == "not committed"
    with pytest.raises(CommitError, match="is not committed"):
        replicate(job.root, url, 5)
    assert not Remote(url).list_file_sizes(5)


@contextmanager
def copied_by_an_earlier_run(commit: Callable[..., Job], url: str) -> Iterator[Path]:
    """A root with another step 4 than its copy, which the block leaves as it is."""
    job = commit(4)
    replicate(job.root, url, 4)
    good = Remote(url).read_step(4)
    commit(4, run=2, value=-4)
    yield job.root
    assert Remote(url).read_step(4) == good
    assert not Remote(url).find_mismatch(4, good.manifest.find_file(file_of(4)), lambda _: None)


def test_what_is_corrupted_here_takes_the_place_of_no_copy(
    commit: Callable[..., Job], any_url: str
) -> None:
    with copied_by_an_earlier_run(commit, any_url) as root:
        path = root / "global_step_4" / file_of(4)
        flip_a_byte(path, path.stat().st_size // 2)
        with pytest.raises(CommitError, match="is corrupted"):
            replicate(root, any_url, 4)


def test_a_copy_whose_manifest_a_store_does_not_find_at_once_is_not_written_over(
    commit: Callable[..., Job], any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with copied_by_an_earlier_run(commit, any_url) as root, monkeypatch.context() as patch:
        patch.setattr(Remote, "read_file", lambda *_: None)  # as a cache of the store answers
        with pytest.raises(RemoteError, match="retry"):
            replicate(root, any_url, 4)
    assert replicate(root, any_url, 4).uploaded == 1


def test_copies_are_removed_also_where_the_root_cannot_be_written(
    job: Job, url: str, read_only: Callable[[Path], object]
) -> None:
    for step in (1, 2):
        commit_files(job.root, step)
        replicate(job.root, url, step)
    for lock in job.root.glob(".trinity_sync/sending-*.lock"):
        lock.unlink()
    read_only(job.root)
    done = prune_remote(job.root, url, Rules(parse_policy("last=1"), ALL))
    assert [each.step for each in Remote(url).list_steps() if each.manifest] == [2], done


def test_no_age_removes_a_copy_once_a_step_was_committed_in_the_future(job: Job, url: str) -> None:
    for step in (1, 2):
        commit_files(job.root, step, at=time.time() + (step - 1.5) * 1e6)
        replicate(job.root, url, step)
    newer = Rules(parse_policy("newer=1d,last=1"), ALL)
    assert prune_remote(job.root, url, newer).removed == ()


@pytest.mark.parametrize("protocol", ["s3", "memory", "file"])
@pytest.mark.parametrize("name", ["run[1]", "run*"])
def test_a_removed_copy_is_that_of_the_very_url_whatever_other_paths_it_matches(
    protocol: str,
    name: str,
    commit: Callable[..., Job],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    where = request.getfixturevalue("bucket") if protocol == "s3" else f"{tmp_path}".lstrip("/")
    url = f"{protocol}://{'/' if protocol == 'file' else ''}{where}/"
    job = commit(4)
    replicate(job.root, f"{url}run1", 4)
    remote = Remote(f"{url}{name}")
    replicate(job.root, remote.url, 4)
    remote.remove_upload_records(4)
    remote.remove_step(4)
    assert (remote.list_steps(), remote.list_file_sizes(4)) == ([], {})
    assert [each.state for each in Remote(f"{url}run1").list_steps()] == ["valid"]


def test_what_a_killed_upload_or_removal_has_left_is_removed_once_it_is_of_no_save_in_flight(
    commit: Callable[..., Job], any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, last = Remote(any_url), Rules(parse_policy("last=1"), ALL)
    for step in (1, 2, 3, 4):
        job = commit(step)
        replicate(job.root, any_url, step)
    for step in (1, 2, 3):
        remote.remove_manifest(step)
    for step in (1, 2):  # as the root's retention does
        shutil.rmtree(step_folder(job.root, step))

    def prune() -> list[int]:
        prune_remote(job.root, any_url, last)
        return [step.step for step in remote.list_steps()]

    assert prune() == [1, 2, 3, 4]  # they may be uploaded now
    monkeypatch.setattr(prune_of_remote, "IN_FLIGHT_S", 0.0)
    with try_acquire_file_lock(sending_lock(job.root, any_url)):
        assert prune() == [1, 2, 3, 4]
    assert prune() == [3, 4]
    remote.remove_leftovers(4, 0.0)  # as if it was committed since the list
    assert remote.read_step(4).state == "valid"
    assert replicate(job.root, any_url, 3).uploaded == 2


def test_a_copy_whose_removal_fails_does_not_count_any_longer_and_keeps_no_other(
    commit: Callable[..., Job], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(remote: Remote, folder: str) -> None:
        if folder.rstrip("/").endswith("global_step_4"):
            raise OSError(errno.EIO, "it is held")
        remove(remote, folder)

    remove = Remote._remove_folder
    for step in (4, 5, 6):
        replicate(commit(step).root, url, step)
    monkeypatch.setattr(Remote, "_remove_folder", fail)
    with pytest.raises(RemoteError, match=r"cannot remove step 4 .* it is held"):
        prune_remote(commit(7).root, url, Rules(parse_policy("last=1"), ALL))
    assert [each.state for each in Remote(url).list_steps()] == ["not committed", "valid"]
    assert len(Remote(url).list_file_sizes(4)) > 0


def test_copies_of_pinned_tagged_and_newest_steps_stay_and_the_one_just_made(
    commit: Callable[..., Job], url: str
) -> None:
    for step in (1, 2, 3, 4):
        job = commit(step)
        replicate(job.root, url, step)
    pin(job.root, 1, "the paper")
    tag(job.root, 2, "best")
    last = parse_policy("last=1")
    assert not prune_remote(job.root, url, Rules(last, last), just_copied=3).removed
    plan = prune_remote(job.root, url, Rules(last, last))
    assert [each.step for each in plan.removed] == [3]
    assert [step.step for step in Remote(url).list_steps()] == [1, 2, 4]
    kept = {each.step: why for each, _, why in plan.describe()}
    assert (kept[1], kept[2], kept[3]) == ("pinned: the paper", "tagged best", "")


def test_a_copy_that_is_pinned_after_the_plan_stays_and_all_do_without_a_valid_newest_copy(
    commit: Callable[..., Job], url: str
) -> None:
    for step in (1, 2, 3):
        job = commit(step)
        replicate(job.root, url, step)
    place = RemoteSteps(job.root, remote := Remote(url))
    plan = plan_removals(
        describe_steps(place), Rules(parse_policy("last=1"), parse_policy("last=1")), 0
    )
    assert [each.step for each in plan.removed] == [1, 2]
    pin(job.root, 1)
    manifest = remote.read_file(3, MANIFEST)
    remote.remove_manifest(3)
    spared = {each.step: why for each, why in carry_out(place, plan).spared}
    assert spared == {1: "pinned", 2: "the newer step 3 is not valid: it is gone"}
    remote.write_file(3, MANIFEST, manifest)
    assert [each.step for each in carry_out(place, plan).removed] == [2]
    assert [step.step for step in remote.list_steps()] == [1, 3]


def test_a_corrupted_copy_is_not_committed_and_sent_again_once_its_file_is_removed(
    commit: Callable[..., Job], any_url: str, tmp_path: Path
) -> None:
    job = commit(4)
    replicate(job.root, any_url, 4)
    remote = Remote(any_url)
    remote.write_file(4, file_of(4), other := bytes(remote.list_file_sizes(4)[file_of(4)]))
    words = rf"remove that file there and .* trinity-sync remote push ROOT 4 {any_url}"
    with pytest.raises(RemoteError, match=words) as corrupted:
        fetch(any_url, 4, tmp_path / "back")
    assert find_newest(tmp_path / "back") is None
    store, path = url_to_fs(str(corrupted.value).partition(" ")[0])
    store.rm_file(path)
    assert replicate(job.root, any_url, 4).uploaded == 1
    # nor is a file that an earlier pull has left, if it has changed since
    (step_folder(fetching_folder(tmp_path / "back"), 4) / file_of(4)).write_bytes(other)
    assert fetch(any_url, 4, tmp_path / "back")[0] == find_newest(tmp_path / "back")
    assert torch.equal(load_states(tmp_path / "back", 4, "actor")["model"]["w"], state(4)["w"])


def test_a_copy_never_takes_the_place_of_another_step_nor_that_of_an_earlier_run(
    commit: Callable[..., Job], url: str
) -> None:
    job = commit(4)
    replicate(job.root, url, 4)
    shutil.rmtree(job.root / "global_step_4")
    commit(4, value=9)
    before = read_manifest(job.root, 4)
    with pytest.raises(CommitError, match="Move it away"):
        fetch(url, 4, job.root)
    assert read_manifest(job.root, 4) == before
    commit(4, run=2, value=-4)
    mine = read_manifest(job.root, 4)
    with pytest.raises(CommitError, match="is not the step of the remote"):
        fetch(url, 4, job.root, replace=True)
    assert read_manifest(job.root, 4) == mine


def test_a_bucket_that_refuses_writes_or_is_missing_is_a_sentence(
    commit: Callable[..., Job], s3: boto3.client, bucket: str
) -> None:
    deny = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": ["s3:PutObject"],
        "Resource": f"arn:aws:s3:::{bucket}/*",
    }
    policy = {"Version": "2012-10-17", "Statement": [deny]}
    s3.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
    job = commit(4)
    with pytest.raises(RemoteError, match=r"cannot write .* to s3://") as refused:
        replicate(job.root, f"s3://{bucket}/job", 4)
    assert SECRET not in str(refused.value)
    assert list_leases(job.root) == []
    with pytest.raises(RemoteError, match="bucket does not exist"):
        replicate(job.root, "s3://no-such-bucket/job", 4)
    for no_url in ("bucket/job", "s3://", "nonsense://x/y"):
        with pytest.raises(ConfigError):
            Remote(no_url)


@pytest.fixture
def other(job: Job, tmp_path: Path, spool_folder: Path) -> Iterator[Job]:
    """The job that begins in the root of the first one, which was moved away."""
    job.root = job.root.rename(tmp_path / "moved")
    with closing(Job.open(tmp_path / "ckpts", spool_folder)) as other:
        yield other


def test_credentials_that_are_renewed_in_their_file_count_for_the_next_attempt(
    commit: Callable[..., Job],
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    job, file = commit(4), tmp_path / "credentials"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    S3FileSystem.clear_instance_cache()
    with pytest.raises(RemoteError, match="credentials"):
        replicate(job.root, f"s3://{bucket}/job", 4)
    file.write_text("[default]\naws_access_key_id = key\naws_secret_access_key = secret\n")
    assert replicate(job.root, f"s3://{bucket}/job", 4).uploaded == 2


def test_a_local_folder_may_have_two_slashes_in_its_url(
    commit: Callable[..., Job], tmp_path: Path
) -> None:
    replicate(commit(4).root, f"file://{tmp_path}//copies", 4)
    assert (tmp_path / "copies" / "global_step_4" / file_of(4)).is_file()


@pytest.mark.parametrize("where", ["ckpts", "link", "ckpts/copies/job"])
def test_the_root_is_no_remote_of_its_own_steps(commit: Callable[..., Job], where: str) -> None:
    root = commit(4).root
    commit(5)
    (root.parent / "link").symlink_to(root)
    url = f"file://{root.parent}/{where.replace('ckpts', root.name)}"
    for refused in (
        lambda: replicate(root, url, 5),
        lambda: prune_remote(root, url, Rules(parse_policy("last=1"), ALL)),
        lambda: set_job_settings(root, {"remote": url}),
    ):
        with pytest.raises(ConfigError, match="is in the root"):
            refused()
    assert {each.step for each in iter_committed_steps(root)} == {4, 5}


def test_a_recreated_root_neither_adds_to_the_remote_of_the_old_one_nor_removes_its_steps(
    commit: Callable[..., Job], any_url: str, request: pytest.FixtureRequest
) -> None:
    replicate(commit(20).root, any_url, 20)
    new = request.getfixturevalue("other")
    new.commit_states(10, {"model": state(1)})
    with pytest.raises(ConfigError, match=r"another job, whose root is .*remote=URL.*remote pull"):
        replicate(new.root, any_url, 10)
    with pytest.raises(ConfigError, match="another job"):
        prune_remote(new.root, any_url, Rules(parse_policy("last=1"), ALL))
    with pytest.raises(ConfigError, match="another job"):
        fetch(any_url, 20, new.root)
    assert [step.step for step in Remote(any_url).list_steps()] == [20]


def test_a_copy_of_a_root_that_trains_on_needs_a_remote_of_its_own(
    commit: Callable[..., Job], url: str, tmp_path: Path
) -> None:
    job = commit(20)
    replicate(job.root, url, 20)
    copy = tmp_path / "copy"
    shutil.copytree(job.root, copy)
    open_identity(copy)  # as its coordinator does
    with pytest.raises(ConfigError, match="is a copy"):
        replicate(copy, url, 20)
    replicate(copy, f"{url}-2", 20)
    replicate(job.root, url, 20)


def test_of_two_roots_of_one_job_that_both_train_the_second_is_refused(
    commit: Callable[..., Job], any_url: str, request: pytest.FixtureRequest
) -> None:
    job = commit(20)
    open_run(job.root, "first", 0)
    replicate(job.root, any_url, 20)
    copy = request.getfixturevalue("other").root  # on a cluster that does not see the first root
    shutil.rmtree(copy)
    shutil.copytree(job.root, copy)
    for root, key in ((copy, "of the copy"), (job.root, "second")):
        open_run(root, key, 20)
        commit_files(root, 30, run=2)
        commit_files(root, 50, run=2)
    replicate(copy, any_url, 30)
    for step in (30, 50):
        with pytest.raises(ConfigError, match=r"run 2 at .* of another root.* remote=URL"):
            replicate(job.root, any_url, step)
    open_run(job.root, "third", 30)
    commit_files(job.root, 40, run=3)
    with pytest.raises(ConfigError, match=r"run 2 at .* of another root"):
        replicate(job.root, any_url, 40)
    replicate(copy, any_url, 50)
    there = [step.manifest for step in Remote(any_url).list_steps()]
    assert there == [read_manifest(copy, step) for step in (20, 30, 50)]


def test_a_step_of_a_later_run_is_not_replaced_by_that_of_an_earlier_one(
    commit: Callable[..., Job], url: str, tmp_path: Path
) -> None:
    job = commit(20)
    shutil.copytree(job.root / "global_step_20", tmp_path / "of run 1")
    commit(20, run=2, value=-1)
    replicate(job.root, url, 20)
    there = Remote(url).read_step(20)
    shutil.rmtree(job.root / "global_step_20")
    (tmp_path / "of run 1").rename(job.root / "global_step_20")
    with pytest.raises(SupersededError, match="has the step of run 2"):
        replicate(job.root, url, 20)
    assert Remote(url).read_step(20) == there
