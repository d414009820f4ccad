"""Leases, pins and tags keep steps: a reader has its step or an error, and a tag names one step."""

import shlex
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.forked import Program
from tests.support.job import Job
from tests.support.leases import acquire_lease
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.fs.locks import open_lock_file
from trinity_sync.integrations.trainer_saves import TrainerSaves
from trinity_sync.storage import steps_in_use
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.steps_in_use import (
    BEST,
    LEASE_S,
    acquire_removal_lock,
    lease_to_read,
    list_best,
    list_leases,
    list_pins,
    list_steps_in_use,
    pin,
    pin_ahead,
    resolve_step,
    tag,
    unpin,
)


@pytest.fixture
def committed(job: Job) -> Job:
    job.commit_states(4, {"model": {"w": torch.zeros(3)}})
    return job


@pytest.mark.parametrize("lasts_s", [60, LEASE_S], ids=["its time", "a day if it is torn"])
def test_a_lease_ends_by_itself_and_keeps_the_step_in_its_name(
    committed: Job, lasts_s: float
) -> None:
    with acquire_lease(committed.root, 4, "slow", ttl_s=60) as lease:
        if lasts_s == LEASE_S:
            lease.path.write_text(lease.path.read_text().replace('"step": 4', '"step": 5'))
        at = lease.path.stat().st_mtime
        found = list_leases(committed.root, clock=lambda: at + lasts_s - 1)
        assert [each.step for each in found] == [4]
        assert list_leases(committed.root, clock=lambda: at + lasts_s + 1) == []
        assert not lease.path.exists()


def test_a_lease_ends_with_its_block_also_if_that_raises(committed: Job) -> None:
    def read() -> None:
        with lease_to_read(committed.root, 4, "reader") as manifest:
            assert manifest.step == 4
            assert list_leases(committed.root)
            raise OSError(5, "it cannot be read")

    with pytest.raises(OSError, match="it cannot be read"):
        read()
    assert list_leases(committed.root) == []


def test_other_files_among_the_leases_keep_no_step_and_stay(committed: Job) -> None:
    acquire_lease(committed.root, 4, "reader").release()
    notes = committed.root / ".trinity_sync/leases/04.notes.json"
    notes.touch()
    assert list_leases(committed.root) == []
    assert notes.exists()


def test_a_node_whose_clock_is_a_day_ahead_ends_no_lease(
    committed: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: later)
    with acquire_lease(committed.root, 4, "explorer 1"):
        assert [lease.holder for lease in list_leases(committed.root)] == ["explorer 1"]


LEASE = """
import os, sys
from trinity_sync.storage.steps_in_use import lease_to_read
lease = lease_to_read(sys.argv[1], 4, "a reader")
lease.__enter__()
os._exit(0)
"""


def test_a_lease_of_a_reader_that_has_died_ends_with_it(committed: Job) -> None:
    Program(LEASE, committed.root).end()
    folder = committed.root / ".trinity_sync/leases"
    assert len(list(folder.iterdir())) == 1
    assert list_leases(committed.root) == []
    assert list(folder.iterdir()) == []


def test_a_lease_that_is_held_to_the_end_of_its_process_ends_in_silence(committed: Job) -> None:
    """Python imports nothing any more when it drops what is still held."""
    program = LEASE.replace("os._exit(0)", "import builtins; builtins.lease = lease")
    done = subprocess.run(
        [sys.executable, "-c", program, committed.root], capture_output=True, check=True
    )
    assert done.stderr == b""
    assert list((committed.root / ".trinity_sync/leases").iterdir()) == []


CONTAINER = "unshare --user --map-root-user --pid --fork --mount-proc"
MACHINE = (
    "unshare --mount sh -c 'mount --bind boot_id /proc/sys/kernel/random/boot_id && exec \"$@\"' -"
)


@pytest.mark.parametrize("elsewhere", [CONTAINER, MACHINE], ids=["container", "machine"])
def test_a_reader_elsewhere_is_not_taken_for_dead(
    committed: Job, tmp_path: Path, elsewhere: str
) -> None:
    """The first PID namespace has the same number on all machines; their boots differ."""
    (tmp_path / "boot_id").write_text(f"{uuid.uuid4()}\n")
    command = [*shlex.split(elsewhere), sys.executable, "-c", LEASE, committed.root]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path)
    if b"unshare" in done.stderr or b"mount" in done.stderr:
        pytest.skip("a process may have no namespaces of its own here")
    done.check_returncode()
    assert [lease.holder for lease in list_leases(committed.root)] == ["a reader"]
    assert list_leases(committed.root, clock=lambda: time.time() + LEASE_S + 60) == []


def test_a_step_is_pinned_ahead_of_its_commit_and_a_pin_that_exists_stays(committed: Job) -> None:
    pin(committed.root, 4, "the paper's")
    for step in (4, 5):
        pin_ahead(committed.root, step, "the best")
    assert [(each.step, each.reason) for each in list_pins(committed.root)] == [
        (4, "the paper's"),
        (5, "the best"),
    ]


