"""Locks end with their holder, are left alone by its children, and are never waited for in vain."""

import errno
import fcntl
import math
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.dying import ANOTHER_USER, as_another_user, end_of, refuse_calls
from tests.support.forked import Program
from tests.support.job import Job
from tests.support.leases import acquire_lease
from tests.support.restricted import restricted
from tests.support.steps import commit_files
from trinity_sync.errors import CommitError, LockTimeoutError
from trinity_sync.fs import locks as lock_file
from trinity_sync.fs.atomic import link_or_copy, read_file, replace_file, sync_file
from trinity_sync.fs.locks import (
    LockFile,
    acquire_commit_lock,
    acquire_file_lock,
    create_file,
    try_acquire_file_lock,
)
from trinity_sync.layout import step_folder
from trinity_sync.retention.policies import ALL, parse_policy
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.snapshot.slot import Slot
from trinity_sync.storage import metrics, restore, steps_in_use
from trinity_sync.storage.metrics import MetricsLog, read_metrics
from trinity_sync.storage.steps_in_use import acquire_removal_lock, list_leases


@contextmanager
def forked() -> Iterator[None]:
    """A child of this process that lives as long as the block, as a DataLoader's worker would."""
    ends, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(tell)
        os.read(ends, 1)
        os._exit(0)
    os.close(ends)
    try:
        yield
    finally:
        os.close(tell)
        os.waitpid(child, 0)


