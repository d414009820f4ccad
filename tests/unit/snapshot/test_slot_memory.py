"""Slots have memory before saves need it, and give it back when they do not."""

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.support.disk import no_file_above
from tests.support.forked import Program
from tests.support.job import Job, mapped_nbytes
from tests.support.waiting import WAIT_S, until
from tests.unit.conftest import set_limit
from trinity_sync.errors import SpoolError, SpoolFullError
from trinity_sync.fs import file_system as memory
from trinity_sync.fs.atomic import replace_file
from trinity_sync.snapshot import slot
from trinity_sync.snapshot.slot_pool import BESIDE
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.snapshot.stager import Stager

STATE = {"model": {"w": torch.ones(1 << 20)}}
NBYTES = 4 << 20


@pytest.fixture
def stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the part of the time for which the node's processes wait for memory, in percent."""
    (proc := tmp_path / "proc" / "self").mkdir(parents=True)
    (file := proc.parent / "pressure" / "memory").parent.mkdir()
    monkeypatch.setattr(memory, "_PROC", proc)
    return lambda part: replace_file(file, b"some avg10=99.00\nfull avg10=%d.00\n" % part)


class Clock:
    """A clock that the test sets forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(job: Job) -> Clock:
    """The clock of rank 0, by which no commit takes any time."""
    job.stagers[0] = Stager(job.spool, slot_wait_s=WAIT_S, clock=(clock := Clock()))
    return clock


@pytest.fixture
def second(job: Job) -> Path:
    """The second slot of the model."""
    return job.spool.slot("actor", "model", 0, 1)


def test_a_second_slot_has_memory_once_commits_take_more_than_half_of_the_time(
    job: Job, clock: Clock, second: Path
) -> None:
    for step in (1, 2):
        job.commit_states(step, STATE)
        clock.now += 10
    job.stage(3, STATE)
    clock.now += 5
    job.stager().memory.run()
    assert second.stat().st_blocks == 0
    clock.now += 2
    job.stager().memory.run()
    assert mapped_nbytes(second) >= NBYTES


def test_a_second_slot_whose_commits_stay_that_long_is_kept(
    job: Job, clock: Clock, second: Path
) -> None:
    for step in range(1, 15):
        job.stage(step, STATE)
        clock.now += 7
        job.stager().memory.run()
        job.commit(step)
        clock.now += 3
    assert second.stat().st_blocks
    for step in range(15, 26):
        job.commit_states(step, STATE)
        clock.now += 10
    job.stager().memory.run()
    assert second.stat().st_blocks == 0


def test_the_slot_after_a_version_that_readers_have_is_mapped_before_the_next(
    job: Job, second: Path
) -> None:
    job.stager().stage(job.origin(1), STATE, seals=False)
    assert job.stager().publish(job.origin(1), "model")
    job.stager().memory.run()
    assert mapped_nbytes(second) >= NBYTES
    assert mapped_nbytes(second.with_name("actor.model.rank0.0.slot")) >= NBYTES


def test_without_room_for_a_second_slot_a_save_waits_for_the_commit_before(
    job: Job, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job.spool = open_job_spool(small_disk / "spool", job.root)  # of 4 MiB
    state = {"model": {"w": torch.ones(300_000)}}
    with ThreadPoolExecutor(1) as other:
        job.stagers[0] = Stager(job.spool, slot_wait_s=WAIT_S, clock=(clock := Clock()))
        for step in (1, 2):
            job.commit_states(step, state)
            clock.now += 1
        job.stage(3, state)
        clock.now += 1
        job.stager().memory.run()
        assert job.spool.slot("actor", "model", 0, 1).stat().st_blocks == 0
        waiting = other.submit(job.stage, 4, state)
        until(lambda: "Waiting for the image in another slot" in caplog.text, "a warning")
        assert not waiting.done()
        job.commit(3)
        assert waiting.result(WAIT_S).images
        job.commit(4)
        with pytest.raises(SpoolFullError, match="has no room"):
            job.stage(5, {"model": {"w": torch.ones(2 << 20)}})


def test_a_save_waits_rather_than_leave_less_than_a_second_slot_below_a_limit(
    job: Job, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text(f"40 23 0:40 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "memory.max").write_text(f"{64 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{55 << 20}\n")  # two of the rest are not for images
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    job.stage(1, STATE)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(job.stage, 2, STATE)
        job.commit(1)
        waiting.result(WAIT_S)
    assert job.spool.slot("actor", "model", 0, 1).stat().st_blocks == 0


def test_a_save_whose_memory_cannot_be_reserved_keeps_no_slot_from_the_next(job: Job) -> None:
    job.stagers[0] = Stager(job.spool, slots=1, slot_wait_s=0)
    with no_file_above(NBYTES // 2), pytest.raises(SpoolError, match="File too large"):
        job.stage(1, STATE)
    assert job.stage(1, STATE).images


def test_memory_that_others_take_meanwhile_is_not_reserved_in_part(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take() -> bool:
        if path.stat().st_blocks:
            (small_disk / "other").write_bytes(bytes(5 << 19))
        return False

    monkeypatch.setattr(slot, "_RESERVE", 1 << 20)
    own = slot.Slot(path := small_disk / "a.slot")
    with pytest.raises(SpoolFullError):
        own.image(1 << 20, take)
    assert path.stat().st_blocks == path.stat().st_size == 0
    own.close(remove=True)


def test_a_version_goes_where_there_is_memory_for_it(job: Job, small_disk: Path) -> None:
    job.spool = open_job_spool(small_disk / "spool", job.root)  # of 4 MiB
    state = {"model": {"w": torch.ones(300_000)}}
    for step in (1, 2):
        job.stager().stage(job.origin(step), state, seals=False)
        assert job.stager().publish(job.origin(step), "model")


def test_the_first_save_says_what_the_node_needs_before_it_takes_memory(
    job: Job, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spool = open_job_spool(small_disk / "spool", job.root)
    with closing(Stager(spool, ranks=8)) as stager:
        with pytest.raises(SpoolFullError, match="has no room for slot"):
            stager.stage(job.origin(1), STATE)
        assert caplog.text.index("need 67,") < caplog.text.index("--shm-size")
    with closing(Stager(spool)) as stager:
        for step in (1, 2):
            stager.stage(job.origin(step), {"model": {"w": torch.ones(3)}}, seals=False)
    assert caplog.text.count("the images of this job need") == 2


def test_two_roles_are_both_prewarmed(job: Job) -> None:
    for role in ("actor", "critic"):
        job.stager().memory.map_slots(lambda role=role: [(role, "model", 0, NBYTES)])
    job.stager().memory.run(looks=False)
    for role in ("actor", "critic"):
        assert mapped_nbytes(job.spool.slot(role, "model", 0, 0)) >= NBYTES


def test_a_stager_that_is_gone_leaves_no_thread(job: Job) -> None:
    Stager(job.spool).memory.map_slots(lambda: [("actor", "model", 0, NBYTES)])
    gc.collect()
    until(lambda: BESIDE not in {each.name for each in threading.enumerate()}, "the thread to end")


def test_a_version_that_readers_may_want_is_not_given_back(
    job: Job, clock: Clock, second: Path
) -> None:
    job.stage(1, STATE)
    job.stage(2, STATE)
    assert job.stager().publish(job.origin(2), "model")
    job.commit(1)
    job.commit(2)
    for step in range(3, 14):
        job.commit_states(step, STATE)
        clock.now += 10
    job.stager().memory.run(looks=False)
    assert second.stat().st_blocks
    assert job.stager().holds(job.origin(2), "model", STATE["model"])


def test_a_version_is_not_given_back_before_it_is_published(
    job: Job, stalls: Callable[[int], None]
) -> None:
    stalls(85)
    job.stager().stage(job.origin(1), STATE, seals=False)
    job.stager().memory.run()
    assert job.stager().publish(job.origin(1), "model")


def test_memory_is_given_back_once_while_processes_wait_for_memory(
    job: Job, stalls: Callable[[int], None]
) -> None:
    first = job.spool.slot("actor", "model", 0, 0)
    for step, before, is_kept in ((1, 0, False), (2, 85, True), (3, 0, False)):
        stalls(before)
        job.stager().memory.run()
        job.commit_states(step, STATE)
        stalls(85)
        job.stager().memory.run()
        assert (first.stat().st_blocks > 0) is is_kept


def test_a_slot_that_its_process_removes_meanwhile_is_no_error_of_the_first_save(job: Job) -> None:
    (job.spool.folder / "gone.slot").symlink_to("nothing")
    assert job.stage(1, STATE).images


FORKING = """
import gc, os, sys
from pathlib import Path
from tests.support.job import Job

