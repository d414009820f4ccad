"""A reader has its step or an error, never a folder that vanishes under its hands."""

import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch

from tests.support.forked import Program
from tests.support.job import Job
from tests.support.leases import acquire_lease
from trinity_sync.errors import CommitError
from trinity_sync.storage.steps_in_use import (
    LEASE_S,
    acquire_removal_lock,
    lease_to_read,
    list_leases,
    list_pins,
    pin,
    pin_ahead,
    unpin,
)


@pytest.fixture
def committed(job: Job) -> Job:
    job.commit_states(4, {"model": {"w": torch.zeros(3)}})
    return job


def test_a_lease_ends_by_itself(committed: Job) -> None:
    with acquire_lease(committed.root, 4, "slow", ttl_s=60) as lease:
        at = lease.path.stat().st_mtime
        assert list_leases(committed.root, clock=lambda: at + 59)
        assert list_leases(committed.root, clock=lambda: at + 61) == []
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


def test_a_torn_lease_keeps_the_step_in_its_name_for_a_day(committed: Job) -> None:
    lease = acquire_lease(committed.root, 4, "reader", ttl_s=5)
    lease.path.write_text(lease.path.read_text().replace('"step": 4', '"step": 5'))
    assert [found.step for found in list_leases(committed.root)] == [4]
    day = time.time() + LEASE_S
    assert list_leases(committed.root, clock=lambda: day - 60)
    assert list_leases(committed.root, clock=lambda: day + 60) == []
    assert not lease.path.exists()


def test_a_node_whose_clock_is_a_day_ahead_ends_no_lease(
    committed: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: later)
    with acquire_lease(committed.root, 4, "explorer 1"):
        assert [lease.holder for lease in list_leases(committed.root)] == ["explorer 1"]


def test_a_lease_of_a_reader_that_was_killed_ends_with_it(committed: Job) -> None:
    script = (
        "import os, signal\nfrom trinity_sync.storage.steps_in_use import lease_to_read\n"
        f"lease = lease_to_read({str(committed.root)!r}, 4, 'killed')\nlease.__enter__()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    Program(script).end(-signal.SIGKILL)
    folder = committed.root / ".trinity_sync/leases"
    assert len(list(folder.iterdir())) == 1
    assert list_leases(committed.root) == []
    assert list(folder.iterdir()) == []


def test_a_reader_in_another_container_is_not_taken_for_dead(committed: Job) -> None:
    script = (
        "import os\nfrom trinity_sync.storage.steps_in_use import lease_to_read\n"
        f"lease = lease_to_read({str(committed.root)!r}, 4, 'unseen')\nlease.__enter__()\n"
        "os._exit(0)"
    )
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run([*alone, sys.executable, "-c", script], capture_output=True)
    if b"unshare" in done.stderr:
        pytest.skip("a process may have no PID namespace of its own here")
    done.check_returncode()
    assert [lease.holder for lease in list_leases(committed.root)] == ["unseen"]
    assert list_leases(committed.root, clock=lambda: time.time() + LEASE_S + 60) == []


def test_a_reader_on_another_machine_of_the_same_name_is_not_taken_for_dead(
    committed: Job, tmp_path: Path
) -> None:
    """The first PID namespace has the same number on all machines; their boots differ."""
    boot = tmp_path / "boot_id"
    boot.write_text(f"{uuid.uuid4()}\n")
    script = (
        "import os\nfrom trinity_sync.storage.steps_in_use import lease_to_read\n"
        f"lease = lease_to_read({str(committed.root)!r}, 4, 'elsewhere')\nlease.__enter__()\n"
        "os._exit(0)"
    )
    elsewhere = 'mount --bind $0 /proc/sys/kernel/random/boot_id && exec $1 -c "$2"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", elsewhere, str(boot), sys.executable, script],
        capture_output=True,
    )
    if b"unshare" in done.stderr or b"mount" in done.stderr:
        pytest.skip("a process may have no mounts of its own here")
    done.check_returncode()
    assert [lease.holder for lease in list_leases(committed.root)] == ["elsewhere"]
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
