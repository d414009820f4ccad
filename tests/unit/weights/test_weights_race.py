"""Many readers in processes of their own, while a trainer publishes version after version."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked import forking
from tests.support.job import Job
from tests.support.waiting import until
from tests.support.weights import VersionFile, upload
from trinity_sync.weights.reader import WeightReader

RANKS = 2
VERSIONS = 120
NUMEL = 1 << 18


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """Processes that have torch imported at their start."""
    with forking(__name__, "torch._subclasses.fake_tensor") as context:
        yield context


def states(step: int) -> list[dict[str, torch.Tensor]]:
    """Of every rank, all elements of which are the step."""
    return [{f"of_rank{rank}": torch.full((NUMEL,), float(step))} for rank in range(RANKS)]


def read_on(versions: VersionFile, log: Path, asleep_s: float) -> None:
    """Load until the last version; note the least and the greatest element of each."""
    torch.set_num_threads(1)
    versions = VersionFile(versions.path, node="there" if "copies" in log.name else None)
    reader = WeightReader(versions, name=log.name)
    target = {name: tensor for state in states(0) for name, tensor in state.items()}
    while reader.version is None or reader.version.step < VERSIONS:
        with reader.open() as view:
            time.sleep(asleep_s)
            view.load_into(target)
        found = torch.cat(list(target.values()))
        with log.open("a") as file:
            file.write(f"{view.version.step} {found.min():.0f} {found.max():.0f}\n")


def lines(log: Path) -> list[list[int]]:
    if not log.exists():
        return []
    whole = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [[int(number) for number in line.split()] for line in whole]


def test_readers_get_whole_versions_and_never_an_older_one(
    job: Job, tmp_path: Path, processes: Any
) -> None:
    job.world_size = RANKS
    torch.set_num_threads(1)
    versions = VersionFile(tmp_path / "version.json")
    versions.tell(upload(job, 1, *states(1)))
    asleep_s = {"quick": 0.0, "copies": 0.0, "slow": 0.03, "killed": 0.01}

    def start(name: str, life: int = 0) -> tuple[Path, Any]:
        log = tmp_path / f"{name}{life}"
        process = processes.Process(target=read_on, args=(versions, log, asleep_s[name]))
        process.start()
        return log, process

    readers = [start(name) for name in asleep_s]
    until(lambda: all(lines(log) for log, _ in readers), "all readers", pause=0.005)
    for step in range(2, VERSIONS + 1):
        versions.tell(upload(job, step, *states(step)))
        if step % 30 == 0 and step < VERSIONS:
            log, process = readers[-1]
            until(lambda log=log: len(lines(log)) > 1, "a second version", pause=0.005)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            readers.append(start("killed", life=step))
        time.sleep(0.002)
    for _, process in readers:
        process.join()
    alive = [reader for reader in readers if reader[1].exitcode == 0]
    assert len(alive) == len(asleep_s)
    for log, _ in readers:
        found = lines(log)
        assert all(step == least == greatest for step, least, greatest in found), found
        steps = [step for step, _, _ in found]
        assert steps == sorted(steps)
    assert all(lines(log)[-1][0] == VERSIONS for log, _ in alive)
    assert len(list(job.spool.folder.glob("*.slot"))) <= RANKS * (2 + len(asleep_s))
