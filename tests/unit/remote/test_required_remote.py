"""Steps that count once they are in a store: sent, found again elsewhere, and by one training."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from s3fs import S3FileSystem

from tests.support.command import invoke
from tests.support.job import Job, Noted
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import (
    CommitError,
    ConfigError,
    RemoteError,
    SaveFailedError,
    SupersededError,
)
from trinity_sync.fs.records import encode_record
from trinity_sync.layout import step_folder
from trinity_sync.remote.download import fetch
from trinity_sync.remote.prune import NOT_OURS, prune_remote
from trinity_sync.remote.remote_root import Remote
from trinity_sync.remote.required import replicate_and_record, replicate_missing
from trinity_sync.remote.upload import replicate
from trinity_sync.retention.policies import ALL, parse_policy
from trinity_sync.retention.prune import NOT_REPLICATED, plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.saves.journal import append
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import IDENTITY_FILE, JobIdentity, read_identity
from trinity_sync.stack.doctor_job import check_root
from trinity_sync.storage.commit import commit, free_committed_slots
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.job_settings import (
    is_replicated,
    read_job_settings,
    write_job_settings,
)
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import find_newest_run, open_run, record_left_out
from trinity_sync.storage.steps_in_use import pin

SHARD = "actor/model_world_size_1_rank_0.pt"


@dataclass
class Machine:
    """A root and a memory of its own, and a training there; the store is all they share.

    Its root is under a path that other machines do not have, so the remote names another one.
    """

    folder: Path
    spool: Path
    url: str
    closing: ExitStack

    def open(self, **options: Any) -> CheckpointCoordinator:
        settings = Settings(spool=self.spool, home=self.folder)
        root = self.folder / "ckpts"
        saves = CheckpointCoordinator(root, settings=settings, trigger=Noted(), **options)
        self.closing.callback(saves.close, timeout=0)
        return saves

    def start(self, key: str, *, load: bool = True) -> CheckpointCoordinator:
        saves = self.open(run_key=key, job={"remote": self.url, "remote_required": True})
        remote = Remote(self.url)
        mine = JobIdentity(read_identity(saves.root), f"/away{saves.root}")
        remote._fs.pipe_file(f"{remote._base}/{IDENTITY_FILE}", encode_record(mine).encode())
        if load and (step := saves.latest_step()) is not None:
            saves.load(step)
        return saves

    def train(self, key: str, *steps: int) -> CheckpointCoordinator:
        saves = self.start(key)
        for step in steps:
            self.commit(saves, step)
        return saves

    def commit(self, saves: CheckpointCoordinator, step: int, *, sent: bool = True) -> None:
        """What the flow of a save does."""
        saves.save(step, {"model": state(step)})
        job = Job(saves.root, saves.spool)
        run = find_newest_run(saves.root)
        written = job.persist(step, run=run.number)
        save = job.save(step, run=run.number)
        commit(save, written)
        free_committed_slots(saves.spool, save, written)
        if sent:
            replicate_and_record(saves.root, self.url, step)


Make = Callable[..., Machine]


@pytest.fixture
def machine(tmp_path: Path, spool_folder: Path) -> Iterator[Make]:
    with ExitStack() as closing:

        def make(name: str, url: str = f"file://{tmp_path}/store/job") -> Machine:
            (tmp_path / name).mkdir()
            return Machine(tmp_path / name, spool_folder / name, url, closing)

        yield make


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5000,), float(step))}


LAST = Rules(parse_policy("last=1"), ALL)


def prune_to_last(root: Path) -> tuple[list[int], list[str]]:
    """Remove all steps of a root but the last; return which were removed, why others were kept."""
    made = plan_prune(root, LAST, time.time())
    return [each.step for each in prune(root, made).removed], [why for _, why in made.kept]


def test_a_new_machine_resumes_from_the_newest_step_in_the_remote(
    machine: Make, bucket: str
) -> None:
    url = f"s3://{bucket}/job"
    first = machine("first", url)
    first.train("one", 1, 2)
    second = machine("second", url)
    resumed = second.start("two", load=False)
    assert resumed.latest_step() == 2
    assert torch.equal(resumed.load(2)["model"]["w"], state(2)["w"])
    second.commit(resumed, 3)
    assert [step.manifest.run for step in Remote(first.url).list_steps() if step.manifest] == [
        1,
        1,
        2,
    ]


def test_a_new_machine_never_fetches_a_step_that_was_superseded(machine: Make) -> None:
    first = machine("first")
    first.train("one", 10, 20, 30)
    back = first.start("two", load=False)
    back.load(10)
    first.commit(back, 15)
    remote = Remote(first.url)
    os.truncate(step_folder(remote.folder, 15) / "actor/model_world_size_1_rank_0.pt", 10)
    assert machine("second").start("three", load=False).latest_step() == 10


def test_a_training_of_its_own_does_not_begin_with_the_required_remote_of_another(
    machine: Make,
) -> None:
    one, two = machine("one"), machine("two")
    one.commit(one.start("first"), 1)
    with two.open() as own:
        assert own.begin() == 1
    with pytest.raises(ConfigError, match=f"another job, whose root is /away{one.folder}"):
        two.start("second")
    assert [step.step for step in Remote(one.url).list_steps()] == [1]


def test_a_new_root_does_not_continue_a_job_whose_root_is_still_here(machine: Make) -> None:
    one, two = machine("one"), machine("two")
    required = {"remote": one.url, "remote_required": True}
    with one.open(job=required) as saves:
        one.commit(saves, 1)
        identity = read_identity(saves.root)
    with pytest.raises(ConfigError, match=f"another job, whose root is {saves.root};"):
        two.open(job=required)
    assert read_identity(two.folder / "ckpts") != identity
    assert [step.step for step in Remote(one.url).list_steps()] == [1]
    shutil.rmtree(saves.root)
    with two.open(job=required) as again:
        assert (again.latest_step(), read_identity(again.root)) == (1, identity)


def test_a_root_that_has_the_newest_or_a_newer_one_fetches_nothing(machine: Make) -> None:
    one = machine("one")
    one.commit(one.train("first", 1), 2, sent=False)
    assert one.start("second", load=False).latest_step() == 2
    assert [step.step for step in Remote(one.url).list_steps()] == [1]


def test_a_machine_that_returns_fetches_a_later_run_and_its_pinned_step_stays_in_quarantine(
    machine: Make,
) -> None:
    first, second = machine("first"), machine("second")
    old = first.train("one", 1)
    second.commit(second.start("two"), 2)
    first.commit(old, 2, sent=False)  # it had not heard of the other
    pin(old.root, 2, "paper, table 2")
    before = read_manifest(old.root, 2)
    back = first.start("three", load=False)
    replaced = back.root / ".trinity_sync/quarantine/pinned-of-run-1"
    assert read_manifest(replaced, 2) == before
    newest = find_newest(back.root)
    assert (newest.run, read_manifest(back.root, 2)) == (2, newest)
    assert not list((back.root / ".trinity_sync/fetching").iterdir())


def test_of_two_trainings_that_write_to_one_remote_the_superseded_one_is_refused(
    machine: Make,
) -> None:
    first, second, third = machine("first"), machine("second"), machine("third")
    old = first.train("one", 1)
    new, other = second.start("two"), third.start("three")
    second.commit(new, 2)
    with pytest.raises(SupersededError, match=r"run 2 at file://.* resumed from step 1"):
        first.commit(old, 2)
    with pytest.raises(SupersededError, match=r"run 2 at file://.* belongs to another training"):
        third.commit(other, 2)
    for saves in (old, other):  # as the user may try to send what was refused
        with pytest.raises(SupersededError):
            replicate(saves.root, first.url, 2)
    there = Remote(first.url).read_step(2)
    assert (there.state, there.manifest) == ("valid", read_manifest(new.root, 2))


def test_a_training_that_the_remote_has_refused_is_not_resumed_from_steps_of_its_own(
    machine: Make,
) -> None:
    first, second, third = machine("first"), machine("second"), machine("third")
    first.train("one", 1)
    new, other = second.start("two"), third.start("three")
    for step in (2, 3):
        third.commit(other, step, sent=False)
    other.close()
    refused = r"run 2 in .*third.* is another training than run 2 at"
    Remote(first.url).create_run(find_newest_run(new.root))  # as before the bytes of its first step
    with pytest.raises(CommitError, match=refused):
        third.start("again")
    second.commit(new, 2)
    with pytest.raises(CommitError, match=refused):
        third.start("again")
    second.train("two again", 3)
    assert third.start("later").latest_step() == 3
    assert find_newest(third.folder / "ckpts").run == 3


def test_a_step_that_was_pulled_from_the_required_remote_is_known_to_be_there(
    machine: Make,
) -> None:
    first, second = machine("first"), machine("second")
    first.train("one", 1, 2)
    fetch(first.url, 2, second.folder / "ckpts")
    saves = second.train("two", 3)
    assert replicate(saves.root, first.url, 2).uploaded == 0
    replicate_missing(saves.root, first.url)
    assert is_replicated(saves.root, read_manifest(saves.root, 2))


def test_a_run_whose_record_has_changed_since_its_first_step_is_the_same_training(
    machine: Make,
) -> None:
    here = machine("here")
    saves = here.train("one", 1)
    run = find_newest_run(saves.root)
    record_left_out(saves.root, run, ["actor"], ["actor/optim"])  # as another load of the run does
    here.commit(saves, 2)
    assert Remote(here.url).read_step(2).state == "valid"


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_of_two_concurrent_commits_of_a_step_one_succeeds(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    s3 = kind == "s3"
    where = f"s3://{request.getfixturevalue('bucket')}" if s3 else f"file://{tmp_path}"
    remote = Remote(f"{where}/job")
    assert remote.create_file(4, "manifest.json", b"mine")
    assert not remote.create_file(4, "manifest.json", b"theirs")
    assert remote.read_file(4, "manifest.json") == b"mine"
    assert remote.supports_exclusive_create()


@contextmanager
def plain_store(status: int, code: str) -> Iterator[str]:
    """The address of an S3 store that answers a conditional write with an error of its own."""
    objects: dict[str, bytes] = {}

    class Store(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.command != "HEAD" else b"")

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            refused = status == 501 or self.path in objects
            if "If-None-Match" in self.headers and refused:
                self.answer(status, f"<Error><Code>{code}</Code></Error>".encode())
                return
            objects[self.path] = content
            self.answer(200)

        def do_GET(self) -> None:
            found = objects.get(self.path)
            self.answer(200 if found else 404, found or b"<Error><Code>NoSuchKey</Code></Error>")

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "code"), [(412, "PreconditionFailed"), (501, "NotImplemented")])
def test_a_store_that_refuses_a_conditional_write_in_its_own_way_keeps_the_first_file(
    status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain_store(status, code) as address:
        for name, value in (("ENDPOINT_URL", address), ("ACCESS_KEY_ID", "a")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        S3FileSystem.clear_instance_cache()
        remote = Remote("s3://bucket/job")
        assert remote.create_file(4, "manifest.json", b"mine")
        assert not remote.create_file(4, "manifest.json", b"theirs")
        assert remote.read_file(4, "manifest.json") == b"mine"
    S3FileSystem.clear_instance_cache()


def test_an_exclusively_created_file_is_complete_or_absent_on_a_full_disk(small_disk: Path) -> None:
    remote, content = Remote(f"file://{small_disk}/job"), bytes(3 << 20)
    remote.write_file(3, "in the way", content)
    with pytest.raises(RemoteError, match="No space left"):
        remote.create_file(4, "manifest.json", content)
    assert remote.read_file(4, "manifest.json") is None
    (small_disk / "job/global_step_3/in the way").unlink()
    assert remote.create_file(4, "manifest.json", content)


def test_a_corrupted_copy_is_skipped_for_the_step_before(
    machine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine("first")
    first.train("one", 1, 2)
    whole = Remote(first.url).read_file(2, SHARD)
    Remote(first.url).write_file(2, SHARD, bytes(len(whole)))
    assert machine("second").start("two").latest_step() == 1
    assert "using the step before" in caplog.text
    (Remote(first.url).folder / "global_step_2" / SHARD).unlink()  # as by a rule of the bucket
    assert machine("third").start("two").latest_step() == 1
    assert f"leaving out step 2: see trinity-sync verify {first.url} 2" in caplog.text


def test_a_step_corrupted_here_is_fetched_again(machine: Make) -> None:
    one = machine("one")
    (step_folder(one.train("first", 1).root, 1) / SHARD).write_bytes(b"cut")
    assert one.start("second").latest_step() == 1


def test_waiting_for_a_save_waits_for_the_remote_and_raises_its_error(machine: Make) -> None:
    one = machine("one")
    saves = one.train("first", 1)
    saves.wait_all(250)
    one.commit(saves, 2, sent=False)
    assert len(saves.commit_seconds) == 1
    append(Job(saves.root, saves.spool).request(2), "failed", "the store is full")
    with pytest.raises(
        SaveFailedError, match=r"brought to file://.*in the root only: the store is full"
    ):
        saves.wait_all(250)
    one.commit(saves, 3)
    saves.wait_all(250)


def test_a_step_that_was_not_replicated_is_kept_and_sent_after_the_next_save(machine: Make) -> None:
    one = machine("one")
    saves = one.start("first")
    for step in (1, 2):
        one.commit(saves, step, sent=False)
    one.commit(saves, 3)
    removed, why = prune_to_last(saves.root)
    assert (removed, why[:2]) == ([], [NOT_REPLICATED] * 2)
    assert replicate_missing(saves.root, one.url) == [1, 2]
    assert prune_to_last(saves.root)[0] == [1, 2]
    assert [step.state for step in Remote(one.url).list_steps()] == ["valid"] * 3


def test_nothing_counts_as_sent_to_a_remote_whose_mount_is_away(
    machine: Make, tmp_path: Path
) -> None:
    one, store, away = machine("one"), tmp_path / "store", tmp_path / "away"
    saves = one.train("first", 1, 2)
    store.rename(away)
    store.mkdir()  # the place of the mount, on another disk
    for _ in range(2):
        with pytest.raises(RemoteError, match=r"lacks \.trinity_sync/identity\.json now: mount"):
            one.open(run_key="second")
    one.commit(saves, 3, sent=False)
    with pytest.raises(RemoteError, match="mount"):
        replicate_missing(saves.root, one.url)
    with pytest.raises(RemoteError, match="mount"):
        prune_remote(saves.root, one.url, LAST)
    assert not [*store.iterdir()]
    assert prune_to_last(saves.root)[0] == [1, 2]
    one.commit(saves, 4, sent=False)
    removed, why = prune_to_last(saves.root)
    assert (removed, why[0]) == ([], NOT_REPLICATED)
    shutil.rmtree(store)
    away.rename(store)
    assert replicate_missing(saves.root, one.url) == [3, 4]
    shutil.rmtree(store)  # on purpose
    shutil.rmtree(saves.root / ".trinity_sync/stored")
    assert replicate_missing(saves.root, one.url) == [3, 4]
    replicate_and_record(saves.root, f"{one.url}-2", 4)  # which has had none


@pytest.mark.parametrize(
    "change",
    [lambda file: file.write_text("{"), lambda file: file.chmod(0o666)],
    ids=["torn", "of-others"],
)
def test_while_the_required_remote_is_unknown_no_checkpoint_is_removed_and_none_rewound(
    machine: Make, change: Callable[[Path], object]
) -> None:
    one = machine("one")
    saves = one.start("first")
    for step in (1, 2, 3):
        one.commit(saves, step, sent=False)
    change(saves.root / ".trinity_sync/job.json")
    removed, why = prune_to_last(saves.root)
    assert (removed, why[0]) == ([], NOT_REPLICATED)
    with pytest.raises(ConfigError, match=r"requires the remote \(unknown now\)"):
        rewind(saves.root, 1)
    write_job_settings(saves.root, {"keep": "last=1"})  # the settings are set again, without one
    assert prune_to_last(saves.root)[0] == [1, 2]


def test_a_step_that_a_later_run_has_committed_again_is_not_in_the_remote_yet(
    machine: Make,
) -> None:
    one = machine("one")
    one.train("first", 1, 2)
    again = one.start("second", load=False)
    again.load(1)
    one.commit(again, 2, sent=False)
    there = [is_replicated(again.root, read_manifest(again.root, step)) for step in (1, 2)]
    assert there == [True, False]
    assert replicate_missing(again.root, one.url) == [2]
    assert Remote(one.url).read_step(2).manifest.run == 2


def test_the_policy_of_a_remote_removes_neither_the_newest_nor_a_pinned_step(machine: Make) -> None:
    one = machine("one")
    saves = one.train("first", 1, 2, 3, 4)
    pin(saves.root, 2)
    assert prune_remote(saves.root, one.url, Rules(ALL, ALL)).describe() == []
    done = prune_remote(saves.root, one.url, LAST)
    assert [each.step for each in done.removed] == [1, 3]
    assert [step.step for step in Remote(one.url).list_steps()] == [2, 4]
    other = machine("other").start("second", load=False)
    done = prune_remote(other.root, one.url, LAST)
    assert (done.removed, done.kept[0][1]) == ((), NOT_OURS)  # it has not sent step 2


def test_a_root_keeps_its_required_remote_and_is_not_rewound(machine: Make) -> None:
    one = machine("one")
    one.train("first", 1, 2)
    again = one.open()
    assert read_job_settings(again.root).required_remote == one.url
    with pytest.raises(ConfigError, match=r"coordinator\.load\(1\)"):
        rewind(again.root, 1)


def test_a_torn_file_of_the_settings_is_named_and_training_goes_on(machine: Make) -> None:
    one = machine("one")
    saves = one.start("first")
    (saves.root / ".trinity_sync/job.json").write_text("{")
    found = {check.name: check for check in check_root(saves.root, saves.settings)}
    assert (found["settings"].state, "job.json is torn" in found["settings"].found) == (
        "fail",
        True,
    )
    one.commit(saves, 1, sent=False)
    saves.wait_all(250)
    with one.open() as again:
        assert again.latest_step() == 1


def test_a_training_does_not_begin_without_its_required_remote(
    tmp_path: Path, s3: boto3.client, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    job = {"remote": "s3://no-such-bucket/{job}", "remote_required": True}
    with pytest.raises(RemoteError, match=r"cannot write .* s3://no-such-bucket/.*ckpts-"):
        CheckpointCoordinator(tmp_path / "ckpts", job=job, settings=settings)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(RemoteError, match=r"127\.0\.0\.1:9"):
        CheckpointCoordinator(tmp_path / "ckpts", job=job, settings=settings)
    S3FileSystem.clear_instance_cache()


def test_a_job_gets_a_required_remote_with_its_next_start(machine: Make) -> None:
    one = machine("one")
    root = one.folder / "ckpts"
    with closing(Job.open(root, one.spool)) as job:
        open_run(root, "before", 0)
        job.commit_states(1, {"model": state(1)})
    manifest = read_manifest(root, 1)
    assert is_replicated(root, manifest)  # there is none
    saves = one.start("first")
    assert not is_replicated(root, manifest)
    one.commit(saves, 2)
    assert replicate_missing(root, one.url) == [1]


def test_steps_in_a_remote_are_listed_and_verified(machine: Make) -> None:
    one = machine("one")
    saves = one.train("first", 1)
    one.commit(saves, 2, sent=False)
    assert '"in_remote": true' in invoke("ls", saves.root, "-o", "json").output
    assert "in remote" in invoke("ls", saves.root).output
    found = {check.name: check for check in check_root(saves.root, saves.settings)}
    assert (found["remote"].state, "it lacks [2]" in found["remote"].found) == ("warn", True)
    assert "\tvalid" in invoke("verify", one.url).output
    content = Remote(one.url).read_file(1, SHARD)
    Remote(one.url).write_file(1, SHARD, bytes(len(content)))
    found = invoke("verify", one.url, "1")
    assert (found.exit_code, f"\tcorrupted\t{SHARD} has other bytes" in found.output) == (3, True)
    misspelled = invoke("verify", f"{one.url}s")
    assert (misspelled.exit_code, "no job has sent" in misspelled.stderr) == (2, True)
    Remote(one.url).remove_step(1)
    emptied = invoke("verify", one.url)
    assert (emptied.exit_code, "step latest is not committed" in emptied.stderr) == (1, True)
    shutil.rmtree(saves.root)
    assert "jobs set" in invoke("show", "s3://bucket/job", "1").output