@contextmanager
def running(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A script of Python that has printed a line, and may go on until it reads from its input."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process


HOLD = """
    import sys
    from pathlib import Path
    from trinity_sync.fs.locks import acquire_file_lock
    with acquire_file_lock(Path(sys.argv[1]), shared="shared" in sys.argv):
        print("ready", flush=True)
        sys.stdin.read()
    """


def is_free(path: Path) -> bool:
    with try_acquire_file_lock(path) as ours:
        return ours


def test_a_lock_is_free_when_its_block_ends_although_a_child_was_forked_in_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lock"
    with ExitStack() as child:
        with acquire_file_lock(path):
            child.enter_context(forked())
            assert not is_free(path)
        assert is_free(path)


HANGING = """
    import os, sys, threading
    from pathlib import Path
    from trinity_sync.fs.locks import LockFile

    opening = threading.Event()

    def note(event, arguments):
        if event == "open" and str(arguments[0]) == sys.argv[1]:
            opening.set()

    def fork(body):
        child = os.fork()
        if not child:
            code = 1
            try:
                body()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def lock_in_thread():
        file = LockFile(Path(sys.argv[2]), os.O_RDWR | os.O_CREAT)
        thread = threading.Thread(target=lambda: (file.acquire(limit_s=30), file.close()))
        thread.start()
        thread.join()
        assert file.fd == -1

    sys.addaudithook(note)
    hanging = threading.Thread(target=LockFile, args=(Path(sys.argv[1]), os.O_RDONLY), daemon=True)
    hanging.start()
    opening.wait()
    lock_in_thread()
    fork(lambda: (lock_in_thread(), fork(lock_in_thread), lock_in_thread()))
    lock_in_thread()
    assert hanging.is_alive()
    print("ready", flush=True)
    """
"""A thread opens a pipe without a writer: it hangs, as a file of a server that is away."""


def test_a_fork_or_another_open_does_not_wait_for_a_file_server_that_is_away(
    tmp_path: Path,
) -> None:
    hangs, lock = tmp_path / "hangs", tmp_path / "lock"
    os.mkfifo(hangs)
    command = [sys.executable, "-c", textwrap.dedent(HANGING), hangs, lock]
    assert subprocess.run(command, stdout=subprocess.PIPE, timeout=250).stdout == b"ready\n"


def test_a_child_that_leaves_the_block_does_not_give_its_parents_lock_away(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with ExitStack() as block:
        held = block.enter_context(acquire_file_lock(path))

        def leave() -> None:
            with pytest.raises(CommitError, match="belongs to the parent of this process"):
                held.require_held()
            block.close()

        assert end_of(leave) == 0
        assert not is_free(path)
    assert is_free(path)


TAKE = {
    "a lock file": "held.enter_context(acquire_file_lock(path))",
    "a slot that is filled": "slot = Slot(path); slot.image(9); assert slot.try_lock()",
    "a slot that is read": "content = held.enter_context(lock_slot(path))",
    "an image that is restored": "fd = held.enter_context(hold_slot(path)); image = map_fd(fd, 9)",
}


@pytest.mark.parametrize(
    ("what", "child"), [*((what, "forked") for what in TAKE), ("a lock file", "started")]
)
def test_a_child_of_a_killed_process_keeps_none_of_its_locks(
    tmp_path: Path, what: str, child: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    script = """
        import os, signal, subprocess, sys
        from contextlib import ExitStack
        from pathlib import Path
        from trinity_sync.snapshot.ticket import hold_slot, lock_slot
        from trinity_sync.snapshot.slot import Slot
        from trinity_sync.fs.locks import acquire_file_lock
        from trinity_sync.fs.direct_io import map_fd
        path, held = Path(sys.argv[1]), ExitStack()
        exec(sys.argv[2])
        if sys.argv[3] == "started":
            subprocess.Popen(["sh", "-c", "echo ready; cat"], close_fds=False)
            os.kill(os.getpid(), signal.SIGKILL)
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        print("ready", flush=True)
        sys.stdin.read()
        """
    process = Program(textwrap.dedent(script), path, TAKE[what], child, talks=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.end(-signal.SIGKILL)
        slot = Slot(path)
        assert slot.try_lock()
        slot.unlock()
        slot.close(remove=True)  # no other process keeps it
        assert not path.exists()
    finally:
        process.clear()


def test_a_lease_is_released_only_by_the_process_that_acquired_it(job: Job) -> None:
    commit_files(job.root, 4)
    with acquire_lease(job.root, 4, "parent") as lease:
        assert end_of(lambda: lease.__exit__(None, None, None)) == 0
        assert [each.holder for each in list_leases(job.root)] == ["parent"]
    assert list_leases(job.root) == []


def test_a_lock_timeout_names_all_holders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock_file, "WARN_S", 0.0)
    path = tmp_path / "lock"
    with running(HOLD, path, "shared") as one, running(HOLD, path, "shared") as other:
        with pytest.raises(LockTimeoutError) as told, acquire_file_lock(path, limit_s=0.05):
            pass
        for text in (str(told.value), caplog.messages[0]):
            assert f"the lock {path}" in text
            for holder in (one, other):
                assert f"process {holder.pid} ({sys.executable} -c" in text
        with acquire_file_lock(path, shared=True, limit_s=0):
            pass
        for holder in (one, other):
            holder.stdin.close()
        with acquire_file_lock(path, limit_s=60):
            pass


@pytest.mark.parametrize(("limit_s", "warnings"), [(60.0, 1), (math.inf, 0)])
def test_waiting_for_a_write_permit_warns_only_after_a_minute(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit_s: float,
    warnings: int,
) -> None:
    monkeypatch.setattr(lock_file, "WARN_S", 0.0)
    attempts = iter([False, True])
    with acquire_file_lock(tmp_path / "lock"):
        waiting = LockFile(tmp_path / "lock", os.O_RDONLY)
        waiting.wait(lambda: next(attempts), limit_s)
        waiting.close()
    assert len(caplog.messages) == warnings


def test_the_description_of_an_invisible_holder_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    script = """
        import sys
        from pathlib import Path
        from trinity_sync.errors import LockTimeoutError
        from trinity_sync.fs.locks import acquire_file_lock
        try:
            with acquire_file_lock(Path(sys.argv[1]), limit_s=0):
                pass
        except LockTimeoutError as error:
            print(error)
        """
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    command = [*alone, sys.executable, "-c", textwrap.dedent(script), str(path)]
    with acquire_file_lock(path) as held:
        os.pwrite(held.fd, b"process 7 (python train.py) on node other\nwhat was there", 0)
        done = subprocess.run(command, capture_output=True, text=True)
    if "unshare" in done.stderr:
        pytest.skip("a process may have no PID namespace of its own here")
    assert (
        "it is held by a process that is not visible on this node; the last holder in the file is "
        "process 7 (python train.py) on node other. Check"
    ) in done.stdout


def test_on_a_shared_file_system_the_holder_writes_its_description(tmp_path: Path) -> None:
    with restricted(tmp_path) as mount, acquire_file_lock(mount / "lock") as held:
        for _ in range(2):
            assert (mount / "lock").read_text().startswith(f"process {os.getpid()} (")
            held.require_held()


def test_a_child_has_no_lock_file_open_whenever_it_is_forked(tmp_path: Path) -> None:
    over = threading.Event()

    def lock_and_release() -> None:
        while not over.is_set():
            with acquire_file_lock(tmp_path / "lock", shared=True):
                pass

    threads = [threading.Thread(target=lock_and_release) for _ in range(2)]
    for thread in threads:
        thread.start()

    def look() -> None:
        has = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert tmp_path / "lock" not in has

    ends = [end_of(look) for _ in range(30)]
    over.set()
    for thread in threads:
        thread.join()
    assert ends == [0] * 30


def test_a_prune_that_waits_for_its_lock_does_not_block_commits(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_in_use, "ACQUIRE_S", 0.05)
    for step in (1, 2):
        commit_files(job.root, step)
    made = plan_prune(job.root, Rules(parse_policy("last=1"), ALL), now=0)
    assert [each.step for each in made.removed] == [1]
    with running(HOLD, job.root / ".trinity_sync/removal.lock", "shared") as hangs:
        with pytest.raises(LockTimeoutError, match=f"removal.lock .* process {hangs.pid} "):
            prune(job.root, made)
        assert step_folder(job.root, 1).is_dir()
        assert is_free(job.root / ".trinity_sync/commit.lock")
    prune(job.root, made)
    assert not step_folder(job.root, 1).is_dir()


def test_a_slot_that_a_process_hangs_on_is_read_from_disk(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restore, "SLOT_S", 0.05)
    job.commit_states(1, {"model": {"w": torch.ones(9)}})
    slot = job.spool.slot("actor", "model", 0, 0)
    with running(HOLD, slot) as hangs:
        states = restore.load_states(job.root, 1, "actor", spool=job.spool)
        assert torch.equal(states["model"]["w"], torch.ones(9))
        assert f"held by process {hangs.pid} " in caplog.text


def test_a_training_ends_although_the_metrics_cannot_be_written(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "WRITE_S", 0.05)
    log = MetricsLog(job.root, lambda step: 1)
    with running(HOLD, job.root / ".trinity_sync/metrics/lock") as hangs:
        for step in range(100):
            log.record(step, {"loss": 1.0})
        log.close()
        assert len(caplog.messages) == 100
        assert f"process {hangs.pid} " in caplog.text
    log = MetricsLog(job.root, lambda step: 1)
    log.record(7, {"loss": 2.0})
    log.close()
    assert read_metrics(job.root, 1, 7) == {"loss": 2.0}


@pytest.mark.parametrize(
    ("folder", "lock"),
    [(0o700, 0o600), (0o755, 0o600), (0o750, 0o600), (0o775, 0o660), (0o777, 0o666)],
)
@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_users_who_may_write_into_its_folder_may_open_a_lock(
    tmp_path: Path, folder: int, lock: int, umask: int, no_umask: None
) -> None:
    os.umask(umask)
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks").chmod(folder)
    path = tmp_path / "locks/lock"
    for _ in range(2):
        with acquire_file_lock(path):
            assert stat.S_IMODE(path.stat().st_mode) == lock
        path.chmod(0o666)  # as locks of another time may have


def test_a_lock_that_leads_elsewhere_is_not_opened(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch(0o644)
    (tmp_path / "lock").symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic links"), acquire_file_lock(tmp_path / "lock"):
        pass
    (tmp_path / "linked").hardlink_to(elsewhere)
    with acquire_file_lock(tmp_path / "linked"):
        assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o644


@pytest.fixture
def open_to_all(job: Job) -> Job:
    """A job whose root all users may look into."""
    for folder in (job.root, *job.root.parents):
        if folder.stat().st_uid == os.getuid() and folder.stat().st_mode & 0o777 == 0o700:
            folder.chmod(0o755)
    return job


def test_readers_of_a_root_cannot_block_its_locks(open_to_all: Job, no_umask: None) -> None:
    job = open_to_all
    os.umask(0o022)
    job.stage(1, {"model": {"w": torch.ones(3)}}, write_concurrency="one")
    job.commit(1)
    with acquire_commit_lock(job.root), acquire_removal_lock(job.root):
        pass
    metrics.write_metrics(job.root, 1, 1, {"loss": 1.0})
    prune(job.root, plan_prune(job.root, Rules(parse_policy("last=1"), ALL), now=0))
    locks = [path for path in (job.root / ".trinity_sync").rglob("*lock") if path.is_file()]
    assert {"commit.lock", "removal.lock", "writing.lock", "lock"} <= {path.name for path in locks}

    def hold_all() -> None:
        assert (step_folder(job.root, 1) / "manifest.json").read_text()
        for path in locks:
            with pytest.raises(PermissionError):
                fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)

    as_another_user(hold_all)


def test_all_users_who_may_write_into_a_root_use_its_locks(
    open_to_all: Job, no_umask: None
) -> None:
    if os.getuid():
        pytest.skip("only root can be another user")
    os.umask(0o077)
    private = open_to_all.root / ".trinity_sync"
    private.mkdir(exist_ok=True)
    os.chown(private, -1, ANOTHER_USER + 1)
    private.chmod(0o2770)

    def take(*names: str) -> None:
        for name in names:
            with acquire_file_lock(private / name), try_acquire_file_lock(private / name) as both:
                assert not both

    take("ours")
    as_another_user(lambda: take("ours", "theirs"), ANOTHER_USER + 1)
    take("ours", "theirs")
    assert (private / "theirs").stat().st_uid == ANOTHER_USER
    private.chmod(0o700)
    os.chown(private, ANOTHER_USER, -1)
    take("of root in a folder of theirs")
    as_another_user(lambda: take("of root in a folder of theirs"))


def test_a_lock_that_another_user_is_making_is_waited_for(
    open_to_all: Job, no_umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = open_to_all.root / ".trinity_sync"
    private.mkdir(exist_ok=True)
    private.chmod(0o777)
    lock = private / "lock"
    lock.touch(0o600)  # and next it is opened to the users of the folder
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()

    def go_on() -> None:
        os.read(asked, 1)
        lock.chmod(0o666)
        os.write(answer, b"!")

    def take() -> None:
        monkeypatch.setattr(
            "trinity_sync.fs.locks.time.sleep",
            lambda _: (os.write(ask, b"!"), os.read(answered, 1)),
        )
        with acquire_file_lock(lock):
            pass

    maker = threading.Thread(target=go_on)
    maker.start()
    try:
        as_another_user(take)
    finally:
        os.write(ask, b"!")
        maker.join()
        for fd in (asked, ask, answered, answer):
            os.close(fd)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EACCES, errno.EMLINK])
def test_a_file_is_created_or_copied_where_it_can_have_no_other_name(
    tmp_path: Path, error: int
) -> None:
    """A file system has none, a security module refuses it, or the file has too many."""

    def work() -> None:
        refuse_calls(error, "link")
        assert create_file(tmp_path / "file", b"first")
        assert not create_file(tmp_path / "file", b"second")
        link_or_copy(tmp_path / "file", tmp_path / "copy")

    assert end_of(work) == 0
    assert (tmp_path / "copy").read_bytes() == b"first"
    assert (tmp_path / "copy").stat().st_nlink == 1


@pytest.mark.parametrize(
    ("refused", "call", "named"),
    [
        ("read", read_file, "pins/1.json"),
        ("flock", lambda path: LockFile(path, os.O_RDWR).try_acquire(), "pins/1.json"),
        ("fsync", sync_file, "pins/1.json"),
        ("write", lambda path: replace_file(path, "pinned"), "pins"),
    ],
)
def test_an_error_of_a_file_that_is_open_names_it_or_its_folder(
    tmp_path: Path, refused: str, call: Callable[[Path], object], named: str
) -> None:
    private = tmp_path / ".trinity_sync"
    (private / "pins").mkdir(parents=True)
    (private / "pins/1.json").write_text("1")

    def work() -> None:
        refuse_calls(errno.EIO, refused)
        with pytest.raises(OSError, match="Input/output") as raised:
            call(private / "pins/1.json")
        assert raised.value.filename == str(private / named)

    assert end_of(work) == 0
