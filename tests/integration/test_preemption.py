"""A real process is told to end by a real signal, and saves within the grace period."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.training_with_loader import LAST
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.restore import load_states


@contextmanager
def training_with_loader(
    root: Path, tmp_path: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A training in a process group of its own, after the last step before a slow batch; and the
    pids of the workers of its DataLoader."""
    os.mkfifo(tmp_path / "fifo")
    training = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.training_with_loader"]
        + [str(path) for path in (root, tmp_path / "spool", tmp_path / "fifo")]
        + list(options),
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    try:
        line = next(line for line in training.stdout if line.startswith(f"{LAST} "))
        yield training, [int(pid) for pid in line.split()[1:]]
    finally:
        with suppress(ProcessLookupError):  # it has ended, and its workers
            os.killpg(training.pid, signal.SIGKILL)
        training.communicate()


def require_saved(root: Path, training: subprocess.Popen[str], step: int) -> None:
    said = training.communicate(timeout=250)[0].splitlines()
    assert training.returncode == 0, said
    done = json.loads(said[-1])
    assert (done["undone"], done["committed"]) == ([], ["checkpoint", "state_dict"])
    found = find_newest(root)
    assert found.step == done["step"] == step
    assert load_states(root, step, "actor")["model"]["w"][0] == step


@pytest.mark.parametrize("options", [["--stateful"], ["--method=spawn", "--persistent"]])
def test_a_signal_to_the_whole_group_leaves_the_batch_that_the_trainer_waits_for(
    root: Path, tmp_path: Path, options: list[str]
) -> None:
    with training_with_loader(root, tmp_path, *options) as (training, workers):
        with (tmp_path / "fifo").open("w"):  # a worker waits for its end
            os.killpg(training.pid, signal.SIGTERM)
        require_saved(root, training, LAST + 1)
        assert not [pid for pid in workers if psutil.pid_exists(pid)]


def test_workers_that_the_signal_ends_do_not_end_the_save(root: Path, tmp_path: Path) -> None:
    with training_with_loader(root, tmp_path, "--loader-first") as (training, _):
        os.killpg(training.pid, signal.SIGTERM)
        require_saved(root, training, LAST)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "job"
