"""Every step has one state, and reading it again after its commit may change that.

Findings, marks and the latest pointer.
"""

import errno
import json
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import invoke
from tests.support.disk import flip_a_byte
from tests.support.dying import end_of
from tests.support.job import Job
from tests.support.meanwhile import when_opened
from trinity_sync.errors import CommitError, ConfigError, SupersededError
from trinity_sync.fs.locks import acquire_commit_lock
from trinity_sync.layout import CORRUPTION_MARK, MANIFEST, step_folder
from trinity_sync.orchestration import on_node
from trinity_sync.remote.upload import replicate
from trinity_sync.storage import verify as verification
from trinity_sync.storage.discovery import (
    Corruption,
    find_newest,
    mark_corrupted,
    read_latest_pointer,
    read_step_state,
    repair_latest_pointer,
    require_committed,
    require_unreplaced,
)
from trinity_sync.storage.runs import open_run
from trinity_sync.storage.verify import (
    VerifiedStep,
    check_files,
    choose_files,
    judge_steps,
    split_evenly,
)

SHARD = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture
def committed(job: Job) -> Job:
    open_run(job.root, "the first one", 0)
    for step in (1, 2, 3):
        job.commit_states(step, {"model": {"w": torch.zeros(3)}})
    return job


@pytest.mark.parametrize("fails", [1, 2])
def test_a_file_that_is_read_once_it_is_opened_again_is_valid(committed: Job, fails: int) -> None:
    path = step_folder(committed.root, 2) / SHARD

    failed = []

    def fail() -> None:
        failed.append(path)
        if len(failed) < fails:
            when_opened(path, fail).__enter__()
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with when_opened(path, fail):
        (judged,) = judge_steps(check_files(choose_files(committed.root, step=2)))
    assert judged.state == ("valid" if fails == 1 else "corrupted")


