"""A reader has its step or an error, never a folder that vanishes under its hands."""

import math
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch

from tests.support.job import Job
from tests.support.meanwhile import when_opened, when_removed
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.storage.leases import (
    LONG_LEASE_S,
    Lease,
    acquire_lease,
    acquire_removal_lock,
    list_leases,
)
from trinity_sync.storage.pins import (
    list_pins,
    pin,
    pin_ahead,
    unpin,
)

LOCK = ".trinity_sync/removal.lock"


@pytest.fixture
def committed(job: Job) -> Job:
    job.stage(4, {"model": {"w": torch.zeros(3)}})
    job.commit(4)
    return job


def test_a_lease_holds_until_it_is_released(committed: Job) -> None:
    with acquire_lease(committed.root, 4, "explorer 1"):
        assert [(lease.step, lease.holder) for lease in list_leases(committed.root)] == [
            (4, "explorer 1")
        ]
    assert list_leases(committed.root) == []


def test_a_lease_ends_by_itself_unless_it_is_renewed(committed: Job) -> None:
    lease = acquire_lease(committed.root, 4, "slow", ttl_s=60)
    now = time.time()
    os.utime(lease.path, (now - 50, now - 50))
    assert list_leases(committed.root, clock=lambda: now + 9)
    lease.renew()
    assert list_leases(committed.root, clock=lambda: now + 50)
    assert list_leases(committed.root, clock=lambda: now + 70) == []
    with pytest.raises(CommitError, match="had ended"):
        lease.renew()


def ended_lease(job: Job) -> Lease:
    lease = acquire_lease(job.root, 4, "slow", ttl_s=60)
    os.utime(lease.path, (0, lease.path.stat().st_mtime - 100))
    return lease


@pytest.mark.parametrize("ttl_s", [math.inf, math.nan, -1.0, 1e12, True, "60"])
def test_a_lease_of_no_number_of_seconds_is_refused(committed: Job, ttl_s: float) -> None:
    with pytest.raises(ConfigError, match=r"step 4 of .* for the lease of me; .* pin the step"):
        acquire_lease(committed.root, 4, "me", ttl_s=ttl_s)
    assert list_leases(committed.root) == []
    with acquire_lease(committed.root, 4, "me", ttl_s=1e11):
        (lease,) = list_leases(committed.root)
        assert (lease.holder, lease.ttl_s) == ("me", 1e11)


def test_a_lease_renewed_during_its_removal_is_kept(committed: Job) -> None:
    lease = ended_lease(committed)
    with when_opened(committed.root / LOCK, lease.renew):
        assert [found.step for found in list_leases(committed.root)] == [4]
    assert lease.path.exists()


def test_a_lease_is_renewed_or_an_error_is_raised(committed: Job) -> None:
    lease = ended_lease(committed)
    told: list[str] = []

    def renew() -> None:
        try:
            lease.renew()
            told.append("renewed")
        except CommitError as error:
            told.append(str(error))

    reader = threading.Thread(target=renew)
    asked = threading.Event()

    def meanwhile() -> None:
        with when_opened(committed.root / LOCK, asked.set):
            reader.start()
            while reader.is_alive() and not asked.wait(0.01):
                pass

    with when_removed(lease.path, meanwhile):
        list_leases(committed.root)
    reader.join()
    assert told != ["renewed"] or lease.path.exists()


def test_a_late_renewal_counts_as_long_as_the_step_is_there(committed: Job) -> None:
    lease = ended_lease(committed)
    lease.renew()
    assert [found.step for found in list_leases(committed.root)] == [4]
    os.utime(lease.path, (0, lease.path.stat().st_mtime - 100))
    (committed.root / "global_step_4").rename(committed.root / "removed")
    with pytest.raises(CommitError, match="is not committed"):
        lease.renew()


def test_a_removal_leaves_ended_leases_to_the_next_look(committed: Job) -> None:
    lease = ended_lease(committed)
    with acquire_removal_lock(committed.root):
        assert list_leases(committed.root) == []
    assert lease.path.exists()
    assert list_leases(committed.root) == []
    assert not lease.path.exists()


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
    day = time.time() + LONG_LEASE_S
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
        "import os, signal\nfrom trinity_sync.storage.leases import acquire_lease\n"
        f"acquire_lease({str(committed.root)!r}, 4, 'killed')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    folder = committed.root / ".trinity_sync/leases"
    assert len(list(folder.iterdir())) == 1
    assert list_leases(committed.root) == []
    assert list(folder.iterdir()) == []


def test_a_reader_in_another_container_is_not_taken_for_dead(committed: Job) -> None:
    script = (
        "from trinity_sync.storage.leases import acquire_lease\n"
        f"acquire_lease({str(committed.root)!r}, 4, 'unseen')\nprint()"
    )
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run([*alone, sys.executable, "-c", script], capture_output=True)
    if b"unshare" in done.stderr:
        pytest.skip("a process may have no PID namespace of its own here")
    done.check_returncode()
    assert [lease.holder for lease in list_leases(committed.root)] == ["unseen"]
    assert list_leases(committed.root, clock=lambda: time.time() + 601) == []


def test_a_reader_on_another_machine_of_the_same_name_is_not_taken_for_dead(
    committed: Job, tmp_path: Path
) -> None:
    """The first PID namespace has the same number on all machines; their boots differ."""
    boot = tmp_path / "boot_id"
    boot.write_text(f"{uuid.uuid4()}\n")
    script = (
        "from trinity_sync.storage.leases import acquire_lease\n"
        f"acquire_lease({str(committed.root)!r}, 4, 'elsewhere')\n"
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
    assert list_leases(committed.root, clock=lambda: time.time() + 601) == []


def test_what_is_not_committed_is_neither_leased_nor_pinned(committed: Job) -> None:
    with pytest.raises(CommitError, match=r"step 5 .* is not committed"):
        acquire_lease(committed.root, 5, "early")
    with pytest.raises(CommitError, match=r"step 5 .* is not committed"):
        pin(committed.root, 5)


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
            acquire_lease(committed.root, 4, "late")
        except CommitError as error:
            answers.append(error)

    with acquire_removal_lock(committed.root):
        reader = threading.Thread(target=read)
        reader.start()
        (committed.root / "global_step_4").rename(committed.root / "removed")
        assert answers == []
    reader.join()
    assert "is not committed" in str(answers[0])


def test_a_torn_lease_or_pin_still_holds(committed: Job) -> None:
    pin(committed.root, 4)
    lease = acquire_lease(committed.root, 4, "reader")
    (committed.root / ".trinity_sync/pins/4.json").write_text('{"st')
    lease.path.write_text("")
    assert [pin.step for pin in list_pins(committed.root)] == [4]
    assert [lease.step for lease in list_leases(committed.root)] == [4]


def test_what_was_read_is_good_although_its_lease_cannot_be_removed(
    committed: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with acquire_lease(committed.root, 4, "a reader") as lease:
        lease.path.unlink()
        lease.path.mkdir()  # as a mount whose server is gone
    assert "which ends by itself" in caplog.text
