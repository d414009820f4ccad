"""Who drives a save writes how it ended, and all ranks read it, processes that ask no server."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.dying import end_of
from tests.support.forked import Program
from tests.support.job import Job
from trinity_sync.client.commit_watcher import MANY, CommitWatcher
from trinity_sync.client.save_trigger import SaveTrigger
from trinity_sync.errors import SaveTimeoutError
from trinity_sync.saves import journal as journals
from trinity_sync.saves.journal import KEEP_S, Entry, Journal, SaveState, append
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings

RANK = """
import json, sys, time
from pathlib import Path
from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.save_trigger import SaveTrigger
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.snapshot.spool import JobSpool

rank, root, spool, images = json.loads(sys.argv[1])
trigger = SaveTrigger(Settings(spool=Path(spool).parent))
watcher = CommitWatcher(trigger, JobSpool(Path(spool)), rank=rank)
save = {"root": root, "step": 4, "run": 1, "identity": read_identity(root)}
request = SaveRequest(**save, components=["model"])
watcher.follow(request, images=images)
print("follows", flush=True)
for line in sys.stdin:
    failures = watcher.wait(time.monotonic() + 60)
    seconds = list(watcher.commit_seconds.values())
    print(json.dumps({"failures": failures, "seconds": seconds}), flush=True)
