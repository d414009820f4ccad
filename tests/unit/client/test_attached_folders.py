"""Files that other code writes for a step join it by its commit alone, and are part of it then."""

import itertools
import os
import re
import signal
import socket
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.integration.fsdp.commits import CommitsHere
from tests.support.disk import noted_syncs
from tests.support.dying import in_a_process
from tests.support.forked import Program
from tests.support.job import Job
from tests.unit.conftest import Open
from trinity_sync.errors import ConfigError, SaveError
from trinity_sync.layout import EMPTY_FOLDER, attaching_folder, step_folder
from trinity_sync.snapshot.stager import Staged, StagePlan
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.verify import VerifiedStep, check_files, choose_files, judge_steps

MODEL = {"model": {"w": torch.ones(9)}}
QUEUE = "transfer_queue/storage/unit.pkl"


def written_by_other_code(root: Path, step: int, files: dict[str, bytes]) -> Path:
    """The folder of a save's own, with files."""
    folder = step_folder(attaching_folder(root) / uuid.uuid4().hex, step)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def commit(job: Job, step: int, *, run: int = 1) -> None:
    job.commit(step, "model", "attachments", run=run)


def verify(job: Job, step: int) -> VerifiedStep:
    (found,) = judge_steps(check_files(choose_files(job.root, step=step)))
    return found


