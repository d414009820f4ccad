"""Files that code of others opens by name: what it reads is what was compared."""

import ast
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import trinity_sync
from tests.support.disk import count_read, drop_cached
from tests.support.dying import end_of
from tests.support.forked import Program
from tests.support.job import Job
from trinity_sync.client.collective import open_on_all_ranks
from trinity_sync.errors import CommitError
from trinity_sync.layout import step_folder
from trinity_sync.storage import restore
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.restore import OpenFiles

PATH = "actor/model_world_size_1_rank_0.pt"


@pytest.fixture
def step(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """A committed step, and a folder of this test for the links."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return job.commit_states(1, {"model": {"w": torch.ones(3)}})


def replace_with(job: Job, content: bytes) -> Path:
    file = step_folder(job.root, 1) / PATH
    file.with_name("other").write_bytes(content)
    file.with_name("other").rename(file)
    return file


def test_links_lead_to_the_compared_files_until_they_are_closed(job: Job, step: Manifest) -> None:
    """And a child leaves their folder to its parent."""
    expected = (step_folder(job.root, 1) / PATH).read_bytes()
    with OpenFiles(job.root, step) as files:
        files.open(step.files, unpickled=True)
        files.compare(step.files)
        folder = files.make_folder("a/checkpoint-1", {"weights/model.bin": PATH})
        replace_with(job, b"theirs")
        assert end_of(files.close) == 0
        assert (folder / "weights/model.bin").read_bytes() == expected
        assert folder.parts[-2:] == ("a", "checkpoint-1")
        assert folder.parents[1].stat().st_mode & 0o777 == 0o700
    assert not folder.parents[1].exists()


def test_a_file_that_is_compared_and_then_loaded_is_read_from_the_disk_once(job: Job) -> None:
    step = job.commit_states(1, {"model": {"w": torch.rand(8 << 20)}})
    drop_cached(step_folder(job.root, 1) / PATH)
    before = count_read()
    with OpenFiles(job.root, step) as files:
        files.open(step.files, unpickled=True)
        files.compare(step.files)
        torch.load(files.get_path(PATH))
    assert count_read() - before < 1.5 * step.nbytes


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (lambda found: found[:-1], "is corrupted: it has"),
        (lambda found: found + b"\0", "is corrupted: it has"),
        (lambda found: bytes(len(found)), "is corrupted: its digest"),
    ],
    ids=["short", "long", "other"],
)
def test_a_file_that_is_not_the_committed_one_is_refused(
    job: Job, step: Manifest, content: Callable[[bytes], bytes], told: str
) -> None:
    found = (step_folder(job.root, 1) / PATH).read_bytes()
    replace_with(job, content(found))
    with pytest.raises(CommitError, match=told):
        open_on_all_ranks(job.root, step, step.files, unpickled=False)


def test_a_file_that_others_may_write_is_not_opened_to_be_unpickled(
    job: Job, step: Manifest
) -> None:
    (step_folder(job.root, 1) / PATH).chmod(0o666)
    with OpenFiles(job.root, step) as files:
        files.open(step.files, unpickled=False)
        with pytest.raises(CommitError, match="may have been written by another user"):
            files.open(step.files, unpickled=True)


KILLED = """
import os, signal, sys, tempfile
from pathlib import Path
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.restore import OpenFiles
tempfile.tempdir, root = sys.argv[1:]
step = read_manifest(root, 1)
files = OpenFiles(Path(root), step)
files.open(step.files, unpickled=False)
print(files.make_folder("one", {"file": step.files[0].path}).parent, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("dated", ["now", "in the future"])
def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next(
    job: Job, step: Manifest, monkeypatch: pytest.MonkeyPatch, dated: str
) -> None:
    if dated == "now":
        monkeypatch.setattr(restore, "_NEW_S", -1.0)
    other = Program(KILLED, tempfile.gettempdir(), job.root, talks=True)
    with OpenFiles(job.root, step) as files:
        theirs = Path(other.stdout.readline().strip())
        try:
            files.open(step.files, unpickled=False)
            ours = files.make_folder("one", {"file": PATH})
            assert theirs.exists()
        finally:
            other.clear()
        if dated == "in the future":  # of a clock that was set back since
            os.utime(theirs, (9e9, 9e9))
        files.make_folder("two", {"file": PATH})
        assert not theirs.exists()
        assert (ours / "file").exists()


@contextmanager
def few_descriptors() -> Iterator[None]:
    before, used = resource.getrlimit(resource.RLIMIT_NOFILE), Path("/proc/self/fd").iterdir()
    few = max(int(each.name) for each in used) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_step_of_more_files_than_the_soft_limit_of_descriptors_is_opened(
    job: Job, step: Manifest
) -> None:
    with few_descriptors(), OpenFiles(job.root, step) as files:
        for _ in range(20):
            files.open(step.files, unpickled=False)


def test_what_loads_files_by_name_gets_paths_of_open_files_only() -> None:
    """A loader that joins a folder with a record's path opens what has that name later."""
    package, found = Path(trinity_sync.__file__).parent, []
    for module in [*package.glob("integrations/**/*.py"), *package.glob("client/**/*.py")]:
        if "fsdp" in module.parts:
            continue  # compares digests before it maps the files, and the manifest afterwards
        for node in ast.walk(ast.parse(module.read_text())):
            joins = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
            if joins and isinstance(node.right, ast.Attribute) and node.right.attr == "path":
                found.append(f"{module.relative_to(package)}:{node.lineno}")
    assert not found, f"open these with OpenFiles: {found}"
