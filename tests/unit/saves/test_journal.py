"""Who drives a save writes how it ended, and all ranks read it, which ask no server."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.dying import end_of
from tests.support.job import Job
from trinity_sync.client.commit_watcher import MANY, CommitWatcher
from trinity_sync.client.saver_control import SaveTrigger
from trinity_sync.errors import SaveTimeoutError
from trinity_sync.saves import journal as journals
from trinity_sync.saves.journal import KEEP_S, Entry, Journal, SaveState, append, read_entry
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings

ZEROS = {"model": {"w": torch.zeros(3)}}


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


@contextmanager
def following(job: Job, rank: int = 1) -> Iterator[CommitWatcher]:
    """The watcher of a rank."""
    trigger = SaveTrigger(Settings(spool=job.spool.folder.parent))
    with closing(CommitWatcher(trigger, job.spool, rank=rank)) as watcher:
        yield watcher


def test_a_rank_that_waits_late_knows_how_long_its_commit_took(pair: Job) -> None:
    request = request_of(pair)
    with following(pair) as other:
        other.follow(request)
        pair.commit(4)
        other._pending[request.key].since -= 3600  # an hour of training follows
        assert other.wait(time.monotonic() + 30) == []
        assert 0 <= other.commit_seconds[request.key] < 60


def test_a_rank_that_submits_a_failed_save_again_hears_of_the_second_outcome(pair: Job) -> None:
    request, where = request_of(pair), f"(trinity-sync runs {pair.root}, http://its/page)"
    with following(pair) as other:
        for attempt, why in enumerate(("the disk is full", "the disk is full again"), 1):
            request = request.model_copy(update={"attempt": attempt})
            other.follow(request, images=images_of(pair, 1))
            with pytest.raises(SaveTimeoutError):
                other.wait(time.monotonic() + 0.5)
            tell(request, "begun")
            tell(request, "failed", why)
            (failure,) = other.wait(time.monotonic() + 30)
            assert failure.endswith(f"committed: {why} {where}")


def test_a_rank_that_never_waits_keeps_few_saves_and_no_thread(job: Job) -> None:
    job.commit_states(4, ZEROS)
    with following(job) as other:
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


def path_of(job: Job, run: int) -> Path:
    (path,) = job.root.glob(f".trinity_sync/journal/run{run}-*.jsonl")
    return path


def test_files_of_earlier_runs_are_removed_once_they_are_old(job: Job) -> None:
    folder = job.root / ".trinity_sync/journal"
    old = time.time() - KEEP_S - 60
    for run in (1, 2, 3, 12):
        tell(request_of(job, run=run), "completed")
        if run != 2:
            os.utime(path_of(job, run), (old, old))
    (folder / "other.jsonl").touch()
    (folder / "run4-other.jsonl").symlink_to("nowhere")  # opened as little as another user's file
    (folder / "run5-other.jsonl").mkdir()
    for name in ("other.jsonl", "run5-other.jsonl"):
        os.utime(folder / name, (old, old))
    tell(request_of(job, run=11), "failed")
    left = sorted(path.name.partition("-")[0] for path in folder.iterdir())
    assert left == ["other.jsonl", "run11", "run12", "run2", "run4", "run5"]
    assert read_entry(request_of(job, run=11)).state == "failed"


def test_a_file_that_was_removed_is_begun_again(job: Job) -> None:
    one, two = request_of(job, 1), request_of(job, 2)
    tell(one, "begun")
    path_of(job, 1).unlink()
    tell(two, "begun")
    assert read_entry(one) is None
    assert read_entry(two)


def test_a_root_that_was_removed_is_not_created_again(tmp_path: Path) -> None:
    tell(SaveRequest(root=str(tmp_path / "gone"), step=1, run=1), "failed")
    assert [*tmp_path.iterdir()] == []


def test_a_line_is_read_once_it_is_complete_and_passed_over_if_it_was_cut_off(job: Job) -> None:
    one, cut, three = (request_of(job, step) for step in (1, 2, 3))
    tell(one, "failed", "why")
    path, journal = path_of(job, 1), Journal.of(one)
    (line,) = path.read_text().splitlines()
    last = line.replace(one.key, three.key) + "\n"
    parts = {
        line.replace(one.key, cut.key)[:-20] + "\n" + last[:-20]: (True, False, False),
        last[-20:]: (True, False, True),
    }
    for part, known in parts.items():
        with path.open("a") as file:
            file.write(part)
        journal.read()
        assert tuple(journal.find(each.key) is not None for each in (one, cut, three)) == known
    entry = journal.find(one.key)
    assert (entry.state, entry.message, entry.url) == ("failed", "why", "http://its/page")


def test_of_a_run_that_is_retried_the_last_start_counts_whatever_the_clocks_say(job: Job) -> None:
    request, journal = request_of(job), Journal.of(request_of(job))
    told: list[tuple[SaveState, int, SaveState]] = [
        ("failed", 1, "failed"),
        ("begun", 1, "failed"),  # of another node's saver, which begins later
        ("begun", 2, "begun"),
        ("failed", 0, "begun"),  # of the saver, when the flow run has begun
        ("completed", 2, "completed"),
        ("failed", 1, "completed"),
    ]
    for state, start, known in told:
        tell(request, state, start=start)
        journal.read()
        assert (journal.find(request.key).state, read_entry(request).state) == (known, known)


def test_of_a_save_that_was_taken_over_what_its_earlier_owner_tells_counts_no_longer(
    job: Job,
) -> None:
    request, journal = request_of(job), Journal.of(request_of(job))
    tell(request, "left", "the stack does not see it")
    left = read_entry(request)
    told: list[tuple[SaveState, Entry | None, SaveState]] = [
        ("begun", left, "begun"),
        ("failed", None, "begun"),
        ("failed", left, "failed"),
        ("left", None, "failed"),
        ("completed", None, "failed"),  # then its manifest is there
    ]
    for state, over, known in told:
        append(request, state, over=over, start=0 if over else 1)
        journal.read()
        entry = journal.find(request.key)
        assert (entry.state, entry.start) == (known, 1)
    tell(request, "begun", start=2)
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


def test_what_is_left_to_the_saver_is_waited_for_and_said(
    pair: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with following(pair, rank=0) as first:
        first.follow(request_of(pair))
        tell(request_of(pair), "left", "the stack does not see its images")
        with pytest.raises(SaveTimeoutError):
            first.wait(time.monotonic() + 0.5)
    assert "the stack does not see its images" in caplog.text


def test_a_forked_child_has_a_file_of_its_own(job: Job) -> None:
    tell(request_of(job, 1), "begun")
    assert end_of(lambda: tell(request_of(job, 2), "begun")) == 0
    assert len([*job.root.glob(".trinity_sync/journal/*.jsonl")]) == 2
    assert read_entry(request_of(job, 1))
    assert read_entry(request_of(job, 2))


def test_a_disk_that_is_full_for_a_while_hides_no_end(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    request = request_of(job)
    tell(request, "begun")
    path = path_of(job, 1)
    path.unlink()
    path.mkdir()
    tell(request, "begun")
    assert "Ranks that wait for it do not learn it" in caplog.text
    writing = threading.Thread(target=append, args=[request, "failed"], kwargs={"patience_s": 60.0})
    writing.start()
    writing.join(0.1)
    path.rmdir()
    writing.join()
    assert read_entry(request).state == "failed"
