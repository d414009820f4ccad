"""Files are written over once they are spare, and linked while they have not changed.

A spare file is never written over while another process could see it.
"""

import itertools
import mmap
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from tests.support.disk import flip_a_byte
from tests.support.dying import as_another_user, in_a_process
from tests.support.job import Job
from tests.support.meanwhile import when_renamed
from trinity_sync.errors import CommitError, SaveError
from trinity_sync.layout import step_folder
from trinity_sync.retention.policies import parse_policy
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.storage.block_reuse import (
    WORTHWHILE,
    acquire_spare,
    list_spares,
    remove_folder,
    remove_spares,
)
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.gc import remove_temporaries
from trinity_sync.storage.restore import load_states
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.uncommitted import is_being_written

PLENTY = 1 << 40


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A folder that is to be removed, with a large file and a small one."""
    folder = tmp_path / "global_step_1"
    folder.mkdir()
    (folder / "shard.pt").write_bytes(b"old" * WORTHWHILE)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_next_save_writes_over_the_files_of_a_replaced_step(job: Job) -> None:
    weight = torch.zeros(WORTHWHILE)
    open_run(job.root, "first", 0)
    for number in (10, 11):
        job.commit_states(number, {"model": {"w": weight + number}})
    replaced = job.root / "global_step_11/actor/model_world_size_1_rank_0.pt"
    inode = replaced.stat().st_ino
    open_run(job.root, "second", 10)
    for number in (11, 12):
        job.commit_states(number, {"model": {"w": weight - number}}, run=2)
    written = replaced.parents[2] / "global_step_12/actor/model_world_size_1_rank_0.pt"
    assert written.stat().st_ino == inode
    assert torch.equal(torch.load(written)["w"], weight - 12)
    assert torch.equal(torch.load(replaced)["w"], weight - 11)


def test_a_smaller_file_is_cut_to_its_size(job: Job) -> None:
    spare = job.root / "old/shard.pt"
    spare.parent.mkdir(parents=True)
    spare.write_bytes(os.urandom(8 * WORTHWHILE))
    inode = spare.stat().st_ino
    remove_folder(job.root, spare.parent, keep=PLENTY)
    manifest = job.commit_states(1, {"model": {"w": torch.ones(WORTHWHILE)}})
    written = job.root / "global_step_1" / manifest.files[0].path
    assert (written.stat().st_ino, written.stat().st_size) == (inode, manifest.files[0].nbytes)
    assert torch.equal(torch.load(written)["w"], torch.ones(WORTHWHILE))


def test_small_files_are_removed_and_spare_files_on_request(tmp_path: Path, step: Path) -> None:
    shutil.copytree(step, other := tmp_path / "global_step_2")
    remove_folder(tmp_path, step, keep=PLENTY)
    assert not step.exists()
    assert acquire_spare(tmp_path, tmp_path / "one", WORTHWHILE)
    assert not acquire_spare(tmp_path, tmp_path / "other", WORTHWHILE)
    remove_folder(tmp_path, other, keep=PLENTY)
    remove_spares(tmp_path)
    assert not acquire_spare(tmp_path, tmp_path / "other", WORTHWHILE)


def test_a_file_that_a_process_reads_is_not_reused(tmp_path: Path, step: Path) -> None:
    with (step / "shard.pt").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)  # as torch.load(mmap=True)
    remove_folder(tmp_path, step, keep=PLENTY)
    assert not acquire_spare(tmp_path, tmp_path / "one", WORTHWHILE)
    assert mapped[:6] == b"oldold"


def test_a_file_that_is_opened_while_its_step_is_removed_is_not_reused(
    tmp_path: Path, step: Path
) -> None:
    """By a program that walks the step by its descriptor: tar, rsync, os.fwalk."""
    opened: list[int] = []
    folder = os.open(step, os.O_RDONLY | os.O_DIRECTORY)

    def walk() -> None:
        opened.append(os.open("shard.pt", os.O_RDONLY, dir_fd=folder))

    with when_renamed(step / "shard.pt", walk):
        remove_folder(tmp_path, step, keep=PLENTY)
    assert not acquire_spare(tmp_path, tmp_path / "one", WORTHWHILE)
    assert os.pread(opened[0], 6, 0) == b"oldold"
    for fd in (*opened, folder):
        os.close(fd)


def test_killed_at_any_instant_no_linked_file_is_written_over(tmp_path: Path) -> None:
    committed, notes = tmp_path / "committed", tmp_path / "notes"
    notes.mkdir()
    committed.write_bytes(b"good" * WORTHWHILE)
    died = True
    for die_before in itertools.count(1):
        step = tmp_path / f"step-{die_before}"
        step.mkdir()
        os.link(committed, step / "shard.pt")
        (step / "own.pt").write_bytes(b"old" * WORTHWHILE)
        body = partial(remove_folder, tmp_path, step, keep=PLENTY)
        died = in_a_process(body, notes, die_before=die_before) == die_before and step.exists()
        while acquire_spare(tmp_path, tmp_path / "next", WORTHWHILE):
            (tmp_path / "next").write_bytes(b"new")
        assert committed.read_bytes() == b"good" * WORTHWHILE
        if not died:
            break
    assert die_before > 3


@pytest.mark.parametrize("how", ["is open", "has another name"])
def test_a_spare_file_that_has_another_user_is_not_reused(
    tmp_path: Path, step: Path, how: str
) -> None:
    remove_folder(tmp_path, step, keep=PLENTY)
    (spare,) = (tmp_path / ".trinity_sync/spare").iterdir()
    if how == "has another name":
        os.link(spare, tmp_path / "a copy by links")
    with spare.open("rb") if how == "is open" else nullcontext():
        assert not acquire_spare(tmp_path, tmp_path / "one", WORTHWHILE)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("kind", ["open to all", "another user's", "link", "folder"])
def test_files_of_other_users_among_the_spare_files_are_not_reused(
    tmp_path: Path, kind: str
) -> None:
    spare, elsewhere = tmp_path / ".trinity_sync/spare/1", tmp_path / "elsewhere"
    spare.parent.mkdir(parents=True)
    elsewhere.write_bytes(b"mine" * WORTHWHILE)
    if kind == "link":
        spare.symlink_to(elsewhere)
    elif kind == "folder":
        spare.mkdir()
    else:
        spare.write_bytes(b"old" * WORTHWHILE)
        if kind == "open to all":
            spare.chmod(0o666)
        elif os.getuid():
            pytest.skip("only root can give files away")
        else:
            os.chown(spare, 12345, 12345)
    assert bool(list_spares(tmp_path)) == (kind not in ("link", "folder"))
    assert not acquire_spare(tmp_path, tmp_path / "one", WORTHWHILE)
    assert not (tmp_path / "one").is_symlink()
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    "mode", [0o755, 0o744, 0o711, None], ids=["read", "list", "enter", "a file"]
)
def test_a_folder_of_spare_files_that_another_user_has_made_stops_neither_write_nor_removal(
    tmp_path: Path, step: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    remove_folder(tmp_path, step, keep=PLENTY)
    spares = tmp_path / ".trinity_sync/spare"
    if mode is None:  # it is a file
        shutil.rmtree(spares)
        spares.touch()
    else:
        spares.chmod(mode)
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)  # the folders above it are closed

    def write_and_remove() -> None:
        own = Path("own")
        own.mkdir()
        assert not acquire_spare(".", own / "one", WORTHWHILE)
        (own / "old").write_bytes(b"old" * WORTHWHILE)
        remove_folder(".", own, keep=PLENTY)
        assert not own.exists()

    as_another_user(write_and_remove)


def test_spare_files_stay_below_their_limit(tmp_path: Path, step: Path) -> None:
    for name in ("second", "third"):
        (step / name).write_bytes(b"old" * WORTHWHILE)
    remove_folder(tmp_path, step, keep=7 * WORTHWHILE)
    taken = [acquire_spare(tmp_path, tmp_path / str(n), WORTHWHILE) for n in range(3)]
    assert taken == [True, True, False]


def test_a_spare_file_is_acquired_by_one_writer_only(tmp_path: Path, step: Path) -> None:
    for number in range(20):
        (step / f"{number}.pt").write_bytes(bytes(WORTHWHILE))
    remove_folder(tmp_path, step, keep=PLENTY)
    with ThreadPoolExecutor(8) as writers:
        taken = list(
            writers.map(
                lambda n: acquire_spare(tmp_path, tmp_path / f"t{n}", WORTHWHILE), range(40)
            )
        )
    assert sum(taken) == 21
    assert len({path.stat().st_ino for path in tmp_path.glob("t*")}) == 21


def test_the_best_fitting_spare_file_is_acquired(tmp_path: Path) -> None:
    step = tmp_path / "step"
    step.mkdir()
    for size in (1, 2, 8):
        (step / str(size)).write_bytes(bytes(size * WORTHWHILE))
    remove_folder(tmp_path, step, keep=PLENTY)
    sizes = []
    for number, wanted in enumerate((2, 9, 1)):
        acquire_spare(tmp_path, tmp_path / str(number), wanted * WORTHWHILE)
        sizes.append((tmp_path / str(number)).stat().st_size // WORTHWHILE)
    assert sizes == [2, 8, 1]


@pytest.mark.skipif(os.getuid() != 0, reason="needs a mount of its own")
def test_spare_files_on_a_full_disk_do_not_fail_a_retry(job: Job, small_disk: Path) -> None:
    job.root = small_disk
    room = os.statvfs(small_disk)
    step = small_disk / "old"
    step.mkdir()
    for name in ("one", "other"):
        (step / name).write_bytes(bytes(room.f_bavail * room.f_frsize // 2 - WORTHWHILE // 2))
    remove_folder(small_disk, step, keep=PLENTY)
    job.stage(1, {"model": {"w": torch.zeros(room.f_bavail * room.f_frsize * 3 // 4 // 4)}})
    with pytest.raises(SaveError, match="No space left"):
        job.commit(1)
    job.commit(1)
    require_committed(small_disk, 1)


@pytest.mark.parametrize("handled", [False, True], ids=["by default", "handled"])
def test_opening_a_leased_file_sends_no_signal_to_its_process(
    tmp_path: Path, handled: bool
) -> None:
    """The kernel tells the holder of a lease by SIGIO, which ends a process by default."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    look = """
        import signal, subprocess, sys, threading
        from pathlib import Path
        from trinity_sync.fs.locks import has_no_other_users
        seen = []
        if sys.argv[3] == "True":
            signal.signal(signal.SIGIO, lambda *_: seen.append(1))
        opener = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
        def look():
            while opener.poll() is None:
                has_no_other_users(Path(sys.argv[1]))
        thread = threading.Thread(target=look)
        thread.start()
        look()
        thread.join()
        assert not seen
        assert has_no_other_users(Path(sys.argv[1]))
        sys.exit(opener.returncode)
        """
    meet_leases = """
        import os, sys
        met, parent = 0, os.getppid()
        while met < 5 and os.getppid() == parent:
            try:
                os.close(os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK))
            except BlockingIOError:
                met += 1
        """
    command = [sys.executable, "-c", dedent(look), str(path), dedent(meet_leases)]
    subprocess.run([*command, str(handled)], check=True)


NUMBERS = WORTHWHILE // 2
REFERENCE = "actor/model_world_size_1_rank_0.pt"


def save(job: Job, step: int, value: float = 1.0) -> Path:
    """Save a frozen model with an optimizer that steps; return the model's file."""
    states = {
        "model": {"w": torch.full((NUMBERS,), value)},
        "optim": {"w": torch.full((NUMBERS,), 0.1 * step)},
    }
    job.commit_states(step, states)
    return step_folder(job.root, step) / REFERENCE