watcher.close()
"""
ZEROS = {"model": {"w": torch.zeros(3)}}


class Rank:
    """A rank in a process of its own, which follows the save of step 4."""

    def __init__(self, process: Program) -> None:
        self.process, self.stdin, self.stdout = process, process.stdin, process.stdout

    def begin_to_wait(self) -> None:
        print("wait", file=self.stdin, flush=True)

    def told(self) -> dict[str, Any]:
        """What its wait has ended with."""
        return dict(json.loads(self.stdout.readline()))

    def wait(self) -> dict[str, Any]:
        self.begin_to_wait()
        return self.told()


@contextmanager
def rank_of(job: Job, rank: int, images: list[str] | None = None) -> Iterator[Rank]:
    arguments = json.dumps([rank, str(job.root), str(job.spool.folder), images or []])
    made = Rank(Program(RANK, arguments, talks=True))
    try:
        assert made.stdout.readline() == "follows\n"
        yield made
    finally:
        made.process.clear()


@pytest.fixture
def pair(job: Job) -> Job:
    """A job of two ranks, which have staged the model of step 4."""
    job.world_size = 2
    for rank in range(2):
        job.stage(4, ZEROS, rank=rank)
    return job


def request_of(job: Job, step: int = 4, run: int = 1) -> SaveRequest:
    return job.request(step, run=run, components=("model",))


def images_of(job: Job, rank: int) -> list[str]:
    return [each.ticket.image for each in job.spool.tickets()[0] if each.ticket.rank == rank]


def tell(request: SaveRequest, state: SaveState, message: str = "", *, start: int = 1) -> None:
    append(request, state, message, url="http://its/page", start=start)


def read(request: SaveRequest) -> Entry | None:
    journal = Journal.of(request)
    journal.read()
    return journal.find(request.key)


@contextmanager
def leader(job: Job) -> Iterator[CommitWatcher]:
    trigger = SaveTrigger(Settings(spool=job.spool.folder.parent))
    watcher = CommitWatcher(trigger, job.spool, rank=0)
    yield watcher
    watcher.close()


def test_a_rank_sees_a_commit_in_the_root(pair: Job) -> None:
    with rank_of(pair, 1, images_of(pair, 1)) as other:
        other.begin_to_wait()
        pair.commit(4)
        told = other.told()
    assert told["failures"] == []
    assert 0 <= told["seconds"][0] < 60


def test_a_rank_that_waits_late_knows_how_long_its_commit_took(pair: Job) -> None:
    request = request_of(pair)
    trigger = SaveTrigger(Settings(spool=pair.spool.folder.parent))
    other = CommitWatcher(trigger, pair.spool, rank=1)
    other.follow(request)
    pair.commit(4)
    other._pending[request.key].since -= 3600  # an hour of training follows
    assert other.wait(time.monotonic() + 30) == []
    assert 0 <= other.commit_seconds[request.key] < 60
    other.close()


def test_all_ranks_read_why_a_save_failed(pair: Job) -> None:
    request = request_of(pair)
    with rank_of(pair, 1) as other, leader(pair) as first:
        other.begin_to_wait()
        first.follow(request)
        tell(request, "pending")
        tell(request, "failed", "the disk is full")
        failures = first.wait(time.monotonic() + 60)
        told = other.told()
    assert failures[0].endswith(
        f"committed: the disk is full (trinity-sync runs {pair.root}, http://its/page)"
    )
    assert told == {"failures": failures, "seconds": []}


def test_a_rank_that_submits_a_failed_save_again_hears_of_the_second_outcome(pair: Job) -> None:
    request = request_of(pair)
    trigger = SaveTrigger(Settings(spool=pair.spool.folder.parent))
    other = CommitWatcher(trigger, pair.spool, rank=1)
    for attempt, why in enumerate(("the disk is full", "the disk is full again"), 1):
        request = request.model_copy(update={"attempt": attempt})
        other.follow(request, images=images_of(pair, 1))
        with pytest.raises(SaveTimeoutError):
            other.wait(time.monotonic() + 0.5)
        tell(request, "pending")
        tell(request, "failed", why)
        (failure,) = other.wait(time.monotonic() + 30)
        assert f"{why} (" in failure
    other.close()


@pytest.mark.parametrize("value", [0, 1])
def test_a_rank_whose_image_comes_after_the_commit_compares_it(job: Job, value: int) -> None:
    job.stage(4, ZEROS)
    job.commit(4)
    job.stagers.pop(0).close()
    job.stage(4, {"model": {"w": torch.full((3,), float(value))}})
    late = images_of(job, 0)
    with (
        rank_of(job, 1, late) as other,
        leader(job) as first,
    ):
        tell(request_of(job), "completed")
        first.follow(request_of(job))  # with the images that were committed
        assert first.wait(time.monotonic() + 60) == []
        told = other.wait()
    if value:
        assert "model of step 4, role actor, rank 0 is not saved" in told["failures"][0]
    else:
        assert told["failures"] == []
        assert job.spool.tickets() == ([], [])


def test_a_rank_that_outlives_rank_0_reads_why_a_save_failed(pair: Job) -> None:
    with rank_of(pair, 1) as other:
        with rank_of(pair, 0) as first:
            first.process.kill()
            first.process.wait()
        tell(request_of(pair), "failed", "the disk is full")
        told = other.wait()
    assert "the disk is full" in told["failures"][0]


def test_a_rank_that_never_waits_keeps_few_saves_and_no_thread(job: Job) -> None:
    with leader(job) as first:
        trigger = SaveTrigger(Settings(spool=job.spool.folder.parent))
        other = CommitWatcher(trigger, job.spool, rank=1)
        job.stage(4, ZEROS)
        job.commit(4)
        for number in range(MANY - 1):
            other.follow(request_of(job).model_copy(update={"run_key": f"key {number}"}))
        assert other._thread is None
        assert len(other._pending) == MANY - 1
        other.follow(request_of(job))
        while (thread := other._thread) or len(other._pending):
            if thread:
                thread.join()
        assert other.wait(time.monotonic()) == []
        assert len(other.commit_seconds) == MANY
        other.close()
        assert first.wait(time.monotonic()) == []


def path_of(job: Job, run: int) -> Path:
    (path,) = job.root.glob(f".trinity_sync/outcomes/run{run}-*.jsonl")
    return path


def test_files_of_earlier_runs_are_removed_once_they_are_old(job: Job) -> None:
    folder = job.root / ".trinity_sync/outcomes"
    old = time.time() - KEEP_S - 60
    for run in (1, 2, 3, 12):
        tell(request_of(job, run=run), "completed")
        if run != 2:
            os.utime(path_of(job, run), (old, old))
    (folder / "other.jsonl").touch()
    os.utime(folder / "other.jsonl", (old, old))
    tell(request_of(job, run=11), "completed")
    left = sorted(path.name.partition("-")[0] for path in folder.iterdir())
    assert left == ["other.jsonl", "run11", "run12", "run2"]


def test_what_cannot_be_removed_of_an_earlier_run_stops_no_writer(job: Job) -> None:
    folder, old = job.root / ".trinity_sync/outcomes", time.time() - KEEP_S - 60
    folder.mkdir(parents=True)
    (folder / "run1-other.jsonl").symlink_to("nowhere")  # as little opened as another user's file
    (folder / "run2-other.jsonl").mkdir()
    os.utime(folder / "run2-other.jsonl", (old, old))
    tell(request_of(job, run=3), "failed")
    entry = read(request_of(job, run=3))
    assert entry
    assert entry.state == "failed"


def test_a_file_that_was_removed_is_begun_again(job: Job) -> None:
    one, two = request_of(job, 1), request_of(job, 2)
    tell(one, "pending")
    path_of(job, 1).unlink()
    tell(two, "pending")
    assert read(one) is None
    assert read(two)


def test_a_root_that_was_removed_is_not_created_again(tmp_path: Path) -> None:
    tell(SaveRequest(root=str(tmp_path / "gone"), step=1, run=1), "failed")
    assert [*tmp_path.iterdir()] == []


def test_a_line_that_is_cut_off_is_passed_over(job: Job) -> None:
    one, two, three = (request_of(job, step) for step in (1, 2, 3))
    tell(one, "failed", "why")
    path, journal = path_of(job, 1), Journal.of(one)
    (line,) = path.read_text().splitlines()
    with path.open("a") as file:
        file.write(line.replace(one.key, two.key)[:-20])
    journal.read()
    entry = journal.find(one.key)
    assert entry
    assert (entry.state, entry.message, entry.url) == ("failed", "why", "http://its/page")
    assert journal.find(two.key) is None
    with path.open("a") as file:
        file.write("\n" + line.replace(one.key, three.key) + "\n")
    journal.read()
    assert journal.find(two.key) is None  # it has not all that a line has
    assert journal.find(three.key)


def test_a_line_that_is_being_written_is_read_once_it_is_complete(job: Job) -> None:
    one, two = (request_of(job, step) for step in (1, 2))
    tell(one, "failed")
    path, journal = path_of(job, 1), Journal.of(one)
    line = path.read_text().replace(one.key, two.key)
    for part, known in ((line[:-20], False), (line[-20:], True)):
        with path.open("a") as file:
            file.write(part)
        journal.read()
        assert (journal.find(two.key) is not None) == known


def test_of_a_run_that_is_retried_the_last_start_counts_whatever_the_clocks_say(job: Job) -> None:
    request, journal = request_of(job), Journal.of(request_of(job))
    told: list[tuple[SaveState, int, SaveState]] = [
        ("failed", 1, "failed"),
        ("pending", 1, "failed"),  # of another node's saver, which begins later
        ("pending", 2, "pending"),
        ("failed", 0, "pending"),  # of the saver, when the flow run has begun
        ("completed", 2, "completed"),
        ("failed", 1, "completed"),
    ]
    for state, start, known in told:
        tell(request, state, start=start)
        for each in (journal, Journal.of(request)):
            each.read()
            entry = each.find(request.key)
            assert entry
            assert entry.state == known


def test_of_a_save_that_was_taken_over_what_its_earlier_owner_tells_counts_no_longer(
    job: Job,
) -> None:
    request, journal = request_of(job), Journal.of(request_of(job))
    tell(request, "left", "the stack does not see it")
    left = read(request)
    told: list[tuple[SaveState, Entry | None, SaveState]] = [
        ("pending", left, "pending"),
        ("failed", None, "pending"),
        ("failed", left, "failed"),
        ("left", None, "failed"),
        ("completed", None, "failed"),  # then its manifest is there
    ]
    for state, over, known in told:
        append(request, state, over=over, start=0 if over else 1)
        journal.read()
        entry = journal.find(request.key)
        assert entry
        assert (entry.state, entry.start) == (known, 1)
    tell(request, "pending", start=2)
    journal.read()
    assert not journal.list_failures()


def test_of_more_saves_than_a_reader_keeps_it_forgets_those_that_are_committed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_REMEMBERED", 4)
    tell(request_of(job, run=10), "failed")  # its file is read before that of run 2
    for step in range(6):
        tell(request_of(job, step, run=2), "completed")
    journal = Journal(job.root)
    journal.read()
    assert [(each.run, each.step) for each in journal.list_failures()] == [(10, 4)]


def test_a_text_in_the_journal_leaves_a_save_to_what_has_begun_it_or_to_the_saver(
    pair: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with leader(pair) as first:
        first.follow(request_of(pair))
        texts = {"pending": "2 of 3 files are written", "left": "the stack does not see its images"}
        for state, text in texts.items():
            tell(request_of(pair), state, text)  # type: ignore[arg-type]
            with pytest.raises(SaveTimeoutError):
                first.wait(time.monotonic() + 0.5)
            assert (text in caplog.text) == (state == "left")


def test_a_forked_child_has_a_file_of_its_own(job: Job) -> None:
    tell(request_of(job, 1), "pending")
    assert end_of(lambda: tell(request_of(job, 2), "pending")) == 0
    assert len([*job.root.glob(".trinity_sync/outcomes/*.jsonl")]) == 2
    assert read(request_of(job, 1))
    assert read(request_of(job, 2))


def test_a_disk_that_is_full_for_a_while_hides_no_end(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    request = request_of(job)
    tell(request, "pending")
    path = path_of(job, 1)
    path.unlink()
    path.mkdir()
    tell(request, "pending")
    assert "Ranks that wait for it do not learn it" in caplog.text
    writing = threading.Thread(target=append, args=[request, "failed"], kwargs={"patience_s": 60.0})
    writing.start()
    writing.join(0.1)
    path.rmdir()
    writing.join()
    entry = read(request)
    assert entry
    assert entry.state == "failed"