def test_the_bytes_of_a_file_that_is_read_again_count_once(
    committed: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = verification.digest_file, []

    def fail_once_at_its_end(path: Path, *arguments: Any) -> str:
        digest = real(path, *arguments)
        failed.append(path)
        if len(failed) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return digest

    monkeypatch.setattr(verification, "digest_file", fail_once_at_its_end)
    files, told = choose_files(committed.root, step=2), list[int]()
    checked = check_files(files, on_progress=lambda nbytes, _: told.append(nbytes))
    assert (len(failed), [each.wrong for each in checked]) == (2, [""])
    assert sum(told) == sum(file.record.nbytes for file in files)


@pytest.mark.parametrize("how", ["missing", "truncated", "marked", "manifest"])
def test_a_step_is_corrupted_by_its_files_its_mark_or_its_manifest(
    committed: Job, how: str
) -> None:
    folder = step_folder(committed.root, 2)
    if how == "missing":
        (folder / SHARD).unlink()
    elif how == "truncated":
        (folder / SHARD).write_bytes(b"short")
    elif how == "marked":
        mark_corrupted(committed.root, 2, Corruption({SHARD: "has other bytes"}, 0.0))
    else:
        (folder / MANIFEST).write_text("{")
    found = read_step_state(committed.root, 2)
    assert found.state == "corrupted"
    assert found.reason
    with pytest.raises(CommitError):
        found.require_loadable()


def test_a_step_that_a_later_run_went_back_from_is_superseded_and_can_be_loaded_while_it_is_whole(
    committed: Job,
) -> None:
    open_run(committed.root, "the resumed one", 2)
    states = {step: read_step_state(committed.root, step) for step in (1, 2, 3)}
    assert [found.state for found in states.values()] == ["valid", "valid", "superseded"]
    assert isinstance(states[3].error, SupersededError)
    assert require_committed(committed.root, 3).step == 3
    (step_folder(committed.root, 3) / SHARD).unlink()
    assert read_step_state(committed.root, 3).state == "corrupted"


def test_a_step_whose_run_has_the_number_of_a_lost_one_has_replaced_its_step(
    committed: Job,
) -> None:
    manifest = require_committed(committed.root, 2)
    require_unreplaced(committed.root, manifest)
    with pytest.raises(CommitError, match="run 1 has replaced it"):
        require_unreplaced(committed.root, replace(manifest, run_key="of the lost one"))


def save(job: Job, *steps: int, run: int = 1, scale: float = 1.0) -> None:
    for step in steps:
        state = {"w": torch.arange(5000.0) * step * scale}
        job.commit_states(step, {"model": state, "optim": state}, run=run)


def shard(job: Job, step: int) -> Path:
    return step_folder(job.root, step) / SHARD


def verify(job: Job, **what: int) -> list[VerifiedStep]:
    return judge_steps(check_files(choose_files(job.root, **what)))


def states(verdicts: list[VerifiedStep]) -> dict[int, str]:
    return {verdict.step: verdict.state for verdict in verdicts}


def pointers(job: Job) -> tuple[int | None, int | None]:
    return read_latest_pointer(job.root, "checkpoint"), read_latest_pointer(job.root, "state_dict")


def test_files_beside_the_commit_are_named_and_mark_nothing(job: Job) -> None:
    save(job, 1)
    folder = step_folder(job.root, 1)
    (folder / "transfer_queue").mkdir()
    (folder / "transfer_queue/unit.pkl").write_text("of a killed run")
    (folder / "data.pt").symlink_to("elsewhere")
    for own in (f".nfs{'0' * 24}", f"actor/.model.pt.0.{'ab' * 16}.tmp"):
        (folder / own).touch()
    (found,) = verify(job, newest=5)
    assert (found.state, found.wrong) == (
        "valid",
        "the commit does not contain data.pt, transfer_queue/unit.pkl",
    )
    assert require_committed(job.root, 1)
    assert pointers(job) == (1, 1)


def test_an_error_of_the_reader_marks_no_file(job: Job) -> None:
    def too_many() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    save(job, 1)
    with when_opened(shard(job, 1), too_many), pytest.raises(ConfigError, match="says nothing"):
        verify(job, newest=1)
    assert not list(job.root.glob("*/corrupted.json"))


def test_a_flipped_byte_takes_a_step_out_of_use_everywhere(job: Job) -> None:
    save(job, 1, 2)
    flip_a_byte(shard(job, 2), -2000)
    require_committed(job.root, 2)  # its sizes are right: only reading can tell
    (verdict,) = verify(job, newest=1)
    assert (verdict.step, verdict.state) == (2, "corrupted")
    assert f"{SHARD} has digest xxh3-128:" in verdict.wrong
    assert find_newest(job.root).step == 1
    assert pointers(job) == (1, 1)
    with pytest.raises(CommitError, match=r"step 2 .* is corrupted: .* verified at 20"):
        require_committed(job.root, 2)


def test_a_corrupted_file_takes_all_steps_that_share_it_out_of_use(job: Job) -> None:
    frozen = {"w": torch.arange(600_000.0)}
    save(job, 1)
    for step in (2, 3, 4):
        job.commit_states(step, {"model": frozen, "optim": {"step": step}})
    assert shard(job, 2).samefile(shard(job, 4))
    flip_a_byte(shard(job, 4), -2000)
    shard(job, 2).rename(copy := shard(job, 2).with_name("copy"))
    shard(job, 2).write_bytes(copy.read_bytes())
    flip_a_byte(shard(job, 2), -2000)  # a file of its own, which is valid
    copy.unlink()
    verdicts = verify(job, step=4)
    assert states(verdicts) == {3: "corrupted", 4: "corrupted"}
    assert all(f"{SHARD} has digest" in verdict.wrong for verdict in verdicts)
    assert find_newest(job.root).step == 2
    assert pointers(job) == (2, 2)


def test_a_cut_a_missing_and_a_linked_file_are_named(job: Job, tmp_path: Path) -> None:
    save(job, 1, 2, 3)
    os.truncate(shard(job, 1), 100)
    shard(job, 2).unlink()
    (tmp_path / "elsewhere").write_bytes(shard(job, 3).read_bytes())
    shard(job, 3).unlink()
    shard(job, 3).symlink_to(tmp_path / "elsewhere")
    said = {verdict.step: verdict.wrong for verdict in verify(job, newest=3)}
    assert "has 100 bytes instead of" in said[1]
    assert "is missing" in said[2]
    assert "is outside of the step's folder" in said[3]


def test_what_was_restored_from_a_copy_counts_again(job: Job, tmp_path: Path) -> None:
    save(job, 1, 2)
    shutil.copy(shard(job, 2), tmp_path / "copy")
    flip_a_byte(shard(job, 2), -2000)
    verify(job, step=2)
    assert states(verify(job, step=2)) == {2: "corrupted"}
    shutil.copy(tmp_path / "copy", shard(job, 2))
    assert states(verify(job, step=2)) == {2: "restored"}
    assert pointers(job) == (2, 2)
    assert find_newest(job.root).step == 2


def test_a_valid_file_does_not_hide_a_corrupted_one(job: Job) -> None:
    save(job, 1)
    flip_a_byte(shard(job, 1), -2000)
    verify(job, step=1)
    others = [file for file in choose_files(job.root, step=1) if file.record.path != SHARD]
    (verdict,) = judge_steps(check_files(others))
    assert (verdict.state, SHARD in verdict.wrong) == ("corrupted", True)


def test_a_mark_that_cannot_be_read_stays_until_all_files_are_found_valid(job: Job) -> None:
    save(job, 1, 2)
    flip_a_byte(shard(job, 2), -2000)
    verify(job, step=2)
    mark = step_folder(job.root, 2) / CORRUPTION_MARK
    mark.write_bytes(mark.read_bytes()[:20])
    others = [file for file in choose_files(job.root, step=2) if file.record.path != SHARD]
    for _ in range(2):  # it is written again, and nothing is known of the other files still
        assert states(judge_steps(check_files(others))) == {2: "corrupted"}
        assert find_newest(job.root).step == 1
    flip_a_byte(shard(job, 2), -2000)
    assert states(verify(job, step=2)) == {2: "restored"}
    assert find_newest(job.root).step == 2


def test_a_pointer_stays_where_no_step_can_be_loaded(job: Job) -> None:
    """A resume stops with an error then, and does not begin at zero without a word."""
    save(job, 1)
    flip_a_byte(shard(job, 1), -2000)
    verify(job, newest=1)
    assert pointers(job) == (1, 1)
    assert find_newest(job.root) is None


def test_a_late_finish_does_not_move_the_pointer_to_a_corrupted_step(job: Job) -> None:
    """And a run that comes to it again replaces it, mark and all."""
    save(job, 1, 2)
    flip_a_byte(shard(job, 2), -2000)
    verify(job, step=2)
    job.commit_states(2, {"extra_state": {"w": torch.ones(3)}}, kind="state_dict")
    assert pointers(job) == (1, 1)
    save(job, 2, run=2, scale=3.0)
    assert require_committed(job.root, 2).run == 2
    assert pointers(job) == (2, 2)


def test_files_that_were_replaced_while_they_were_read_are_not_judged(job: Job) -> None:
    save(job, 1, 2)
    flip_a_byte(shard(job, 2), -2000)
    checked = check_files(choose_files(job.root, step=2))
    save(job, 2, run=2, scale=3.0)
    assert states(judge_steps(checked)) == {2: "replaced"}
    shutil.rmtree(step_folder(job.root, 2))
    assert states(judge_steps(checked)) == {2: "replaced"}


def test_a_kill_between_mark_and_pointer_is_made_good_by_the_next_look(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(job, 1, 2)
    flip_a_byte(shard(job, 2), -2000)
    with monkeypatch.context() as patch:
        die = partial(signal.raise_signal, signal.SIGKILL)
        patch.setattr(verification, "repair_latest_pointer", lambda *_: die())
        assert end_of(lambda: verify(job, step=2)) == -signal.SIGKILL
    assert pointers(job) == (2, 2)
    assert find_newest(job.root).step == 1  # the manifests say so at every instant
    with acquire_commit_lock(job.root):
        assert repair_latest_pointer(job.root, "checkpoint") == (2, 1)
        assert repair_latest_pointer(job.root, "checkpoint") is None
    verify(job, step=2)
    assert pointers(job) == (1, 1)


def test_samples_of_consecutive_days_cover_every_file(job: Job) -> None:
    save(job, *range(1, 8))
    files = {(file.step, file.record.path) for file in choose_files(job.root, newest=99)}
    nbytes = sum(file.record.nbytes for file in choose_files(job.root, newest=99))
    budget = nbytes // 5
    days = [choose_files(job.root, sample=budget, seed=day) for day in range(20_000, 20_006)]
    assert {(file.step, file.record.path) for day in days for file in day} == files
    largest = max(file.record.nbytes for day in days for file in day)
    assert all(sum(f.record.nbytes for f in day) <= budget + largest for day in days)
    assert days[0] == choose_files(job.root, sample=budget, seed=20_000)
    assert choose_files(job.root, sample=1, seed=3)


def test_split_lists_have_every_file_once_and_similar_sizes(job: Job) -> None:
    save(job, *range(1, 6))
    files = choose_files(job.root, newest=9)
    parts = split_evenly(files, 3)
    assert sorted(map(str, files)) == sorted(str(file) for part in parts for file in part)
    sizes = [sum(file.record.nbytes for file in part) for part in parts]
    assert max(sizes) - min(sizes) <= max(file.record.nbytes for file in files)
    assert split_evenly([], 3) == []


@pytest.mark.parametrize("torn", [2, 3], ids=["an older step", "the newest step"])
def test_a_step_with_a_torn_manifest_is_corrupted_whichever_steps_are_read(
    job: Job, torn: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(job, 1, 2, 3)
    url = f"file://{tmp_path}/copies"
    replicate(job.root, url, 1)
    for folder in (step_folder(job.root, torn), tmp_path / "copies/global_step_1"):
        (folder / MANIFEST).write_bytes(b"")
    for root, step, *how in (
        (job.root, torn),
        (job.root, torn, str(torn)),
        (job.root, torn, "--limit", "9"),
        (job.root, torn, "--sample", "100%"),
        (url, 1),
        (url, 1, "1"),
        (url, 1, "--limit", "9"),
    ):
        done = invoke("verify", root, *how, "--output", "json")
        rows = {row["step"]: row for row in json.loads(done.stdout)["steps"]}
        assert (done.exit_code, rows[step]["status"]) == (3, "corrupted"), (how, done.output)
        assert "manifest" in rows[step]["reason"]
    monkeypatch.setenv("TRINITY_SYNC_HOME", str(tmp_path / "home"))
    assert states(on_node.verify(str(job.root), None, 1, 0))[torn] == "corrupted"
