"""Actor and critic in veRL's worker groups of two ranks, driven by `RayPPOTrainer`'s own methods.

All but the rollouts is veRL's (``tests.environments.verl.ppo``). The driver and its workers
are killed in mid-run, and the driver is started again by the same command.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.environments.verl.sft import WITH_US, Program, make_world
from trinity_sync.layout import steps_on_disk
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import read_latest_pointer
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.runs import list_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, SAVE_EVERY = 7, 3
Metrics = dict[int, dict[str, Any]]


@dataclass
class Story:
    """A training that was killed, and its second start."""

    root: Path
    killed: Metrics
    resumed: Metrics


class Launch(Program):
    """One start of the driver."""

    def __init__(self, world: Path, name: str, root: Path, steps: int) -> None:
        super().__init__(world, name, WITH_US)
        arguments = (world / "model", root, steps, SAVE_EVERY, self._logged)
        self._command = [sys.executable, "-m", "tests.environments.verl.ppo", *map(str, arguments)]

    @property
    def metrics(self) -> Metrics:
        """What was logged up to now, by step."""
        return {each.pop("step"): each for each in self.logged}


def kill_workers(driver: subprocess.Popen[bytes]) -> int:
    """SIGKILL for veRL's ranks on the driver's Ray node; how many there were."""
    below = psutil.Process(driver.pid).children(recursive=True)
    ranks = [each for each in below if is_rank(each)]
    for rank in ranks:
        rank.kill()
    return len(ranks)


def is_rank(process: psutil.Process) -> bool:
    try:
        return any("WorkerDict" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def story(stack: StackState, tmp_path_factory: pytest.TempPathFactory) -> Story:
    world = tmp_path_factory.mktemp("ppo")
    make_world(world)
    root = world / "ckpts"
    first = Launch(world, "first", root, 1000)
    with first.running() as driver:
        while max(first.metrics, default=0) < SAVE_EVERY + 2:
            assert driver.poll() is None, first.output[-6000:]
            time.sleep(0.02)
        killed = kill_workers(driver)
    assert killed == 2, first.output[-6000:]
    second = Launch(world, "second", root, max(max(first.metrics) + 1, STEPS))
    second.to_its_end()
    return Story(root, first.metrics, second.metrics)


def test_a_step_is_committed_with_both_roles_of_both_ranks_and_the_position_in_the_data(
    story: Story,
) -> None:
    manifest = read_manifest(story.root, SAVE_EVERY)
    assert manifest is not None
    shards = {
        (file.role, file.component, file.rank)
        for file in manifest.files
        if file.path.endswith("_rank_0.pt") or file.path.endswith("_rank_1.pt")
    }
    roles, components, ranks = ("actor", "critic"), ("model", "optim", "extra_state"), (0, 1)
    assert shards == {(o, c, r) for o in roles for c in components for r in ranks}
    assert "data.pt" in {file.path for file in manifest.files}


def test_the_second_start_goes_on_where_the_killed_one_had_saved(story: Story) -> None:
    begun = list_runs(story.root)[-1].resumed_from
    assert begun == min(story.resumed) - 1
    assert begun % SAVE_EVERY == 0
    assert max(story.killed) - SAVE_EVERY <= begun < max(story.killed)
    for step in story.killed.keys() & story.resumed.keys():
        assert story.resumed[step] == story.killed[step]


def test_it_ends_once_all_is_committed(story: Story) -> None:
    newest = max(story.resumed) // SAVE_EVERY * SAVE_EVERY
    assert read_latest_pointer(story.root, "checkpoint") == newest
    assert steps_on_disk(story.root) == list(range(SAVE_EVERY, newest + 1, SAVE_EVERY))
