"""A real process is told to end by a real signal, and saves within the grace period."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.training_with_loader import LAST
from tests.support.forked import Program
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.restore import load_states

TRAINING = textwrap.dedent(
    """
    import json, sys
    from dataclasses import asdict
    from pathlib import Path

    import torch

    from tests.integration.fsdp.commits import CommitsHere
    from trinity_sync import CheckpointCoordinator, Settings
    from trinity_sync.client.save_trigger import SaveTrigger

    root, spool, server, grace_s = sys.argv[1:]
    settings = Settings(spool=Path(spool))
    away = SaveTrigger(settings, api_url="http://127.0.0.1:9/api")
    trigger = CommitsHere() if server == "there" else away
    weights = torch.zeros(1000)
    with CheckpointCoordinator(root, settings=settings, trigger=trigger) as saves:
        saves.on_preemption(grace_s=float(grace_s))
        step = 0
        while not saves.any_preempted():
            step += 1
            weights.fill_(step)
            print(step, flush=True)
        state = {"model": {"w": weights}, "optim": {"m": -weights}}
        words = saves.emergency_save(step, state)
    print(json.dumps(asdict(words)), flush=True)
    """
)


def preempted(root: Path, spool: Path, *, server: str, grace_s: float) -> dict[str, Any]:
    """Run the training, send SIGTERM in its midst, and return what its emergency save reports."""
    training = Program(TRAINING, root, spool, server, grace_s, talks=True)
    try:
        assert training.stdout.readline() == "1\n"
        os.kill(training.pid, signal.SIGTERM)
        said = training.stdout.read().splitlines()
        training.end()
    finally:
        training.clear()
    return dict(json.loads(said[-1]), trained=int(["1", *said][-2]))


def test_the_step_at_which_the_signal_came_is_committed(root: Path, tmp_path: Path) -> None:
    words = preempted(root, tmp_path / "spool", server="there", grace_s=60)
    assert words["undone"] == []
    assert words["submitted"] == ["model", "optim"]
    assert words["committed"] == ["checkpoint", "state_dict"]
    found = find_newest(root)
    assert found is not None
    assert found.step == words["step"] == words["trained"]
    states = load_states(root, found.step, "actor")
    assert states["model"]["w"][0] == -states["optim"]["m"][0] == found.step


def test_with_no_server_the_deadline_holds_and_the_images_stay(root: Path, tmp_path: Path) -> None:
    words = preempted(root, tmp_path / "spool", server="away", grace_s=2)
    assert words["committed"] == []
    assert any("not committed yet" in sentence for sentence in words["undone"])
    sealed, _ = open_job_spool(tmp_path / "spool", root).tickets()
    assert {(each.ticket.step, each.ticket.component) for each in sealed} == {
        (words["step"], "model"),
        (words["step"], "optim"),
    }


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
    assert training.stdout
    try:
        line = next(line for line in training.stdout if line.startswith(f"{LAST} "))
        yield training, [int(pid) for pid in line.split()[1:]]
    finally:
        with suppress(ProcessLookupError):  # it has ended, and its workers
            os.killpg(training.pid, signal.SIGKILL)
        training.communicate()


def require_saved(root: Path, training: subprocess.Popen[str], step: int) -> None:
    said = training.communicate(timeout=60)[0].splitlines()
    assert training.returncode == 0, said
    done = json.loads(said[-1])
    assert (done["undone"], done["committed"]) == ([], ["checkpoint", "state_dict"])
    found = find_newest(root)
    assert found is not None
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
