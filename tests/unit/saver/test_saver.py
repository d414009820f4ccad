"""Without a stack, a process of the client's environment commits what trainers save."""

import ast
import asyncio
import errno
import gc
import json
import logging
import math
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from benchmarks.path_calls import watch_path_calls
from tests.conftest import environment
from tests.support.answers import server
from tests.support.command import invoke
from tests.support.dying import end_of, refuse_calls
from tests.support.forked import Program
from tests.support.job import Job
from tests.support.meanwhile import hanging_when_opened
from tests.support.savers import (
    await_that,
    end_savers,
    is_announced,
    is_locked,
    savers_of,
    suspend_saver,
    train,
)
from tests.support.waiting import until
from tests.unit.saver.conftest import Make, Saves
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync import saver as saver_module
from trinity_sync.client import saver_control
from trinity_sync.client.saver_control import (
    LOG,
    SERVED,
    SaverControl,
    SaveTrigger,
    lock_path,
    name_saver,
    wake_path,
)
from trinity_sync.errors import SaveError, SaveFailedError
from trinity_sync.fs.locks import LockFile, acquire_commit_lock
from trinity_sync.fs.records import encode_record
from trinity_sync.layout import Kind
from trinity_sync.pipeline import save as pipeline
from trinity_sync.saver import Saver, WaitingSave
from trinity_sync.saves import save_status
from trinity_sync.saves.journal import read_entry
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.identity import IDENTITY_FILE, JobIdentity
from trinity_sync.snapshot.stager import Stager
from trinity_sync.storage.discovery import read_latest_pointer, require_committed
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.placement import NodeRanks
from trinity_sync.storage.restore import load_states

MOST_CALLED = 93
"""Functions of trinity_sync that a save of an unchanged structure calls on the training thread."""


def test_what_a_trainer_has_saved_before_it_was_killed_is_committed(
    tmp_path: Path, settings: Settings
) -> None:
    root, folder = tmp_path / "ckpts", tmp_path / "own"
    folder.mkdir()
    for name in ("tasks", "flows", "trinity_sync"):  # modules of the user
        (folder / f"{name}.py").write_text("raise RuntimeError")
    (folder / "trinity_sync.py").unlink()
    assert train(root, settings, folder) == ""
    assert train(root, settings, folder) == "2 2.0\n"
    await_that(lambda: read_latest_pointer(root, "checkpoint") == 4, "step 4 is committed")
    assert load_states(root, 4, "actor")["optim"] == {"step": 4}
    await_that(lambda: not savers_of(settings.spool), "it ends after its trainers")
    assert not is_locked(lock_path(settings.spool, name_saver()))
    assert not [*settings.spool.glob("*/*.ticket")]