def test_each_step_that_has_the_file_loads_until_the_last_of_them_is_removed(job: Job) -> None:
    [inode] = {save(job, step).stat().st_ino for step in (1, 2, 3)}
    last = parse_policy("last=1")
    for step in (4, 5):  # the second writes over what the first has left
        prune(job.root, plan_prune(job.root, Rules(last, last), now=2e9))
        assert save(job, step).stat().st_ino == inode
    for step in (4, 5):
        loaded = load_states(job.root, step, "actor", world_size=1)
        assert torch.equal(loaded["model"]["w"], torch.ones(NUMBERS))
        assert torch.equal(loaded["optim"]["w"], torch.full((NUMBERS,), 0.1 * step))


@pytest.mark.parametrize("place", [0.0, 0.4999, 0.77, None])
def test_a_file_that_was_altered_or_others_may_write_is_written_again(
    job: Job, place: float | None
) -> None:
    first = save(job, 1)
    if place is None:
        first.chmod(0o666)
    else:
        flip_a_byte(first, int(place * first.stat().st_size))
    assert save(job, 2).stat().st_ino != first.stat().st_ino
    loaded = load_states(job.root, 2, "actor", world_size=1)
    assert torch.equal(loaded["model"]["w"], torch.ones(NUMBERS))


def test_a_byte_that_flips_is_reported_for_each_step_that_has_it(job: Job) -> None:
    files = [save(job, step) for step in (1, 2)]
    flip_a_byte(files[0], NUMBERS)
    for step in (1, 2):
        with pytest.raises(CommitError, match="digest"):
            load_states(job.root, step, "actor", world_size=1)


