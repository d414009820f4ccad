"""A save that waits for ranks looks for their images without reading all tickets each time."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from benchmarks.path_calls import watch_path_calls
from tests.support.disk import no_opens_of
from tests.support.job import Job
from tests.support.steps import commit_files
from trinity_sync.errors import MissingShardsError, RemovedStepError
from trinity_sync.fs.atomic import ReadOnChange
from trinity_sync.layout import MANIFEST, step_folder
from trinity_sync.storage.commit import free_committed_slots
from trinity_sync.storage.uncommitted import gather_images

LOOKS = 8
MODEL = {"model": {"w": torch.zeros(3)}}


def looks(*then: Callable[[], object]) -> Callable[[], float]:
    """A clock for a wait of some looks; at the look before the last, something happens."""

    def times() -> Iterator[float]:
        yield from [0.0] * LOOKS
        for each in then:
            each()
        yield 0.0
        yield 2.0

    told = times()
    return lambda: next(told)


def rest(*paths: Path) -> None:
    """Let the last change of some files and folders be long ago."""
    for path in paths:
        os.utime(path, (time.time() - 60,) * 2)


@pytest.fixture
def half(job: Job) -> Job:
    """A job of two ranks, of which one has submitted step 3."""
    job.world_size = 2
    job.stage(3, MODEL)
    rest(job.spool.folder)
    return job


def test_a_wait_reads_unchanged_tickets_and_an_unchanged_manifest_once(half: Job) -> None:
    rest(commit_files(half.root, 3, run=9) / MANIFEST)  # of another run
    read: Counter[str] = Counter()
    save = half.save(3)

    def count(kind: str, path: str) -> None:
        if kind == "open":
            read["ticket" if path.endswith(".ticket") else Path(path).name] += 1

    with (
        watch_path_calls(count, half.root, half.spool.folder),
        pytest.raises(MissingShardsError, match="rank 1"),
    ):
        gather_images(half.share, save, "model", 1.0, looks())
    assert read["ticket"] == read[MANIFEST] == read["job.json"] == 1


def test_an_image_that_comes_late_is_found(half: Job) -> None:
    late = looks(lambda: half.stage(3, MODEL, rank=1))
    images, _ = gather_images(half.share, half.save(3), "model", 1.0, late)
    assert [image.ticket.rank for image in images] == [0, 1]


def test_a_commit_by_another_attempt_is_noticed(half: Job) -> None:
    rest(commit_files(half.root, 3, run=9) / MANIFEST)
    for sealed in half.spool.tickets()[0]:
        sealed.slot.with_name(f"{sealed.slot.name}.ticket").unlink()
    late = looks(lambda: commit_files(half.root, 3))
    images, files = gather_images(half.share, half.save(3), "model", 1.0, late)
    assert not images
    assert [file.record.path for file in files] == ["actor/model_world_size_1_rank_0.pt"]
    assert (step_folder(half.root, 3) / files[0].record.path).exists()


def test_a_retry_takes_no_step_for_removed_whose_manifest_cannot_be_read(job: Job) -> None:
    job.stage(3, MODEL)
    job.commit(3)
    free_committed_slots(job.spool, job.save(3), job.persist(3))
    folder = step_folder(job.root, 3)
    with ExitStack() as held:
        held.enter_context(no_opens_of(folder / MANIFEST))
        late = looks(held.close)
        images, files = gather_images(job.share, job.save(3), "model", 1.0, late)
    assert (images, len(files)) == ([], 1)
    with ExitStack() as held:
        held.enter_context(no_opens_of(folder / MANIFEST))
        held.callback(shutil.rmtree, folder)
        with pytest.raises(RemovedStepError):
            gather_images(job.share, job.save(3), "model", 1.0, looks(held.close))


def test_a_change_within_the_same_tick_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    names = ReadOnChange(folder, lambda: sorted(path.name for path in folder.iterdir()))
    (folder / "one").touch()
    changed = folder.stat()
    assert names.get() == ["one"]
    (folder / "two").touch()
    os.utime(folder, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert names.get() == ["one", "two"]


def test_what_cannot_be_read_is_read_again(tmp_path: Path) -> None:
    answers = iter([OSError("the server is slow"), "content"])

    def read() -> str:
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    rest(tmp_path)
    content = ReadOnChange(tmp_path, read)
    with pytest.raises(OSError, match="slow"):
        content.get()
    assert content.get() == content.get() == "content"
