"""All ranks of a process group resume from the same step, or raise the same error."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.disk import flip_a_byte
from tests.support.forked import Program
from tests.support.job import Job

RANK = """
import json, sys
import torch.distributed as dist
from trinity_sync import CheckpointCoordinator, CommitError, Settings
from trinity_sync.client import step_loader
rank, rendezvous, spool, root = sys.argv[1:]
dist.init_process_group("gloo", f"file://{rendezvous}", rank=int(rank), world_size=2)
saves = CheckpointCoordinator.of_process_group(root, settings=Settings(spool=spool, home=spool))
if rank == "1":  # whose view of the root is late
    step_loader.newest = lambda *_: None
said = [saves.latest_step(settle_s=0.2), saves.latest().name]
try:
    saves.load(4)
except CommitError as error:
    said.append(str(error))
weights = saves.load(2)["model"]["w"]
with saves.open(2) as states:
    opened = states["model"]["w"].unique().tolist()
print(json.dumps([*said, weights.unique().tolist(), opened]))
saves.close(timeout=0)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("writable", [True, False])
def test_a_step_that_one_rank_cannot_load_is_loaded_by_none(
    job: Job,
    tmp_path: Path,
    spool_folder: Path,
    read_only: Callable[[Path], object],
    writable: bool,
) -> None:
    job.world_size = 2
    for step in (2, 4):
        for rank in (0, 1):
            job.stage(step, {"model": {"w": torch.full((5000,), float(rank))}}, rank=rank)
        job.commit(step, "model")
    torn = job.root / "global_step_4/actor/model_world_size_2_rank_1.pt"
    flip_a_byte(torn, -9000)
    if not writable:
        read_only(job.root)
    given = [tmp_path / "rendezvous", spool_folder / "of_the_ranks", job.root]
    ranks = [Program(RANK, rank, *given) for rank in range(2)]
    one, other = (json.loads(rank.end()) for rank in ranks)
    assert one[:3] == other[:3]
    assert one[:2] == [4, "global_step_4"]
    assert torn.name in one[2]
    assert [one[3:], other[3:]] == [[[0.0], [0.0]], [[1.0], [1.0]]]