def test_a_root_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    root = tmp_path / "not mounted"
    with pytest.raises(CommitError, match="is not committed"):
        acquire_lease(root, 4, "explorer 1")
    with pytest.raises(CommitError, match="is not committed"):
        pin(root, 4)
    assert not unpin(root, 4)
    assert not root.exists()


def test_a_lease_waits_for_a_removal_and_then_fails(committed: Job) -> None:
    answers: list[Exception] = []

    def read() -> None:
        try:
            with lease_to_read(committed.root, 4, "late"):
                pass
        except CommitError as error:
            answers.append(error)

    with acquire_removal_lock(committed.root):
        reader = threading.Thread(target=read)
        reader.start()
        (committed.root / "global_step_4").rename(committed.root / "removed")
        assert answers == []
    reader.join()
    assert "is not committed" in str(answers[0])


def test_what_was_read_is_good_although_its_lease_cannot_be_removed(
    committed: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with acquire_lease(committed.root, 4, "a reader") as lease:
        lease.path.unlink()
        lease.path.mkdir()  # as a mount whose server is gone
    assert "which ends by itself" in caplog.text


def test_a_tag_does_not_name_the_step_that_another_run_has_put_in_place_of_its_own(
    committed: Job,
) -> None:
    tag(committed.root, 4, "best")
    for key in ("first", "second"):
        open_run(committed.root, key, 0)
    committed.commit_states(4, {"model": {"w": torch.ones(3)}}, run=2)
    with pytest.raises(
        CommitError, match=r"step 4 of run 1 .* run 2 has replaced it, .* To move tag best"
    ):
        resolve_step(committed.root, "best")
    tag(committed.root, 4, "best")
    assert resolve_step(committed.root, "best") == 4


def test_the_best_step_is_not_one_of_its_number_that_a_later_run_has_superseded(
    committed: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(committed.spool.folder.parent))
    pin_ahead(committed.root, 2, BEST)
    for key, resumed_from in (("first", 0), ("second", 3)):
        open_run(committed.root, key, resumed_from)
    committed.commit_states(2, {"model": {"w": torch.ones(3)}})
    pin_ahead(committed.root, 4, BEST)  # as run 2 did, whose save of it failed
    saves = TrainerSaves(committed.root)
    assert resolve_step(committed.root, "best") == saves.find_best(4) == 2
    saves.keep_best(4)
    assert list_best(committed.root) == [2, 4]


def test_a_tag_moves_to_another_step_by_force_only(committed: Job) -> None:
    committed.commit_states(5, {"model": {"w": torch.zeros(3)}})
    tag(committed.root, 4, "best")
    tag(committed.root, 4, "best", "the same step: nothing moves")
    with pytest.raises(ConfigError, match=r"best is at step 4 .* best --force"):
        tag(committed.root, 5, "best")
    assert resolve_step(committed.root, "best") == 4
    tag(committed.root, 5, "best", force=True)
    assert [(each.step, each.name) for each in list_pins(committed.root)] == [(5, "best")]


def test_of_two_processes_that_give_a_tag_at_once_the_second_finds_it(
    committed: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed.commit_states(5, {"model": {"w": torch.ones(3)}})
    write, waits = steps_in_use.replace_file, list[bool]()

    def give_another(path: Path, content: str) -> None:
        with open_lock_file(committed.root / ".trinity_sync/removal.lock") as lock:
            waits.append(not lock.try_acquire(shared=True))
        write(path, content)

    monkeypatch.setattr(steps_in_use, "replace_file", give_another)
    tag(committed.root, 4, "best")
    pin(committed.root, 4)
    assert waits == [True, False]  # pins of steps keep no other out


@pytest.mark.parametrize("name", ["40", "", "../40", "a b", ".best", "-best", "v1.0"])
def test_what_cannot_be_a_tag_is_refused(committed: Job, name: str) -> None:
    with pytest.raises(ConfigError, match="tag"):
        tag(committed.root, 4, name)
    assert list_pins(committed.root) == []


def test_a_torn_tag_is_an_error_until_it_is_set_again_or_removed(committed: Job) -> None:
    for name in ("best", "good"):
        tag(committed.root, 4, name)
    for mend in (
        lambda: tag(committed.root, 4, "best", force=True),
        lambda: unpin(committed.root, "best"),
    ):
        (committed.root / ".trinity_sync/pins/best.json").write_text('{"st')
        with pytest.raises(CommitError, match="the step of the tag is unknown"):
            list_steps_in_use(committed.root)
        assert resolve_step(committed.root, "good") == 4
        mend()
        assert list_steps_in_use(committed.root)


def test_a_tag_is_at_a_step_at_every_instant_while_it_moves(committed: Job) -> None:
    committed.commit_states(5, {"model": {"w": torch.zeros(3)}})
    tag(committed.root, 4, "best")

    def move() -> None:
        for step in (5, 4) * 10:
            tag(committed.root, step, "best", force=True)

    with ThreadPoolExecutor(1) as mover:
        moves = mover.submit(move)
        while not moves.done():
            assert resolve_step(committed.root, "best") in (4, 5)
    moves.result()
    assert resolve_step(committed.root, "best") == 4
