"""The progress of a long command: shown to a person at a terminal only."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.support.job import Job
from tests.support.steps import commit_files
from tests.support.terminal import run_at_terminal
from trinity_sync.remote.download import fetch
from trinity_sync.remote.upload import replicate
from trinity_sync.storage.verify import check_files, choose_files


class Told:
    """A progress callback that remembers."""

    def __init__(self) -> None:
        self.done = 0
        self.wholes: set[int] = set()

    def __call__(self, done: int, whole: int) -> None:
        self.done += done
        self.wholes.add(whole)


def at_a_terminal(*arguments: object, home: Path, code: int = 0) -> str:
    """What a terminal showed of a command."""
    words = [sys.executable, "-m", "trinity_sync.cli", *map(str, arguments)]
    wide = {"TERM": "xterm", "COLUMNS": "500"}  # no path is broken
    environment = {**os.environ, "TRINITY_SYNC_HOME": str(home), **wide}
    ended, shown = run_at_terminal(words, environment)
    assert ended == code, shown
    return shown


def test_a_terminal_shows_a_bar_next_to_the_output_and_a_pipe_gets_the_output_alone(
    tmp_path: Path,
) -> None:
    root = tmp_path / "ckpts"
    for step in (1, 2):
        commit_files(root, step)
    words = ["verify", str(root)]
    shown = at_a_terminal(*words, home=tmp_path / "home")
    assert "reading" in shown
    assert "bytes" in shown
    piped = subprocess.run(
        [sys.executable, "-m", "trinity_sync.cli", *words],
        env={**os.environ, "TRINITY_SYNC_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert piped.stderr == ""
    assert "reading" not in piped.stdout
    assert all(word in shown for word in piped.stdout.split()[:2])


def test_an_error_before_the_first_byte_is_shown_without_a_bar(tmp_path: Path) -> None:
    commit_files(tmp_path / "ckpts", 1)
    (tmp_path / "file").touch()
    url = f"file://{tmp_path}/file/store"
    command = ("remote", "push", tmp_path / "ckpts", 1, url)
    shown = at_a_terminal(*command, home=tmp_path / "home", code=4)
    assert shown.startswith("error: ")
    assert "uploading" not in shown


def test_reading_and_copying_tell_of_every_byte(job: Job, tmp_path: Path) -> None:
    job.stage(1, {"model": {"w": torch.ones(3 << 20)}})
    nbytes = job.commit(1).nbytes
    read, sent, again, back = Told(), Told(), Told(), Told()
    url = f"file://{tmp_path}/store"
    check_files(choose_files(job.root, step=1), on_progress=read)
    replicate(job.root, url, 1, on_progress=sent)
    replicate(job.root, url, 1, on_progress=again)
    fetch(url, 1, tmp_path / "back", on_progress=back)
    assert (read.done, read.wholes) == (nbytes, {nbytes})
    assert (sent.done, sent.wholes) == (nbytes, {nbytes})
    assert (again.done, again.wholes) == (0, set())
    assert (back.done, back.wholes) == (nbytes, {nbytes})