def files_below(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_they_are_moved_to_the_step_and_not_copied(coordinator_of: Open, job: Job) -> None:
    saves, folder = coordinator_of(), step_folder(job.root, 4)
    written = written_by_other_code(job.root, 4, {"data.pt": b"17", QUEUE: b"queue"})
    inode = (written / QUEUE).stat().st_ino
    saves.attach("data.pt", b"an attachment of that name", step=4)
    saves.attach_written(written, step=4)
    saves.save(4, MODEL)
    assert not folder.exists()
    commit(job, 4)
    assert (folder / "data.pt").read_bytes() == b"17"
    assert (folder / QUEUE).stat().st_ino == inode
    assert saves.attachment(4, "data.pt") == b"an attachment of that name"
    assert list(attaching_folder(job.root).iterdir()) == []
    named = {record.path for record in read_manifest(job.root, 4).files}
    assert {"data.pt", QUEUE, "attachments/data.pt"} <= named
    assert (verify(job, 4).state, verify(job, 4).wrong) == ("valid", "")


def link_to_a_file(name: Path, other: Path) -> None:
    name.symlink_to(other / "data.pt")


def link_to_its_folder(name: Path, other: Path) -> None:
    name.parent.rmdir()
    name.parent.symlink_to(other)


def second_name(name: Path, other: Path) -> None:
    name.hardlink_to(other / "data.pt")


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("make", [link_to_a_file, link_to_its_folder, second_name])
def test_a_file_that_others_may_write_into_is_copied_and_stays(
    coordinator_of: Open,
    job: Job,
    tmp_path: Path,
    make: Callable[[Path, Path], None],
    outside: bool,
) -> None:
    saves = coordinator_of()
    written = written_by_other_code(job.root, 4, {"actor/b.pt": b"own"})
    other = tmp_path / "other" if outside else written.parent / "blobs"
    for folder in (other, written / "linked"):
        folder.mkdir()
    (other / "data.pt").write_bytes(b"17")
    make(written / "linked/data.pt", other)
    saves.attach_written(written, step=4)
    saves.save(4, MODEL)
    commit(job, 4)
    found = step_folder(job.root, 4) / "linked/data.pt"
    if outside:
        (other / "data.pt").write_bytes(b"71")
    assert not found.is_symlink()
    assert (found.read_bytes(), found.stat().st_nlink) == (b"17", 1)
    assert (verify(job, 4).state, verify(job, 4).wrong) == ("valid", "")
    assert list(attaching_folder(job.root).iterdir()) == []


def test_one_that_could_not_be_synced_is_in_no_commit_of_a_retry(
    coordinator_of: Open, job: Job
) -> None:
    saves = coordinator_of()
    saves.attach_written(written_by_other_code(job.root, 4, {"data.pt": b"17"}), step=4)
    saves.save(4, MODEL)
    with noted_syncs(failing="data.pt"):
        with pytest.raises(SaveError, match="Input/output error"):
            commit(job, 4)
        with pytest.raises(SaveError, match=r"data\.pt: No such file"):
            commit(job, 4)
    assert read_manifest(job.root, 4) is None


def test_a_trainer_that_is_killed_leaves_them_to_be_committed(
    job: Job, spool_folder: Path, tmp_path: Path
) -> None:
    written = written_by_other_code(job.root, 4, {"data.pt": b"17"})
    script = f"""
import os, signal, torch
from pathlib import Path
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.settings import Settings
settings = Settings(spool=Path({str(spool_folder)!r}), home=Path({str(tmp_path)!r}))
saves = CheckpointCoordinator({str(job.root)!r}, settings=settings)
saves.attach_written(Path({str(written)!r}), step=4)
saves.attach("position", b"17", step=4)
saves.save(4, {{"model": {{"w": torch.ones(9)}}}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    Program(script).end(-signal.SIGKILL)
    commit(job, 4)
    for name in ("data.pt", "attachments/position"):
        assert (step_folder(job.root, 4) / name).read_bytes() == b"17"


def test_a_step_that_lacks_one_of_them_is_not_committed(coordinator_of: Open, job: Job) -> None:
    saves = coordinator_of()
    written = written_by_other_code(job.root, 4, {"data.pt": b"17", QUEUE: b"queue"})
    saves.attach_written(written, step=4)
    saves.save(4, MODEL)
    (written / QUEUE).unlink()
    with pytest.raises(SaveError, match=rf"attachments of step 4.*{written / QUEUE}: No such file"):
        commit(job, 4)
    assert read_manifest(job.root, 4) is None


def test_a_folder_that_is_no_saves_own_or_comes_too_late_is_refused(
    coordinator_of: Open, job: Job, tmp_path: Path
) -> None:
    saves = coordinator_of()
    with pytest.raises(ConfigError, match=r"attaching/NAME/global_step_4"):
        saves.attach_written(tmp_path / "own" / "global_step_4", step=4)
    saves.save(4, MODEL)
    with pytest.raises(ConfigError, match="attach before the save"):
        saves.attach_written(written_by_other_code(job.root, 4, {"data.pt": b"17"}), step=4)


def test_those_of_a_killed_run_are_in_no_step_of_another(coordinator_of: Open, job: Job) -> None:
    first, folder = coordinator_of(run_key="first"), step_folder(job.root, 4)
    for step in (3, 4):
        files = {"data.pt": b"%d" % step, QUEUE: b"of the first run"}
        first.attach_written(written_by_other_code(job.root, step, files), step=step)
        first.save(step, MODEL)
        commit(job, step)
    before = files_below(folder)
    first.close(timeout=0)

    second = coordinator_of(run_key="second", take_over=True)
    second.resumed_from(3)
    written_by_other_code(job.root, 4, {"data.pt": b"of the killed run", "more.pt": b"more"})
    assert files_below(folder) == before
    assert verify(job, 4).wrong == ""
    second.close(timeout=0)

    third = coordinator_of(run_key="third", take_over=True)
    third.resumed_from(3)
    third.attach_written(written_by_other_code(job.root, 4, {"data.pt": b"third"}), step=4)
    third.save(4, {"model": {"w": torch.zeros(9)}})
    commit(job, 4, run=3)
    assert files_below(folder)["data.pt"] == b"third"
    assert not {QUEUE, "more.pt"} & {*files_below(folder)}
    assert verify(job, 4).wrong == ""


def test_a_commit_that_dies_anywhere_and_is_retried_has_all_of_them(
    coordinator_of: Open, job: Job, tmp_path: Path
) -> None:
    saves, died = coordinator_of(), True
    for step in itertools.count(1):
        files = {"data.pt": b"%d" % step, QUEUE: b"queue"}
        saves.attach_written(written_by_other_code(job.root, step, files), step=step)
        saves.save(step, {"model": {"w": torch.full((9,), float(step))}})
        died = in_a_process(lambda at=step: commit(job, at), tmp_path, die_before=step) == step
        if read_manifest(job.root, step):
            assert files.items() <= files_below(step_folder(job.root, step)).items()
        commit(job, step)
        assert files.items() <= files_below(step_folder(job.root, step)).items()
        assert verify(job, step).wrong == ""
        if not died:
            break
    assert step > 5


def test_a_file_system_without_links_has_copies(
    coordinator_of: Open, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    saves = coordinator_of()
    saves.attach_written(written_by_other_code(job.root, 4, {"data.pt": b"17"}), step=4)
    saves.save(4, MODEL)
    with monkeypatch.context() as without:
        without.setattr(os, "link", link)
        commit(job, 4)
    assert (step_folder(job.root, 4) / "data.pt").read_bytes() == b"17"


def test_a_folder_is_committed_as_it_was_when_save_returned(
    coordinator_of: Open, job: Job, tmp_path: Path
) -> None:
    files = {"a.bin": b"a" * 10_000, "below/b": b"b", "none": b""}
    for name, content in files.items():
        (tmp_path / "queue" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "queue" / name).write_bytes(content)
    saves = coordinator_of()
    saves.attach("a.bin", b"small", step=4)
    saves.attach_folder("queue", tmp_path / "queue", step=4)
    saves.save(4, MODEL)
    (tmp_path / "queue" / "a.bin").write_bytes(b"changed afterwards")
    commit(job, 4)
    saves.restore_folder(4, "queue", tmp_path / "copy")
    assert files_below(tmp_path / "copy") == files
    assert saves.attachment(4, "a.bin") == b"small"


def test_the_files_behind_links_of_a_folder_are_committed(
    coordinator_of: Open, job: Job, tmp_path: Path
) -> None:
    files = {"shared/a.bin": b"a", "shared/below/b": b"b"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "queue" / "own").mkdir(parents=True)
    (tmp_path / "queue" / "one").symlink_to(tmp_path / "shared")
    (tmp_path / "queue" / "own" / "two").symlink_to("../../shared/below")
    (tmp_path / "queue" / "b").symlink_to("one/below/b")
    saves = coordinator_of()
    saves.attach_folder("queue", tmp_path / "queue", step=4)
    saves.save(4, MODEL)
    commit(job, 4)
    saves.restore_folder(4, "queue", tmp_path / "copy")
    assert files_below(tmp_path / "copy") == {
        "one/a.bin": b"a",
        "one/below/b": b"b",
        "own/two/b": b"b",
        "b": b"b",
    }


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, r"below/it cannot be saved: it is neither a file nor a folder"),
        (lambda path: path.symlink_to("nowhere"), r"below/it cannot be saved: it is neither"),
        (lambda path: path.symlink_to(".."), r"below/it cannot be saved: it is a link to a folder"),
        (lambda path: path.symlink_to(path), r"below/it cannot be saved: it is neither"),
    ],
    ids=["FIFO", "broken link", "loop", "link to itself"],
)
def test_what_no_step_can_have_of_a_folder_is_refused_by_its_name(
    coordinator_of: Open, tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    (tmp_path / "queue" / "below").mkdir(parents=True)
    make(tmp_path / "queue" / "below" / "it")
    with pytest.raises(ConfigError, match=reason):
        coordinator_of().attach_folder("queue", tmp_path / "queue", step=4)


def test_a_folder_without_files_is_attached_like_any_other_and_restored_as_one(
    coordinator_of: Open, job: Job, tmp_path: Path
) -> None:
    job.world_size = 2
    (tmp_path / "queue" / "below").mkdir(parents=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_bytes(b"a")
    ranks = [coordinator_of(rank, 2, trigger=CommitsHere()) for rank in (0, 1)]
    for saves, name in zip(reversed(ranks), ("full", "queue"), strict=True):
        saves.attach_folder("queue", tmp_path / name, step=4)
        saves.save(4, MODEL)
    ranks[0].wait_all(30)
    for rank, files in enumerate(([], ["a"])):
        to = tmp_path / "back" / str(rank)
        ranks[rank].restore_folder(4, "queue", to)
        assert [path.name for path in to.iterdir()] == files


def test_a_file_with_the_name_of_the_mark_of_an_empty_folder_is_restored_next_to_others(
    coordinator_of: Open, job: Job, tmp_path: Path
) -> None:
    saves = coordinator_of()
    (tmp_path / "queue").mkdir()
    for name in (EMPTY_FOLDER, "a"):
        (tmp_path / "queue" / name).write_bytes(b"x")
    saves.attach_folder("queue", tmp_path / "queue", step=4)
    saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    saves.restore_folder(4, "queue", tmp_path / "back")
    assert {path.name for path in (tmp_path / "back").iterdir()} == {EMPTY_FOLDER, "a"}


@pytest.mark.parametrize("change", ["grow", "shrink", "remove"])
def test_a_folder_that_changes_before_its_save_fails_the_save(
    coordinator_of: Open, job: Job, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "queue" / "a.bin"
    path.parent.mkdir()
    path.write_bytes(b"a" * 10_000)
    saves = coordinator_of()
    saves.save(3, MODEL)
    saves.attach_folder("queue", path.parent, step=4)
    copy = saves._stager.copy

    def change_it(plan: StagePlan) -> Staged:
        if change == "remove":
            path.unlink()
        else:
            path.write_bytes(b"a" * (9_999 if change == "shrink" else 10_001))
        return copy(plan)

    monkeypatch.setattr(saves._stager, "copy", change_it)
    handle = saves.save(4, MODEL)
    assert str(path) in handle.failure
    commit(job, 3)
    with pytest.raises(SaveError, match="step 4"):
        saves.wait_all(60)
    monkeypatch.undo()
    path.write_bytes(b"again")
    saves.attach_folder("queue", path.parent, step=5)
    saves.save(5, MODEL)
    commit(job, 5)
    assert (step_folder(job.root, 5) / "attachments" / "queue" / "a.bin").read_bytes() == b"again"


def bind(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (f".x.{'ab' * 16}.tmp", Path.touch),
        (f".nfs{'0' * 24}", Path.touch),
        ("a" * 201, Path.touch),
        ("socket", bind),
        ("link", lambda path: path.symlink_to("nowhere")),
        ("", lambda path: path.rename(path.with_name("moved"))),
    ],
)
def test_a_live_folder_that_cannot_be_attached_fails_its_step_until_it_can(
    coordinator_of: Open,
    job: Job,
    tmp_path: Path,
    name: str,
    make: Callable[[Path], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    queue, saves = Path("queue"), coordinator_of()
    queue.mkdir()
    (queue / "items").write_bytes(b"items")
    saves.save(3, MODEL)
    job.commit(3, "model")
    make(queue / name)
    saves.attach_folder("queue", queue, step=4)
    failure = saves.save(4, MODEL).failure
    assert failure
    assert name in failure
    with pytest.raises(SaveError, match=re.escape(failure)):
        saves.wait_all(60)
    (queue / name).unlink() if name else Path("moved").rename(queue)
    saves.attach_folder("queue", queue, step=4)
    saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    assert (step_folder(job.root, 4) / "attachments/queue/items").read_bytes() == b"items"


def test_a_folder_that_is_none_or_was_removed_or_has_too_long_a_name_is_named(
    coordinator_of: Open, job: Job, tmp_path: Path
) -> None:
    saves = coordinator_of()
    with pytest.raises(ConfigError, match="is no folder"):
        saves.attach_folder("queue", tmp_path / "none", step=3)
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / ("a" * 201)).touch()
    with pytest.raises(ConfigError, match="at most 200 bytes"):
        saves.attach_folder("queue", tmp_path / "queue", step=3)
    saves.save(3, MODEL)
    (tmp_path / "queue" / ("a" * 201)).rename(tmp_path / "queue" / "a.bin")
    saves.attach_folder("queue", tmp_path / "queue", step=4)
    (tmp_path / "queue" / "a.bin").unlink()
    assert "a.bin" in saves.save(4, MODEL).failure


def test_a_relative_folder_is_that_of_the_call(
    coordinator_of: Open, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("at the call", "at the save"):
        (tmp_path / place / "queue").mkdir(parents=True)
        (tmp_path / place / "queue" / "items").write_text(place)
    saves = coordinator_of()
    monkeypatch.chdir(tmp_path / "at the call")
    saves.attach_folder("queue", "queue", step=4)
    monkeypatch.chdir(tmp_path / "at the save")
    saves.save(4, MODEL)
    job.commit(4, "model", "attachments")
    assert (step_folder(job.root, 4) / "attachments/queue/items").read_text() == "at the call"