@pytest.mark.parametrize("first", ["checkpoint", "state_dict"])
def test_no_file_that_a_function_of_a_sync_may_open_is_shared(job: Job, first: Any) -> None:
    second = "state_dict" if first == "checkpoint" else "checkpoint"
    files = []
    for step, kind in ((1, first), (2, second)):
        job.commit_states(step, {"model": {"w": torch.ones(NUMBERS)}}, kind=kind)
        files.append(step_folder(job.root, step) / REFERENCE)
    assert not files[0].samefile(files[1])


def test_without_hard_links_it_is_written(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no links here")

    first = save(job, 1)
    monkeypatch.setattr(os, "link", refuse)
    assert save(job, 2).stat().st_ino != first.stat().st_ino


def test_its_new_name_is_not_old_for_who_removes_what_saves_have_left(job: Job) -> None:
    old = save(job, 1)
    os.utime(old, (1e9, 1e9))
    job.stage(2, {"model": {"w": torch.ones(NUMBERS)}})
    (written,) = job.persist(2)
    assert old.samefile(written.temporary)
    assert is_being_written(job.root, 2, within_s=60)
    assert not [*remove_temporaries(job.root, images=(), busy=(), is_fresh=(1.1e9).__le__)]
    assert Path(written.temporary).exists()
