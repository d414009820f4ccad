"""After its first save a training is stopped by errors of its arguments alone, and held by nothing.

What else fails is told by the handle or by `wait_all`, and the next save commits once it is
repaired. Before, it is told at once what the node lacks.
"""

import asyncio
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import invoke
from tests.support.disk import no_file_opens, no_opens_of
from tests.support.forked import Program
from tests.support.job import Job, find_orphaned_saves
from tests.support.savers import await_that, end_savers, is_announced, savers_of, suspend_saver
from tests.unit.saver.conftest import Make, Saves
from trinity_sync import CheckpointCoordinator, Checkpoints, SaveHandle, Settings
from trinity_sync import saver as saver_module
from trinity_sync.client.saver_control import (
    SERVED,
    SERVER,
    UNREQUESTED,
    SaveTrigger,
    find_saver,
    name_saver,
)
from trinity_sync.errors import RootError, SaveError, SaveFailedError, SpoolError, warn_once
from trinity_sync.fs.atomic import walk_files
from trinity_sync.fs.locks import has_no_other_users
from trinity_sync.layout import PRIVATE_FOLDER, attaching_folder, step_folder
from trinity_sync.pipeline import save as pipeline
from trinity_sync.pipeline.pending import find_pending_saves
from trinity_sync.pipeline.save import (
    SaverDriver,
    commit_images,
    is_io_error,
    mark_images_failed,
)
from trinity_sync.saver import BEGUN, Saver
from trinity_sync.saves.journal import append
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot import slot_pool
from trinity_sync.snapshot.ticket import failure_path, ticket_path
from trinity_sync.storage.block_reuse import WORTHWHILE
from trinity_sync.storage.discovery import find_newest, require_committed
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.save_functions import (
    FunctionStatus,
    read_statuses,
    write_request,
    write_status,
)
from trinity_sync.storage.uncommitted import Persisted

MODEL = {"model": {"w": torch.ones(3)}}
HELD_S = 60.0
"""Seconds that a training would be held for if a slot was awaited in vain, at least."""


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    """The event loop of a trainer, which has its files open before the first save."""
    with asyncio.Runner() as runner:
        asyncio.set_event_loop(runner.get_loop())
        yield
        asyncio.set_event_loop(None)


def attach(saves: CheckpointCoordinator, step: int) -> None:
    with suppress(OSError):  # of other code, in the same process
        (saves.settings.home.parent / "position").write_text(f"{step}")
    saves.attach("position", saves.settings.home.parent / "position", step=step)


def attach_folder(saves: CheckpointCoordinator, step: int) -> None:
    (saves.settings.home.parent / "queue").mkdir(exist_ok=True)
    with suppress(OSError):  # of other code, in the same process
        (saves.settings.home.parent / "queue" / "items").write_text(f"{step}")
    saves.attach_folder("queue", saves.settings.home.parent / "queue", step=step)


def attach_written(saves: CheckpointCoordinator, step: int) -> None:
    folder = step_folder(attaching_folder(saves.root) / "own", step)
    with suppress(OSError):  # of other code, on the same disk or in the same process
        folder.mkdir(parents=True)
        (folder / "data.pt").write_text(f"{step}")
    saves.attach_written(folder, step=step)


def register(saves: CheckpointCoordinator, step: int) -> None:
    registered = saves.register_and_monitor(step, checkpoint_thread_count=1)
    asyncio.get_event_loop().run_until_complete(registered)


def save_async(saves: CheckpointCoordinator, step: int) -> None:
    saves.save_async("own", lambda: None, step)
    register(saves, step)


def save_sync(saves: CheckpointCoordinator, step: int) -> None:
    saves.save_sync(lambda: None, step)
    register(saves, step)


def save(saves: CheckpointCoordinator, step: int, **options: Any) -> SaveHandle:
    return saves.save(step, {"model": {"w": torch.full((3,), float(step))}}, **options)


CALLS: dict[str, Callable[[CheckpointCoordinator, int], object]] = {
    "save": save,
    "save with overlap": partial(save, overlap=True),
    "save of weights": partial(save, kind="state_dict"),
    "upload": lambda saves, step: saves.upload(step, lambda: {"w": torch.full((3,), float(step))}),
    "save_async": save_async,
    "save_sync": save_sync,
    "attach": attach,
    "attach_folder": attach_folder,
    "attach_written": attach_written,
    "cut": lambda saves, step: saves.cut(step, roles=()),
    "record_metrics": lambda saves, step: saves.record_metrics(step, {"reward": step}),
    "wait_staged": lambda saves, step: saves.wait_staged(),
}