def test_the_session_of_a_saver_yields_to_the_training(
    coordinator: Make, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_STACK__WORKER__NICE", "19")
    coordinator().save(1, {"model": {"w": torch.ones(3)}}).wait(250)
    (saver,) = savers_of(settings.spool)
    group = Path(f"/proc/{saver.pid}/autogroup")
    if group.exists() and (told := group.read_text()):  # otherwise that of its threads counts
        assert told.split()[-1] == "19"
        saver.terminate()  # its node ends: what is not committed soon may be lost
        await_that(lambda: group.read_text().split()[-1] == "0", "the usual priority")


def test_a_saver_opens_as_many_files_as_the_images_of_its_node_need(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job.open(tmp_path / "ckpts", settings.spool, world_size=24)
    for rank in range(24):
        job.stage(1, {"model": {"w": torch.ones(9)}}, rank=rank)
    (job.spool.folder / SERVED).write_text(f"alone {name_saver()}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few_files = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, hard))
    serve(settings.spool, tmp_path / "log", few_files, monkeypatch)
    assert "Too many open files" not in (tmp_path / "log").read_text()
    assert read_latest_pointer(job.root, "checkpoint") == 1
    job.close()


@pytest.mark.parametrize("log", ["long", "short", "long, and can only be appended to"])
def test_a_log_that_is_long_is_begun_again_where_that_is_allowed(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: str
) -> None:
    job.stage(1, {"model": {"w": torch.ones(9)}})
    (job.spool.folder / SERVED).write_text(f"alone {name_saver()}")
    (tmp_path / "log").write_text("a line\n" * (100 if log == "short" else 1 << 18))
    refused = ["ftruncate"] if "appended" in log else []
    confine = partial(refuse_calls, errno.EPERM, *refused)
    serve(settings.spool, tmp_path / "log", confine, monkeypatch)
    content = (tmp_path / "log").read_text()
    assert "save actor step 1" in content
    assert ("a line" in content) == (log != "long")
    assert read_latest_pointer(job.root, "checkpoint") == 1


def test_a_saver_whose_thread_lacks_memory_to_begin_ends(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lack(_: threading.Thread) -> None:
        raise MemoryError

    def confine() -> None:
        signal.alarm(60)
        monkeypatch.setattr(threading.Thread, "_bootstrap", lack)

    job.stage(1, {"model": {"w": torch.ones(9)}})
    (job.spool.folder / SERVED).write_text(f"alone {name_saver()}")
    serve(settings.spool, tmp_path / "log", confine, monkeypatch, code=1)
    assert "MemoryError" in (tmp_path / "log").read_text()


def serve(
    spool: Path,
    log: Path,
    confine: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    code: int = 0,
) -> None:
    """Run the program of a saver, confined, until it has committed what waits."""
    monkeypatch.setattr(saver_module, "LINGER_S", 0.1)
    monkeypatch.setattr(sys, "argv", ["saver", str(spool), name_saver()])

    def run() -> None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        sys.stderr = os.fdopen(2, "w")
        logging.root.handlers.clear()
        confine()
        saver_module.main()

    assert end_of(run) == code


CONFINED = """
import errno, sys
import torch
from tests.support.dying import refuse_calls
from trinity_sync import CheckpointCoordinator, Settings

refuse_calls(errno.EACCES, "getpriority", "madvise", "sched_setaffinity", "setpriority")
root, spool, home = sys.argv[1:]
with CheckpointCoordinator(root, settings=Settings(spool=spool, home=home, saver="auto")) as saves:
    for step in (1, 2):
        saves.save(step, {"model": {"w": torch.full((1 << 20,), float(step))}}).wait(250)
"""


def test_a_save_needs_no_call_by_which_it_yields_to_the_training(
    job: Job, settings: Settings
) -> None:
    assert Program(CONFINED, job.root, settings.spool, settings.home).end() == ""
    assert load_states(job.root, 2, "actor")["model"]["w"].unique() == 2


class Confused(Saver):
    """A saver that cannot begin a save."""

    def _save(self, save: WaitingSave) -> None:
        super()._save(replace(save, kills="many"))  # type: ignore[arg-type]


def test_a_save_that_cannot_be_begun_has_failed(job: Job) -> None:
    job.stage(1, {"model": {"w": torch.ones(9)}})
    (job.spool.folder / SERVED).write_text(f"alone {name_saver()}")
    saver = Confused(job.spool.folder.parent, StackSettings())
    saver._look()
    until(lambda: not saver._saves, "the save has ended")
    told = read_entry(job.request(1))
    assert told
    assert told.has_failed
    assert "multiply sequence" in told.message


PLAIN = """
import sys, torch
model = torch.nn.Linear(4, 4)
optim = torch.optim.AdamW(model.parameters())  # imports DTensor and torch._dynamo, as all do
before = set(sys.modules)
from trinity_sync import CheckpointCoordinator, Settings
root, spool, home = sys.argv[1:]
settings = Settings(spool=spool, home=home, saver="auto")
with CheckpointCoordinator(root, settings=settings) as saves:
    saves.save(1, {"model": model.state_dict(), "optim": optim.state_dict()}).wait(250)
new = set(sys.modules) - before
print(sorted({name.partition(".")[0] for name in new} - sys.stdlib_module_names))
print(sorted(name for name in new if name.startswith("torch.")))
"""


def test_a_plain_training_that_saves_imports_nothing_heavy_for_it(
    job: Job, settings: Settings
) -> None:
    command = [sys.executable, "-c", PLAIN, job.root, settings.spool, settings.home]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=250)
    packages, of_torch = map(ast.literal_eval, done.stdout.splitlines())
    assert set(packages) <= {
        *("trinity_sync", "torch", "msgspec", "psutil", "xxhash"),
        *("pydantic", "pydantic_core", "pydantic_settings", "annotated_types"),
        *("dotenv", "typing_inspection", "certifi", "zstandard"),
    }
    assert of_torch == ["torch.utils.serialization", "torch.utils.serialization.config"]


def test_a_trainer_that_saves_again_later_finds_the_same_saver(
    saves: Saves, settings: Settings
) -> None:
    trigger = saves._watcher._trigger
    for step in (1, 2):
        saves.save(step, {"model": {"w": torch.ones(3)}}).wait(250)
        await_that(lambda: not trigger.has_unsent, "the trainer holds the saver's pipe")
        assert trigger._saver._pipe >= 0
    (saver,) = savers_of(settings.spool)
    libraries = {Path(each.path).name for each in saver.memory_maps()}
    assert not any(name.startswith("libtorch") for name in libraries)
    assert saver.memory_info().rss < 100e6


@pytest.mark.parametrize("how", ["prewarmed", "resumed"])
def test_the_first_save_of_a_training_that_is_prewarmed_finds_its_saver(
    coordinator: Make, settings: Settings, how: str
) -> None:
    saves, state = coordinator(), {"model": {"w": torch.ones(3)}}
    if how == "resumed":
        saves.save(1, state).wait(250)
        saves.close()
        end_savers(settings.spool)
        (saves := coordinator()).load(1)
    else:
        saves.prewarm({"model": 9})
    control = saves._watcher._trigger._saver
    await_that(lambda: control.is_reached, "the trainer holds the saver's pipe")
    before = savers_of(settings.spool)
    saves.save(2, state).wait(250)
    assert len(before) == 1
    assert savers_of(settings.spool) == before
    other = coordinator(rank=1, world_size=2)
    other.prewarm({"model": 9})
    assert not other._watcher._trigger.has_unsent
    assert other._watcher._thread is None


@pytest.mark.parametrize(
    ("order", "overlap", "waits"),
    [
        (["_fill", "_start", "_seal"], False, False),
        (["_fill", "_start", "_seal"], True, False),
        (["_start", "_fill", "_seal"], False, True),  # the copy may wait for a slot
    ],
)
def test_the_saver_starts_after_the_copy_of_the_first_save_and_before_its_seal(
    saves: Saves,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    order: list[str],
    overlap: bool,
    waits: bool,
) -> None:
    if waits:
        job.stage(1, {"model": {"w": torch.zeros(3)}})  # by a run that was killed
    done: list[str] = []

    def note(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def call(*given: Any, **options: Any) -> Any:
            done.append(name)
            return work(*given, **options)

        monkeypatch.setattr(owner, name, call)

    note(Stager, "_fill")
    note(SaverControl, "_start")
    note(Stager, "_seal")
    saves.save(2, {"model": {"w": torch.ones(3)}}, overlap=overlap)
    saves.wait_staged()
    assert [*dict.fromkeys(done)] == order


def test_savers_of_two_containers_may_have_the_same_process_id(tmp_path: Path) -> None:
    with ExitStack() as held:
        for name in ("one", "other"):
            path = tmp_path / f"saver-{name}.lock"
            path.write_text("7")
            lock = held.enter_context(closing(LockFile(path, os.O_RDWR)))
            assert lock.try_acquire()
        assert saver_control.list_savers(tmp_path) == {"one": 7, "other": 7}
    assert saver_control.list_savers(tmp_path) == {}


def test_a_saver_that_hangs_is_named_with_what_to_type(
    saves: Saves, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves.save(1, {"model": {"w": torch.ones(3)}}).wait(250)
    env = settings.to_variables() | {"PREFECT_API_URL": ""}
    runs = invoke("status", env=env)
    assert (runs.exit_code, "unresponsive" in runs.output) == (0, False)
    hangs = suspend_saver(settings.spool)
    monkeypatch.setattr(saver_control, "SILENT_S", 0.2)
    found = invoke("status", env=env)
    assert (found.exit_code, f"kill -9 {hangs.pid}" in found.output) == (3, True)
    hangs.kill()
    hangs.wait(250)
    saves.save(2, {"model": {"w": torch.ones(3)}}).wait(250)


def test_a_save_of_an_unchanged_structure_calls_little_and_asks_nothing_of_the_root(
    coordinator: Make, job: Job
) -> None:
    saves, states = coordinator(), {"model": {"w": torch.ones(3)}}
    for step in (1, 2):
        saves.save(step, states).wait(250)
        await_that(lambda: not job.spool.tickets()[0], "the saver has released its slot")
    package, this = str(Path(saver_module.__file__).parent), threading.get_ident()
    called, asked = set[CodeType](), list[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            called.add(frame.f_code)

    def tell(_: str, path: str) -> None:
        if threading.get_ident() == this:
            asked.append(path)

    with watch_path_calls(tell, job.root):
        sys.setprofile(note)
        try:
            saves.save(3, states)
        finally:
            sys.setprofile(None)
    assert asked == []
    assert len(called) <= MOST_CALLED, sorted(each.co_qualname for each in called)
    saves.wait_all(250)


@pytest.mark.parametrize("backed_up", [0, 1], ids=["before the run", "after a step of it"])
def test_a_root_that_was_restored_under_its_trainer_gets_none_of_its_steps(
    coordinator: Make, job: Job, tmp_path: Path, backed_up: int
) -> None:
    saves = coordinator(job={"rank_timeout_s": 3600.0})  # for which nothing waits
    for step in range(backed_up + 2):
        if step:
            saves.save(step, {"model": {"w": torch.ones(3)}}).wait(250)
        if step == backed_up:
            shutil.copytree(job.root, tmp_path / "backup")
    until(lambda: job.spool.read_commit(job.key_of(1)) == step, "the end of the commit")
    job.root.rename(tmp_path / "lost")
    shutil.copytree(tmp_path / "backup", job.root)
    saves.save(step + 1, {"model": {"w": torch.ones(3)}})
    with pytest.raises(SaveFailedError, match=r"restored from a backup.* start it again"):
        saves.wait_all(250)
    saves.close()
    again = coordinator(run_key="again")
    assert (again.latest_step() or 0) == backed_up
    if backed_up:
        again.load(backed_up)
    again.save(step, {"model": {"w": torch.zeros(3)}}).wait(250)
    assert load_states(job.root, step, "actor")["model"]["w"].tolist() == [0, 0, 0]


def test_steps_that_are_removed_by_hand_do_not_make_a_root_an_older_one(
    saves: Saves, job: Job
) -> None:
    for step in (1, 2):
        saves.save(step, {"model": {"w": torch.ones(3)}}).wait(250)
        shutil.rmtree(job.root / f"global_step_{step}")
    saves.save(3, {"model": {"w": torch.ones(3)}}).wait(250)


def test_a_saver_commits_after_the_signals_that_a_scheduler_sends_to_all_processes(
    saves: Saves, settings: Settings, job: Job
) -> None:
    with acquire_commit_lock(job.root):
        saves.save(1, {"model": {"w": torch.ones(3)}})
        (saver,) = savers_of(settings.spool)  # it may not have run a line yet
        for signum in ("HUP", "INT", "TERM", "USR1", "USR2"):
            saver.send_signal(signal.Signals[f"SIG{signum}"])
    saves.wait_all(250)
    assert savers_of(settings.spool) == [saver]


def test_a_start_resumes_from_what_a_trainer_left_whose_saver_was_killed(
    tmp_path: Path, settings: Settings
) -> None:
    root = tmp_path / "ckpts"
    root.mkdir()
    with acquire_commit_lock(root):
        assert train(root, settings, tmp_path) == ""
        for saver in savers_of(settings.spool):
            saver.kill()
            saver.wait(250)
    assert train(root, settings, tmp_path) == "2 2.0\n"


def test_a_start_says_which_saves_it_no_longer_waits_for(
    coordinator: Make, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with acquire_commit_lock(job.root):
        first = coordinator()
        first.save(3, {"model": {"w": torch.ones(3)}})
        assert coordinator().latest_step(settle_s=0.1) is None
        assert "(steps 3) are still not committed after 0.1 s" in caplog.text
        assert first.latest_step() is None  # its run has begun
        assert caplog.text.count("not committed") == 1


def test_a_start_waits_for_save_functions_of_a_trainer_that_has_ended(
    coordinator: Make, settings: Settings, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    command = ["wait", str(job.root), "--timeout"]
    with acquire_commit_lock(job.root):
        ended = coordinator()
        ended.save_async("other", (job.root / "global_step_3").mkdir, 3)
        asyncio.run(ended.register_and_monitor(3, checkpoint_thread_count=1))
        ended.close(timeout=0)
        assert coordinator().latest_step(settle_s=0.1) is None
        assert "(steps 3) are still not committed after 0.1 s" in caplog.text
        with environment(settings.to_variables()):
            late = invoke(*command, "0.1")
        assert (late.exit_code, "step 3 " in late.stderr) == (1, True)
    with environment(settings.to_variables()):
        assert invoke(*command, "60").exit_code == 0
    assert coordinator().latest_step() == 3


@pytest.fixture(params=["1", "unknown"])
def exit_code(request: pytest.FixtureRequest) -> Iterator[str]:
    """What a trainer learns of a child; nothing if the kernel reaps all of its children."""
    handler = signal.SIG_IGN if request.param == "unknown" else signal.SIG_DFL
    before = signal.signal(signal.SIGCHLD, handler)
    yield request.param
    signal.signal(signal.SIGCHLD, before)


def test_a_saver_that_cannot_be_started_fails_the_save_by_name(
    saves: Saves, monkeypatch: pytest.MonkeyPatch, exit_code: str
) -> None:
    with monkeypatch.context() as patch:
        for python, why in (
            ("/nowhere/python", "the saver cannot be started"),
            ("", r"sys\.executable names no Python"),  # embedded
            (None, r"sys\.executable names no Python"),
        ):
            patch.setattr(sys, "executable", python)
            with pytest.raises(SaveError, match=why):
                saves.save(1, {"model": {"w": torch.ones(3)}})
        patch.setattr(sys, "executable", "/bin/false")
        saves.save(2, {"model": {"w": torch.ones(3)}})
        with pytest.raises(SaveFailedError, match=rf"code {exit_code}: .* Its log is .*{LOG}"):
            saves.wait_all(250)
    saves.save(2, {"model": {"w": torch.ones(3)}}).wait(250)


def test_settings_that_no_saver_can_start_with_fail_the_save_with_their_reason(
    coordinator: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job
) -> None:
    config = tmp_path / "trinity_sync.toml"
    config.write_text("[worker]\nnice = 99\n")
    monkeypatch.setenv("TRINITY_SYNC_CONFIG", str(config))
    monkeypatch.delenv("TRINITY_SYNC_STACK__WORKER__NICE")
    saves = coordinator()
    saves.save(1, {"model": {"w": torch.ones(3)}})
    with pytest.raises(SaveFailedError, match=r"exit code 1: .*nice = 99 in \[worker\]"):
        saves.wait_all(250)
    config.write_text("")
    saves.save(1, {"model": {"w": torch.ones(3)}}).wait(250)
    assert read_latest_pointer(job.root, "checkpoint") == 1


def test_a_saver_of_another_release_than_its_trainer_is_told_instead_of_waited_for(
    settings: Settings,
) -> None:
    other = f"{name_saver()[:-8]}{0:08}"  # of other formats
    with pytest.raises(SaveError, match=r"exit code 1: .* another release .* in PYTHONPATH"):
        await_that(SaverControl(settings.spool, settings.home, name=other).connect, "it ends")


def test_a_saver_has_the_files_and_folders_that_its_trainer_names_by_relative_paths(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf.toml").touch()
    monkeypatch.chdir(settings.spool.parent)
    monkeypatch.setenv("TRINITY_SYNC_CONFIG", os.path.relpath(tmp_path / "conf.toml"))
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", settings.spool.name)
    monkeypatch.setenv("TRINITY_SYNC_HOME", os.path.relpath(settings.home))
    with CheckpointCoordinator(tmp_path / "ckpts", settings=Settings(saver="auto")) as saves:
        monkeypatch.chdir(tmp_path)
        saves.save(1, {"model": {"w": torch.ones(3)}}).wait(250)
    assert len(savers_of(settings.spool)) == 1
    assert (settings.home / LOG).exists()


def test_files_have_the_modes_of_their_trainers_umask_whoever_started_the_first_saver(
    settings: Settings, tmp_path: Path, no_umask: None
) -> None:
    with ExitStack() as open_ones:
        for umask in (0o022, 0o077):
            os.umask(umask)
            root = tmp_path / f"{umask:03o}"
            saves = CheckpointCoordinator(root, settings=settings)
            open_ones.enter_context(saves)
            saves.save(1, {"model": {"w": torch.ones(3)}}).wait(250)
    for root, folders, files in (("022", 0o755, 0o644), ("077", 0o700, 0o600)):
        step = tmp_path / root / "global_step_1"
        paths = [step, *step.rglob("*"), tmp_path / root / "latest_checkpointed_iteration.txt"]
        modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in paths}
        assert modes == {(True, folders), (False, files)}


def test_what_follows_a_commit_is_resumed_after_the_end_of_its_saver(
    coordinator: Make, settings: Settings, job: Job, tmp_path: Path
) -> None:
    remote = tmp_path / "remote"
    saves = coordinator(job={"remote": remote.as_uri(), "remote_required": True})
    runs = remote / ".trinity_sync/runs"
    runs.mkdir(exist_ok=True)
    os.mkfifo(runs / "1.json")  # the upload waits for a writer
    saves.save(1, {"model": {"w": torch.ones(3)}})
    await_that((job.root / "global_step_1/manifest.json").exists, "it is committed in the root")
    (saver,) = savers_of(settings.spool)
    saver.kill()
    saver.wait(250)
    (runs / "1.json").unlink()
    saves.wait_all(250)
    assert (remote / "global_step_1/manifest.json").exists()
    await_that(lambda: not [*job.spool.folder.glob("*.begun.json")], "the saver ends it")


@pytest.mark.parametrize("by_function", [False, True])
def test_a_step_that_the_remote_has_refused_is_sent_when_it_is_submitted_again(
    coordinator: Make, tmp_path: Path, by_function: bool
) -> None:
    remote = tmp_path / "remote"
    saves = coordinator(job={"remote": remote.as_uri(), "remote_required": True})
    (remote / IDENTITY_FILE).write_text(encode_record(JobIdentity("another", "/elsewhere")))
    if by_function:
        saves.save_async("other", lambda: None, 1)

    def submit() -> None:
        if by_function:
            asyncio.run(saves.register_and_monitor(1, checkpoint_thread_count=1))
        else:
            saves.save(1, {"model": {"w": torch.ones(3)}})
        saves.wait_all(250)

    with pytest.raises(SaveFailedError, match=r"in the root only: .* steps of another job"):
        submit()
    (remote / IDENTITY_FILE).unlink()
    submit()
    assert (remote / "global_step_1/manifest.json").exists()


def test_two_savers_of_a_spool_are_one_also_if_a_user_removes_it(settings: Settings) -> None:
    command = [sys.executable, "-m", "trinity_sync.saver", str(settings.spool)]
    keeps = [subprocess.Popen(command) for _ in range(2)]
    await_that(wake_path(settings.spool, name_saver()).exists, "one of them serves")
    pipe = os.open(wake_path(settings.spool, name_saver()), os.O_WRONLY)
    await_that(lambda: [each.poll() for each in keeps].count(0) == 1, "the other one has ended")
    shutil.rmtree(settings.spool)
    SaverControl(settings.spool, settings.home).connect()  # of the next training
    await_that(lambda: [each.poll() for each in keeps] == [0, 0], "the first leaves it the spool")
    assert len(savers_of(settings.spool)) == 1
    os.close(pipe)


def list_begun(job: Job) -> list[Path]:
    return [*job.spool.folder.glob("*.begun.json")]


def list_committed(root: Path) -> list[int]:
    return sorted(int(path.parent.name[12:]) for path in root.glob("global_step_*/manifest.json"))


def test_a_remote_that_is_away_stops_no_removal_and_gets_the_steps_that_it_lacks(
    coordinator: Make, settings: Settings, job: Job, tmp_path: Path
) -> None:
    away, remote = tmp_path / "mount", tmp_path / "mount/remote"
    away.write_text("not mounted")
    saves = coordinator(job={"remote": remote.as_uri()})
    for step in range(1, 6):
        saves.save(step, {"model": {"w": torch.ones(3)}}, keep=2).wait(250)
    await_that(lambda: list_committed(job.root) == [4, 5], "older steps are removed")
    log = (settings.home / LOG).read_text()
    assert "The next save will retry, for the steps that are here then" in log
    away.unlink()
    saves.save(6, {"model": {"w": torch.ones(3)}}, keep=2)
    await_that(lambda: list_committed(remote)[-2:] == [5, 6], "the remote has what was kept")
    await_that(lambda: list_committed(job.root) == [5, 6], "older steps are removed")


def test_a_remote_that_hangs_holds_one_thread_and_its_own_step(
    coordinator: Make, settings: Settings, job: Job, tmp_path: Path
) -> None:
    remote = tmp_path / "remote"
    runs = remote / ".trinity_sync/runs"
    runs.mkdir(parents=True)
    os.mkfifo(runs / "1.json")  # the upload waits for a writer
    saves = coordinator(job={"remote": remote.as_uri()})
    for step in range(1, 7):
        saves.save(step, {"model": {"w": torch.ones(3)}}, keep=2).wait(250)
        await_that(lambda: len(list_begun(job)) == 1, "one save waits for the remote")
    *sending, before, last = list_committed(job.root)
    assert (len(sending), before, last) == (1, 5, 6)
    (saver,) = savers_of(settings.spool)
    assert saver.num_threads() < 6
    with (runs / "1.json").open("w"):  # it answers
        (runs / "1.json").unlink()
    await_that(lambda: not list_begun(job), "the save ends")
    saves.save(7, {"model": {"w": torch.ones(3)}}, keep=2)
    await_that(lambda: list_committed(remote)[-2:] == [6, 7], "the remote has what was kept")


@pytest.mark.parametrize("value", [1.0, 0.0])
def test_weights_that_are_submitted_after_their_checkpoint_has_committed_are_told_of(
    saves: Saves, job: Job, value: float
) -> None:
    saves.save(1, {"model": {"w": torch.ones(3)}, "optim": {"a": 1}}).wait(250)
    with nullcontext() if value == 1.0 else pytest.raises(SaveFailedError, match="other content"):
        saves.save(1, {"model": {"w": torch.full((3,), value)}}, kind="state_dict").wait(250)
    assert load_states(job.root, 1, "actor")["model"]["w"].tolist() == [1, 1, 1]


def test_a_save_by_functions_is_begun_at_the_first_look(job: Job, settings: Settings) -> None:
    of_stack = settings.model_copy(update={"saver": "stack"})
    with CheckpointCoordinator(job.root, settings=of_stack) as saves:
        saves.save_sync(lambda: None, 3)  # it has ended by then
        asyncio.run(saves.register_and_monitor(3, checkpoint_thread_count=1))
        (job.spool.folder / SERVED).write_text(f"0 {name_saver()}")
        assert Saver(settings.spool, StackSettings())._look()
        saves.wait_all(250)
    assert read_latest_pointer(job.root, "checkpoint") == 3
    assert len(require_committed(job.root, 3).callables) == 1


def test_the_saver_commits_no_step_that_lacks_a_save_function(coordinator: Make) -> None:
    saves = coordinator(job={"rank_timeout_s": 0.1})
    saves.save_sync(lambda: None, 3)
    asyncio.run(saves.register_and_monitor(3, checkpoint_thread_count=2))
    with pytest.raises(SaveFailedError, match="2 save functions were registered and 1 started"):
        saves.wait_all(250)


def test_a_save_by_functions_whose_request_has_vanished_has_failed(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SaverControl, "wake", lambda _: None)  # a saver that has not looked yet
    monkeypatch.setattr(SaverControl, "connect", lambda _: None)
    with CheckpointCoordinator(job.root, settings=settings) as saves:
        saves.save_async("other", lambda: None, 3)
        asyncio.run(saves.register_and_monitor(3, checkpoint_thread_count=1))
        # at once: a thread of the trainer writes there
        shutil.rmtree(job.spool.folder.rename(f"{job.spool.folder.parent}-removed"))
        with pytest.raises(SaveFailedError, match=r"step 3 .* was removed before the saver"):
            saves.wait_all(250)


def test_a_damaged_file_of_one_job_does_not_end_the_saver_of_all(
    tmp_path: Path, settings: Settings
) -> None:
    with ExitStack() as opened:
        one, other = (
            opened.enter_context(CheckpointCoordinator(tmp_path / name, settings=settings))
            for name in ("one", "other")
        )
        for step, content in enumerate((b"30 seconds\n", b"\xff\xfe", b""), 1):
            (other.spool.folder / SERVED).write_bytes(content)
            one.save(step, {"model": {"w": torch.ones(3)}}).wait(250)
        other.save(1, {"model": {"w": torch.ones(3)}}).wait(250)  # which writes it again


def test_a_failure_is_told_although_shared_memory_is_full(
    job: Job, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SaveError("a value is NaN")

    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pipeline, "await_node_shards", fail)
    monkeypatch.setattr(save_status, "remove_request", is_full)
    request = job.request(1)
    saver = Saver(settings.spool, StackSettings(worker={"nice": 0}))
    saver._saves[request.key] = threading.current_thread()
    saver._save(WaitingSave(request))
    ended = read_entry(request)
    assert (ended.state, ended.message) == ("failed", "a value is NaN")


def test_a_file_at_the_place_of_the_pipe_is_replaced(coordinator: Make, settings: Settings) -> None:
    wake_path(settings.spool, name_saver()).touch()
    coordinator().save(1, {"model": {"w": torch.ones(3)}}).wait(250)


def test_a_saver_does_not_wait_for_what_has_vanished(job: Job, settings: Settings) -> None:
    job.stage(3, {"model": {"w": torch.ones(3)}})
    # a stack may begin it until then
    (job.spool.folder / SERVED).write_text(f"1000 {name_saver()}")
    saver = Saver(settings.spool, StackSettings())
    assert saver._look()
    shutil.rmtree(job.spool.folder)
    assert not saver._look()


@pytest.mark.parametrize("when", ["saver dies", "saver dies in the save"])
def test_a_save_after_the_end_of_its_saver_outlives_the_trainer(
    tmp_path: Path, settings: Settings, when: str
) -> None:
    train(tmp_path / "ckpts", settings, tmp_path, when)
    await_that(
        lambda: read_latest_pointer(tmp_path / "ckpts", "checkpoint") == 2, "step 2 is committed"
    )


AT_EXIT = """
import atexit, sys, torch
from trinity_sync import CheckpointCoordinator, Settings

root, spool, home = sys.argv[1:]
saves = CheckpointCoordinator(root, settings=Settings(spool=spool, home=home, saver="auto"))
torch.set_num_threads(2)  # of which one would be started

@atexit.register
def save_the_last():
    saves.save(1, {"model": {"w": torch.ones(4 << 20)}}).wait(250)
    saves.close()
"""


def test_a_save_at_the_exit_of_a_trainer_commits_although_no_thread_can_be_started(
    tmp_path: Path, settings: Settings
) -> None:
    command = [sys.executable, "-c", AT_EXIT, tmp_path / "ckpts", settings.spool, settings.home]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert not done.stderr
    assert read_latest_pointer(tmp_path / "ckpts", "checkpoint") == 1


def test_a_coordinator_that_is_dropped_while_its_saver_lives_warns_of_nothing(
    settings: Settings,
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        control = SaverControl(settings.spool, settings.home)
        control.connect()
        del control
        gc.collect()
    assert [saver.is_running() for saver in savers_of(settings.spool)] == [True]
    assert [str(each.message) for each in told] == []


def test_a_trainer_that_comes_as_the_saver_ends_keeps_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "LINGER_S", 0)
    control, left = SaverControl(settings.spool, settings.home), []

    class Late(Saver):
        def _pause(self, pipe: int) -> bool:
            left.append(super()._pause(pipe))
            if len(left) == 1:
                self._idle_until = 0
                control.wake()
            else:
                control.close()
            return left[-1]

    Late(settings.spool, StackSettings()).run()
    assert left[:2] == [False, True]
    assert savers_of(settings.spool) == []
    control.wake()
    await_that(lambda: savers_of(settings.spool), "the next one is started")


def test_a_saver_whose_root_does_not_answer_stays(
    coordinator: Make, job: Job, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    monkeypatch.setattr(saver_module, "START_S", 0.1)  # below ANSWER_S
    monkeypatch.setattr(saver_module, "LINGER_S", 0)
    of_stack = settings.model_copy(update={"saver": "stack"})
    saves = CheckpointCoordinator(job.root, settings=of_stack)
    saves.save(1, {"model": {"w": torch.ones(3)}})
    saves.close(timeout=0)
    (job.spool.folder / SERVED).write_text(f"0 {name_saver()}")
    looked = threading.Event()

    class Observed(Saver):
        def _pause(self, pipe: int) -> bool:
            looked.set()
            return super()._pause(pipe)

    thread = threading.Thread(target=Observed(settings.spool, StackSettings()).run, daemon=True)
    with hanging_when_opened(job.root / IDENTITY_FILE):
        thread.start()
        assert looked.wait(250)
        thread.join(1)
        assert thread.is_alive()
    thread.join()
    assert read_latest_pointer(job.root, "checkpoint") == 1


def test_roles_may_save_other_components_than_the_first_one(coordinator: Make, job: Job) -> None:
    saves = coordinator(roles=("actor", "critic"))
    for step in (1, 2):  # the saver finds the second one's first role alone
        saves.save(step, {"model": {"w": torch.ones(3)}}, role="actor")
        if step == 2:
            await_that(lambda: is_announced(job, 2), "it is being committed")
        saves.save(step, {"model": {"w": torch.ones(3)}, "optim": {"a": step}}, role="critic")
        saves.wait_all(250)
    assert load_states(job.root, 2, "critic")["optim"] == {"a": 2}


def test_the_saver_leaves_the_saves_of_a_stack_alone(
    coordinator: Make, tmp_path: Path, job: Job, settings: Settings
) -> None:
    places = [NodeRanks("a", str(job.spool.folder), (0,)), NodeRanks("b", "/none", (1,))]
    of_stack = settings.model_copy(update={"saver": "stack"})
    on_two_nodes = CheckpointCoordinator(
        job.root, world_size=2, places=places, run_key="run", settings=of_stack
    )
    on_two_nodes.save(1, {"model": {"w": torch.ones(3)}})
    with CheckpointCoordinator(tmp_path / "other", settings=settings) as other:
        for step in (1, 2):
            other.save(step, {"model": {"w": torch.ones(3)}}).wait(250)
    (image,) = job.spool.tickets()[0]
    assert not image.failed
    on_two_nodes.close(timeout=0)


def test_a_failure_is_told_although_a_stack_has_come_up_since(
    coordinator: Make, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = coordinator(job={"rank_timeout_s": 2.0}, roles=("actor", "critic"))
    saves.save(4, {"model": {"w": torch.ones(3)}}, role="actor")
    await_that(lambda: is_announced(job, 4), "the saver has it")
    answers = {"/admin/version": (200, '"3.8.8"'), "/flow_runs/filter": (200, "[]")}
    with server(answers) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        with pytest.raises(SaveFailedError, match="role critic has submitted nothing"):
            saves.wait_all(250)


SIGPIPE_ENDS = """
import os, signal, sys
from pathlib import Path
from trinity_sync.client.saver_control import SaverControl, name_saver, wake_path

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as programs do whose output goes to head
spool = Path(sys.argv[1])
wake = wake_path(spool, name_saver())
os.mkfifo(wake)
pipe = os.open(wake, os.O_RDONLY | os.O_NONBLOCK)
control = SaverControl(spool, spool)
control.wake()
os.close(pipe)
control.wake()
"""


def test_the_end_of_a_saver_does_not_end_a_trainer_without_a_handler_of_sigpipe(
    settings: Settings,
) -> None:
    subprocess.run([sys.executable, "-c", SIGPIPE_ENDS, settings.spool], check=True)


def test_a_saver_that_lives_is_woken_by_a_save_and_not_by_its_call(
    job: Job, settings: Settings
) -> None:
    wake = wake_path(settings.spool, name_saver())
    os.mkfifo(wake)
    pipe = os.open(wake, os.O_RDONLY | os.O_NONBLOCK)  # as a saver does
    trigger = SaveTrigger(settings)
    trigger.ensure_saver(job.spool.folder.name)
    assert os.read(pipe, 9) == b"\n"
    trigger.ensure_saver(job.spool.folder.name, again=True)
    with pytest.raises(BlockingIOError):
        os.read(pipe, 9)
    os.close(pipe)
    assert not savers_of(settings.spool)
    trigger.ensure_saver(job.spool.folder.name, again=True)
    assert savers_of(settings.spool)


def test_a_saver_without_a_home_logs_to_the_spool(
    job: Job, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    homeless = settings.model_copy(update={"home": tmp_path / "file" / "home"})
    with CheckpointCoordinator(job.root, settings=homeless) as saves:
        saves.save(1, {"model": {"w": torch.ones(3)}})
    await_that(lambda: "save actor step 1" in (settings.spool / LOG).read_text(), "it is logged")


def test_a_saver_keeps_no_file_of_a_run_open(settings: Settings, tmp_path: Path, job: Job) -> None:
    open_files = []
    with CheckpointCoordinator(job.root, settings=settings) as first:
        first.save(1, {"model": {"w": torch.ones(3)}}).wait(250)
        for number in range(12):
            with CheckpointCoordinator(tmp_path / f"{number}", settings=settings) as saves:
                saves.save(1, {"model": {"w": torch.ones(3)}})
            open_files.append(savers_of(settings.spool)[0].num_fds())
    assert max(open_files[-3:]) < min(open_files[:3]) + 6


@pytest.mark.parametrize("saver_lives", [True, False])
@pytest.mark.parametrize("kind", ["checkpoint", "state_dict"])
def test_each_command_that_is_printed_for_a_failed_save_works_without_a_stack(
    saves: Saves, settings: Settings, job: Job, kind: Kind, saver_lives: bool
) -> None:
    call = partial(invoke, env=settings.to_variables())
    write_job_settings(job.root, {"on_nonfinite": "refuse"})
    saves.save(1, {"model": {"w": torch.tensor(math.nan)}}, kind=kind)
    with pytest.raises(SaveFailedError, match="retry it"):
        saves.wait_all(250)
    for is_refused in (True, False):
        if not saver_lives:  # nor the trainer
            saves.close(timeout=0)
            end_savers(settings.spool)
        if not is_refused:
            write_job_settings(job.root, {"on_nonfinite": "warn"})
        shown = [
            call(*words) for words in (["runs", job.root], ["ls", job.root], ["wait", job.root, 1])
        ]
        (hint,) = {each.stderr.rpartition("trinity-sync ")[2] for each in shown}
        retried = call(*hint.split())
        assert (retried.exit_code, "Prefect" in retried.output) == (0, False)
        waited = call(*retried.stdout.split("trinity-sync ")[1].split())
        assert (waited.exit_code, "non-finite" in waited.stderr) == (is_refused, is_refused)
    assert load_states(job.root, 1, "actor")["model"]["w"].isnan()
    refused = call("retry", job.root, 1)
    assert (refused.exit_code, "no save of step 1" in refused.stderr) == (1, True)


def test_saves_that_wait_although_no_saver_lives_are_told_with_what_to_do(
    settings: Settings, job: Job
) -> None:
    call = partial(invoke, env=settings.to_variables())
    assert (call("status").exit_code, call("status").stdout) == (0, "saver\tidle\t\t\n")
    job.stage(30, {"model": {"w": torch.zeros(4)}})
    until(lambda: call("status").exit_code == 3, "a saver could have been started")
    told = call("status")
    assert (f"{job.root}\t30\t" in told.stdout, "trinity-sync retry" in told.stderr) == (True, True)
    assert re.search("fail\tsaver\tnone lives.*trinity-sync status", call("doctor").stdout)
    assert call("retry", job.root, 30).exit_code == 0
    assert "is committed" in call("wait", job.root, 30).stdout
    assert re.match(r"saver\trunning\t\d+\t", call("status").stdout)
    assert str(job.root) in call("report", job.root, "-o", "json").stdout
    (row,) = json.loads(call("jobs", "ls", "-o", "json").stdout)["jobs"]
    assert (row["root"], row["steps"], row["newest"]) == (str(job.root), 1, 30)
