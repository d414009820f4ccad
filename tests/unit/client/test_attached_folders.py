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
from tests.unit.client.conftest import Saves
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


def link_to_its_folder(name: Path, other: Path) -> None:
    name.parent.rmdir()
    name.parent.symlink_to(other)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda name, other: name.symlink_to(other / "data.pt"),
        link_to_its_folder,
        lambda name, other: name.hardlink_to(other / "data.pt"),
    ],
    ids=["link to a file", "link to its folder", "second name"],
)
def test_a_file_that_others_may_write_into_is_copied_and_stays(
    saves: Saves, job: Job, tmp_path: Path, make: Callable[[Path, Path], None], outside: bool
) -> None:
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


def test_one_that_could_not_be_synced_is_in_no_commit_of_a_retry(saves: Saves, job: Job) -> None:
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


def test_a_step_that_lacks_one_of_them_is_not_committed(saves: Saves, job: Job) -> None:
    written = written_by_other_code(job.root, 4, {"data.pt": b"17", QUEUE: b"queue"})
    saves.attach_written(written, step=4)
    saves.save(4, MODEL)
    (written / QUEUE).unlink()
    with pytest.raises(SaveError, match=rf"attachments of step 4.*{written / QUEUE}: No such file"):
        commit(job, 4)
    assert read_manifest(job.root, 4) is None


def test_a_folder_that_is_no_saves_own_or_comes_too_late_is_refused(
    saves: Saves, job: Job, tmp_path: Path
) -> None:
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
    saves: Saves, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    saves.attach_written(written_by_other_code(job.root, 4, {"data.pt": b"17"}), step=4)
    saves.save(4, MODEL)
    with monkeypatch.context() as without:
        without.setattr(os, "link", link)
        commit(job, 4)
    assert (step_folder(job.root, 4) / "data.pt").read_bytes() == b"17"


def test_a_folder_is_committed_as_it_was_when_save_returned(
    saves: Saves, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the files behind its links, and a relative one as it is at the call."""
    files = {"queue/a.bin": b"a" * 10_000, "queue/none": b"", "shared/c": b"c", "shared/d/e": b"e"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    links = {"one": tmp_path / "shared", "own/two": "../../shared/d", "e": "one/d/e"}
    (tmp_path / "queue" / "own").mkdir()
    for name, target in links.items():
        (tmp_path / "queue" / name).symlink_to(target)
    saves.attach("a.bin", b"small", step=4)
    monkeypatch.chdir(tmp_path)
    saves.attach_folder("queue", "queue", step=4)
    monkeypatch.chdir("/")
    saves.save(4, MODEL)
    (tmp_path / "queue" / "a.bin").write_bytes(b"changed afterwards")
    commit(job, 4)
    saves.restore_folder(4, "queue", tmp_path / "copy")
    own = {"a.bin": b"a" * 10_000, "none": b""}
    behind_links = {"one/c": b"c", "one/d/e": b"e", "own/two/e": b"e", "e": b"e"}
    assert files_below(tmp_path / "copy") == own | behind_links
    assert saves.attachment(4, "a.bin") == b"small"


def test_a_folder_without_files_is_attached_like_any_other_and_restored_as_one(
    coordinator_of: Open, job: Job, tmp_path: Path
) -> None:
    """Next to one with a file of the name that marks an empty folder."""
    job.world_size = 2
    (tmp_path / "queue" / "below").mkdir(parents=True)
    (tmp_path / "full").mkdir()
    for name in (EMPTY_FOLDER, "a"):
        (tmp_path / "full" / name).write_bytes(b"a")
    ranks = [coordinator_of(rank, 2, trigger=CommitsHere()) for rank in (0, 1)]
    for saves, name in zip(reversed(ranks), ("full", "queue"), strict=True):
        saves.attach_folder("queue", tmp_path / name, step=4)
        saves.save(4, MODEL)
    ranks[0].wait_all(250)
    for rank, files in enumerate((set(), {EMPTY_FOLDER, "a"})):
        to = tmp_path / "back" / str(rank)
        ranks[rank].restore_folder(4, "queue", to)
        assert {path.name for path in to.iterdir()} == files


@pytest.mark.parametrize("change", ["grow", "shrink", "remove"])
def test_a_folder_that_changes_before_its_save_fails_the_save(
    saves: Saves, job: Job, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "queue" / "a.bin"
    path.parent.mkdir()
    path.write_bytes(b"a" * 10_000)
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
    assert str(path) in saves.save(4, MODEL).failure
    commit(job, 3)
    with pytest.raises(SaveError, match="step 4"):
        saves.wait_all(250)


def bind(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(path))


OWN_NAME, NOT_SAVED = "a name that trinity_sync uses itself", "cannot be saved: it is "


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        (f".x.{'ab' * 16}.tmp", Path.touch, OWN_NAME),
        (f".nfs{'0' * 24}", Path.touch, OWN_NAME),
        ("a" * 201, Path.touch, "at most 200 bytes"),
        ("pipe", os.mkfifo, NOT_SAVED + "neither a file nor a folder"),
        ("socket", bind, NOT_SAVED + "neither"),
        ("link", lambda path: path.symlink_to("nowhere"), NOT_SAVED + "neither"),
        ("loop", lambda path: path.symlink_to(".."), NOT_SAVED + "a link to a folder"),
        ("itself", lambda path: path.symlink_to(path.name), NOT_SAVED + "neither"),
        ("", lambda path: path.parent.rename("moved"), "it is no folder"),
    ],
    ids=["temporary", "NFS", "long", "pipe", "socket", "broken link", "loop", "own link", "gone"],
)
def test_a_folder_that_cannot_be_attached_is_refused_and_after_the_first_save_fails_its_step(
    coordinator_of: Open,
    job: Job,
    tmp_path: Path,
    name: str,
    make: Callable[[Path], object],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    queue, saves = Path("queue"), coordinator_of()
    (queue / "below").mkdir(parents=True)
    (queue / "items").write_bytes(b"items")

    def repair() -> None:
        (queue / "below" / name).unlink() if name else Path("moved").rename(queue)

    make(queue / "below" / name)
    with pytest.raises(ConfigError, match=f"{name}.* {why}"):
        saves.attach_folder("queue", queue, step=4)
    repair()
    saves.save(3, MODEL)
    job.commit(3, "model")
    make(queue / "below" / name)
    saves.attach_folder("queue", queue, step=4)
    failure = saves.save(4, MODEL).failure
    assert re.search(f"{name}.* {why}", failure)
    with pytest.raises(SaveError, match=re.escape(failure)):
        saves.wait_all(250)
    repair()
    saves.attach_folder("queue", queue, step=4)
    saves.save(4, MODEL)
    commit(job, 4)
    assert (step_folder(job.root, 4) / "attachments/queue/items").read_bytes() == b"items"