@contextmanager
def is_full(disk: Path) -> Iterator[None]:
    with (disk / "others").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    try:
        yield
    finally:
        (disk / "others").unlink()


@contextmanager
def is_read_only(disk: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", disk, disk], check=True)  # a new one: files are open
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@contextmanager
def no_thread_starts() -> Iterator[None]:
    before = threading.stack_size(1 << 46)  # of which there is no memory
    try:
        yield
    finally:
        threading.stack_size(before)


class Recovery(logging.Handler):
    """Lets threads be started again once it is told that a part is repeated."""

    def emit(self, record: logging.LogRecord) -> None:
        threading.setprofile(None)
        threading.stack_size(0)


@pytest.mark.parametrize("begun", [False, True])
def test_a_save_is_repeated_once_threads_can_be_started_again(job: Job, begun: bool) -> None:
    """Those of a saver that a limit of the user leaves none, or that has begun to persist."""
    job.stage(1, {"model": {"w": torch.ones(1 << 20)}})
    driver = SaverDriver(job.request(1), StackSettings(), job.spool.folder.parent)

    def lack_threads(*_: object) -> None:
        threading.stack_size(1 << 46)  # of which there is no memory
        sys.setprofile(None)

    recovery, log = Recovery(), logging.getLogger(pipeline.__name__)
    log.addHandler(recovery)
    try:
        if begun:
            threading.setprofile(lack_threads)
        else:
            lack_threads()
        driver.save()
        assert threading.stack_size() == 0
    finally:
        recovery.emit(logging.makeLogRecord({}))
        log.removeHandler(recovery)
    assert find_newest(job.root).step == 1


def test_a_slot_may_have_readers_where_no_thread_can_be_started_that_asks(tmp_path: Path) -> None:
    (slot := tmp_path / "slot").touch()
    with no_thread_starts():
        assert not has_no_other_users(slot)


def kill_savers(spool: Path) -> None:
    for saver in savers_of(spool):
        saver.kill()
        saver.wait(250)


@contextmanager
def no_saver_starts(spool: Path, said: str = "/nowhere/python") -> Iterator[None]:
    """As in an environment that was removed; the saver has died."""
    kill_savers(spool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", said)
        yield


@pytest.mark.parametrize(
    "world",
    ["root full", "root read-only", "memory full", "no threads", "no processes", "no descriptors"],
)
def test_no_call_of_a_training_that_has_saved_raises_what_the_world_does(
    settings: Settings, tmp_path: Path, small_disk: Path, world: str
) -> None:
    subprocess.run(["mount", "-o", "remount,size=32m", small_disk], check=True)
    of_root = world.startswith("root")
    root = small_disk / "ckpts" if of_root else tmp_path / "ckpts"
    spool = small_disk / "spool" if world == "memory full" else settings.spool
    settings = settings.model_copy(update={"spool": spool})
    broken: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "root full": partial(is_full, small_disk),
        "root read-only": partial(is_read_only, small_disk),
        "memory full": partial(is_full, small_disk),
        "no threads": no_thread_starts,
        "no processes": partial(no_saver_starts, spool),
        "no descriptors": no_file_opens,
    }
    raised, steps = {}, itertools.count(1)
    with CheckpointCoordinator(root, settings=settings) as saves:
        save(saves, next(steps)).wait(250)
        for name, call in CALLS.items():
            step, told, began = next(steps), "", time.monotonic()
            try:
                with broken[world]():
                    call(saves, step)
                    if not name.startswith("save"):  # which is submitted already
                        told = save(saves, step).failure
            except Exception as error:
                raised[name] = error
            assert time.monotonic() - began < HELD_S, name
            try:
                saves.wait_all(250)
            except SaveFailedError as error:
                told = str(error)
            assert read_manifest(root, step) or told, name
            images = saves.spool.tickets
            await_that(lambda: all(each.failed for each in images()[0]), "no image is in use")  # noqa: B023
            save(saves, last := next(steps)).wait(250)
            require_committed(root, last)
        assert raised == {}
    kill_savers(spool)


@pytest.fixture
def job_on_disk(small_disk: Path, spool_folder: Path) -> Iterator[Job]:
    """A job whose root is on a file system of 4 MiB."""
    with closing(Job.open(small_disk / "ckpts", spool_folder)) as job:
        yield job


def test_a_commit_has_the_room_of_spare_files_on_a_full_disk(job_on_disk: Job) -> None:
    job = job_on_disk
    job.stage(1, MODEL)
    persisted = [Persisted(job.persist(1))]
    (spare := job.root / PRIVATE_FOLDER / "spare" / "1").parent.mkdir()
    spare.write_bytes(bytes(WORTHWHILE))
    attempt = partial(
        commit_images, job.request(1), persisted, job.share, StackSettings(), 0.0, 0.0
    )
    with is_full(job.root.parent):
        with pytest.raises(SaveError, match=r"No space left on device: .*retry") as full:
            attempt()
        assert is_io_error(full.value)  # so it is repeated
        attempt()
    require_committed(job.root, 1)


@pytest.mark.parametrize("earlier", [(), ("model",)], ids=["nothing", "sync"])
def test_a_save_that_a_full_disk_has_no_commit_for_leaves_no_files_there(
    job_on_disk: Job, earlier: tuple[str, ...]
) -> None:
    job, states = job_on_disk, {**MODEL, "optim": MODEL["model"]}
    if earlier:  # its files are committed
        job.stage(1, MODEL, kind="state_dict")
        job.commit(1, kind="state_dict")
    job.stage(1, states)
    request, persisted = job.request(1), [Persisted(job.persist(1, *states))]
    with is_full(job.root.parent):
        with pytest.raises(SaveError, match="No space left on device"):
            commit_images(request, persisted, job.share, StackSettings(), 0.0, 0.0)
        assert mark_images_failed(request, persisted, job.spool.folder, "full") == 2
    left = {path.name.split("_")[0] for path in walk_files(step_folder(job.root, 1), "*.pt*")}
    assert left == {*earlier}
    job.commit(1, *states)  # as a retry does
    require_committed(job.root, 1)


@pytest.mark.parametrize("full", ["bytes and inodes", "inodes"])
def test_on_a_full_disk_a_start_loads_and_prune_makes_room(
    settings: Settings, small_disk: Path, full: str, caplog: pytest.LogCaptureFixture
) -> None:
    subprocess.run(["mount", "-o", "remount,size=32m", small_disk], check=True)
    root, spared = small_disk / "ckpts", WORTHWHILE // 4
    start = partial(CheckpointCoordinator, root, settings=settings, job={"keep": "last=9"})
    with start() as saves:
        for step in range(1, 7):
            saves.save(step, {"model": {"w": torch.full((spared,), float(step))}}).wait(250)
    kill_savers(settings.spool)
    found = os.statvfs(small_disk)
    options = [f"remount,nr_inodes={found.f_files - found.f_ffree}"]
    if "bytes" in full:
        options.append(f"size={(found.f_blocks - found.f_bfree) * found.f_frsize}")
    subprocess.run(["mount", "-o", ",".join(options), small_disk], check=True)
    with start() as saves:
        assert saves.load(saves.latest_step())["model"]["w"].unique().tolist() == [6.0]
        assert "cannot be written by this process (No space left on device)" in caplog.text
        with pytest.raises(RootError, match="Free space there"):
            save(saves, 7)
    arguments = "prune", str(root), "--keep", "last=1", "--yes"
    done = invoke(*arguments, env=settings.to_variables())
    assert done.exit_code == 0, done.output
    assert Checkpoints(root).steps() == [6]
    with start() as saves:
        assert saves.load(6)["model"]["w"].unique().tolist() == [6.0]
        saves.save(7, {"model": {"w": torch.full((spared,), 7.0)}}).wait(250)
        require_committed(root, 7)


def test_a_save_is_followed_to_its_end_also_where_no_thread_can_be_started(
    saves: Saves, job: Job
) -> None:
    with no_thread_starts():
        save(saves, 1)
        saves.wait_all(250)
    save(saves, 2).wait(250)
    assert Checkpoints(job.root).steps() == [1, 2]


def test_an_overlapped_save_for_which_no_thread_can_be_started_is_staged_once(
    coordinator: Make, job: Job
) -> None:
    saves, weight = coordinator(), torch.ones(3)
    with no_thread_starts():
        saves.save(1, {"model": {"w": weight}}, overlap=True)
    weight += 1
    saves.save(2, {"model": {"w": weight}}, overlap=True)
    saves.wait_all(250)
    require_committed(job.root, 1)
    images = saves.spool.tickets
    await_that(lambda: all(each.ticket.step != 1 for each in images()[0]), "its image is free")


def test_saves_that_no_saver_can_commit_hold_up_no_later_ones(
    coordinator: Make, settings: Settings, job: Job
) -> None:
    saves, began = coordinator(), time.monotonic()
    save(saves, 1).wait(250)
    with no_saver_starts(settings.spool, "/bin/false"):
        for step in range(2, 6):  # of which two have a slot at once
            save(saves, step)
        with pytest.raises(SaveFailedError, match="exit code 1"):
            saves.wait_all(250)
    assert time.monotonic() - began < HELD_S
    assert all(each.failed for each in saves.spool.tickets()[0])
    save(saves, 6).wait(250)
    assert Checkpoints(job.root).steps() == [1, 6]


def test_a_rank_that_never_waits_is_not_held_by_images_that_others_know_to_have_failed(
    coordinator: Make, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_pool, "LONG_WAIT_S", 0.1)
    saves, began = coordinator(rank=1, world_size=2, run_key="run"), time.monotonic()
    for step in (1, 2):
        save(saves, step)
    for image in saves.spool.tickets()[0]:
        append(SaveRequest(**vars(image.ticket.save)), "failed", "its disk is full")
    assert not save(saves, 3).failure
    assert time.monotonic() - began < HELD_S


def test_a_function_whose_end_cannot_be_written_fails_its_save(
    settings: Settings, tmp_path: Path, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,size=32m", small_disk], check=True)
    settings, go = settings.model_copy(update={"spool": small_disk / "spool"}), threading.Event()
    full = is_full(small_disk)
    with CheckpointCoordinator(tmp_path / "ckpts", settings=settings) as saves:
        save(saves, 1).wait(250)
        saves.save_async("own", lambda: go.wait(250) and full.__enter__(), 2)
        register(saves, 2)
        go.set()
        with pytest.raises(SaveFailedError, match=r"receipt .* of step 2 is torn"):
            saves.wait_all(250)
        full.__exit__(None, None, None)
        save_async(saves, 3)
        saves.wait_all(250)
    kill_savers(settings.spool)


def test_a_function_whose_end_is_written_at_the_second_try_is_called_once(
    settings: Settings, tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subprocess.run(["mount", "-o", "remount,size=32m", small_disk], check=True)
    settings = settings.model_copy(update={"spool": small_disk / "spool"})
    go, calls = threading.Event(), []
    with CheckpointCoordinator(tmp_path / "ckpts", settings=settings) as saves:
        save(saves, 1).wait(250)
        saves.save_async("own", lambda: calls.append(go.wait(250)), 2)
        register(saves, 2)
        with is_full(small_disk):
            go.set()
            told = "Cannot record the end of save 'own' of step 2, will retry in 1 s: "
            await_that(lambda: told in caplog.text, "it was tried")
        saves.wait_all(250)
        assert Checkpoints(saves.root).steps() == [1, 2]
    assert calls == [True]
    kill_savers(settings.spool)


@pytest.mark.parametrize("call", [save, register])
@pytest.mark.parametrize("name", ["placements", "runs/1.json"])
def test_a_failure_names_what_has_taken_the_place_of_a_record(
    saves: Saves, job: Job, tmp_path: Path, name: str, call: Callable[..., object]
) -> None:
    save(saves, 1).wait(250)
    saves.save_sync(lambda: None, 2)
    record = job.root / PRIVATE_FOLDER / name
    record.rename(tmp_path / "moved")
    if name == "placements":
        record.symlink_to(tmp_path)
    else:
        os.mkfifo(record)
    call(saves, 2)
    with pytest.raises(SaveFailedError, match=str(record)):
        saves.wait_all(250)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
def test_what_reads_a_spool_does_not_wait_for_what_is_no_file(
    job: Job, settings: Settings, make: Callable[[Path], None]
) -> None:
    def stop(*_: object) -> None:
        raise TimeoutError

    for step in (1, 2):
        job.stage(step, MODEL)
    torn, sealed = job.spool.tickets()[0]
    write_status(job.spool, FunctionStatus("own", 1, 3, "checkpoint", 0, "1/1"))
    write_request(job.spool, job.save(3), job.request(3).model_dump_json())
    folder, waits = job.spool.folder, [ticket_path(torn.slot), failure_path(sealed.slot)]
    waits += [folder / name for name in (SERVED, SERVER, UNREQUESTED, f"x{BEGUN}")]
    for path in [*waits, job.spool.away, *job.spool.receipts.iterdir()]:
        path.unlink(missing_ok=True)
        make(path)
    control, saver = SaveTrigger(settings), Saver(settings.spool, StackSettings(), settings)
    readers: tuple[Callable[[], object], ...] = (
        partial(find_orphaned_saves, settings.spool),
        partial(find_saver, folder),
        partial(control.warn_of_server, folder),
        partial(control.find_failures, [job.request(2)], ()),
        partial(invoke, "runs", job.root),
        partial(saver._look_at, job.spool),
        partial(saver._request, job.spool, ()),
        lambda: [*read_statuses(job.spool, job.save(3))],
    )
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for read in readers:
            signal.alarm(30)
            with suppress(SpoolError):
                read()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
def test_a_request_that_is_no_file_stops_no_other_save(
    job: Job, make: Callable[[Path], None]
) -> None:
    job.stage(1, MODEL)
    write_request(job.spool, job.save(3), "")
    (request,) = job.spool.receipts.iterdir()
    request.unlink()
    make(request)
    write_request(job.spool, job.save(4), job.request(4).model_dump_json())
    assert [each.step for each in find_pending_saves(job.spool, grace_s=-1)] == [1, 4]


@pytest.mark.parametrize("name", ["runs/1.json", "placements/1.actor.json"])
def test_a_save_is_begun_and_waits_while_a_record_cannot_be_read(
    saves: Saves, job: Job, settings: Settings, name: str
) -> None:
    save(saves, 1).wait(250)
    saver = suspend_saver(settings.spool)
    with no_opens_of(job.root / PRIVATE_FOLDER / name):
        save(saves, 2)
        assert find_pending_saves(saves.spool, grace_s=0)
        saver.resume()
        await_that(lambda: is_announced(job, 2), "the saver begins it")
    saves.wait_all(250)
    assert saves.latest_step() == 2


@pytest.mark.parametrize("lack", [no_thread_starts, no_file_opens])
def test_a_saver_that_can_start_no_thread_or_open_no_file_commits_once_it_can(
    job: Job,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    lack: Callable[[], AbstractContextManager[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(saver_module, "LOOK_S", 0.01)
    monkeypatch.setattr(saver_module, "LINGER_S", 0.1)
    warn_once.cache_clear()
    looks = []

    class Counting(Saver):
        def _look(self) -> bool:
            looks.append(0)
            return super()._look()

    saver = Counting(settings.spool, StackSettings())
    job.stage(1, MODEL)
    (job.spool.folder / SERVED).write_text(f"0 {name_saver()}")
    serving = threading.Thread(target=saver.run)
    with monkeypatch.context() as patch:
        patch.setattr(saver, "_look_at", lambda _: None)
        serving.start()
        await_that(lambda: looks, "it serves")
        with lack():
            before = len(looks)
            await_that(lambda: len(looks) > before + 1, "it looks again")
            patch.undo()
            if lack is no_thread_starts:
                with pytest.raises(RuntimeError, match="thread"):
                    saver._look_at(job.spool)
            assert saver._saves == {}
    assert caplog.text.count("cannot look for saves, will retry: ") == 1
    await_that(lambda: read_manifest(job.root, 1), "step 1 is committed")
    serving.join(60)
    assert not serving.is_alive()


TRAINING = """
import logging, os, sys
from pathlib import Path
import torch
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.snapshot.stager import estimate_nbytes
from tests.unit.conftest import set_limit

logging.basicConfig(stream=sys.stdout)
group, root, spool, home = map(Path, sys.argv[1:5])
(group / "cgroup.procs").write_text(str(os.getpid()))
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

def step():
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()

step()
step()
used = [group / name for name in ("memory.current", "memory.usage_in_bytes")]
taken = int(next(filter(Path.exists, used)).read_text())
state = estimate_nbytes(model) + estimate_nbytes(optimizer)
set_limit(group, int(float(sys.argv[5]) * (taken + state)))
settings = Settings(spool=spool, home=home, saver="auto")
with CheckpointCoordinator(root, settings=settings) as saves:
    if sys.argv[6]:
        saves.prewarm({"model": model, "optim": optimizer})
    for number in range(1, 9):
        step()
        saves.save(number, {"model": model, "optim": optimizer})
print("ended")
"""


@pytest.mark.parametrize("prewarms", ["", "prewarms"])
@pytest.mark.parametrize("times", [1.2, 0.9])
def test_a_training_ends_without_a_kill_or_says_at_once_what_it_lacks(
    job: Job, settings: Settings, group: Path, times: float, prewarms: str
) -> None:
    given = (group, job.root, settings.spool, settings.home, times, prewarms)
    program = Program(TRAINING, *given)
    try:
        said = program.end(0 if times > 1 else 1)
    finally:
        end_savers(settings.spool)
    newest = find_newest(job.root)
    assert "the images of this job need 40" in said, said
    assert f"The memory limit of {group} counts shared memory: raise it (--memory)" in said
    assert ("a save waits for the commit of the one before" in said) == (times > 1)
    assert (newest and newest.step, said.endswith("ended\n")) == (
        (8, True) if times > 1 else (None, False)
    )