job = Job.open(*map(Path, sys.argv[1:]))
job.stager().memory.map_slots(lambda: [])
with job.stager().memory._wake._cond:  # as while the thread begins to wait
    if not (child := os.fork()):
        job.stagers.clear()
        gc.collect()
        os._exit(0)
os.waitpid(child, 0)
print("ended")
"""


def test_a_process_that_is_forked_while_the_thread_wakes_drops_the_stager(job: Job) -> None:
    program = Program(FORKING, job.root, job.spool.folder.parent)
    assert "ended" in program.end(timeout=WAIT_S)


GROWING = """
import logging, os, sys
from pathlib import Path
import torch
from tests.support.job import Job
from trinity_sync.fs.file_system import find_shortage

group, root, spool = map(Path, sys.argv[1:])
logging.basicConfig(stream=sys.stdout)
(group / "cgroup.procs").write_text(str(os.getpid()))
job = Job.open(root, spool)
state = {"model": {"w": torch.ones(16 << 20)}}
origin = job.origin(1, role="reference")
job.stager().stage(origin, state, seals=False)
assert job.stager().publish(origin, "model")
job.stage(1, state)
job.commit(1)
job.stager().memory.run(looks=False)
taken = []
while job.spool.slot("actor", "model", 0, 0).stat().st_blocks:
    if find_shortage():  # it passes where the file of the step is written back meanwhile
        job.stager().memory.run()
    else:
        taken.append(b"x" * (4 << 20))
for role in ("actor", "reference"):
    print(role, job.spool.slot(role, "model", 0, 0).stat().st_blocks * 512 >> 20)
taken += [b"x" * (4 << 20) for _ in range(14)]  # more than was left
taken.clear()
job.stage(2, state)
job.commit(2)
"""


def test_near_a_memory_limit_what_is_committed_is_given_back_and_a_version_stays(
    job: Job, group: Path
) -> None:
    set_limit(group, 512 << 20)
    said = Program(GROWING, group, job.root, job.spool.folder.parent).end(timeout=WAIT_S)
    assert "bytes of shared memory, because the memory limit of" in said
    assert "actor 0\nreference 66\n" in said


ENDS = """
import sys, threading, torch
from pathlib import Path
from trinity_sync.snapshot.slot import Slot
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.stager import Stager
begun = threading.Event()
def touch(self, nbytes, ended):
    while not ended():
        torch.empty(1).split(1)  # without the GIL for a moment
        begun.set()
Slot.touch = touch
stager = Stager(JobSpool(Path(sys.argv[1])))
stager.memory.map_slots(lambda: [("actor", "model", 0, 1 << 20)])
begun.wait()
"""


def test_a_program_that_closes_nothing_ends_without_an_abort_of_torch(job: Job) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, job.spool.folder], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
