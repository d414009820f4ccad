"""What a killed run has committed is restored bit-equal on real ranks, from memory or disk."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.integration.fsdp.commits import coordinator_of
from tests.integration.fsdp.models import Trained
from tests.integration.fsdp.ranks import on_ranks
from tests.support.states import copied, differences
from trinity_sync import CommitError, ConfigError
from trinity_sync.layout import step_folder
from trinity_sync.storage.runs import list_runs

STEP = 3


def _fill(root: Path, expected: dict[str, Any], trained: Trained, rank: int) -> Any:
    """Fill what lives, which rank 1 alone lacks a part of at first."""
    live = {"model": trained.model.state_dict(), "optim": trained.optimizer.state_dict()}
    before = copied(live)
    lacking = {**live, "optim": {**live["optim"], "state": {}}} if rank == 1 else live
    try:
        coordinator_of(root).load_into(STEP, lacking)
    except ConfigError as error:
        refused = "is not among those to fill" in str(error) and not differences(
            before, copied(live)
        )
    loaded = coordinator_of(root).load_into(STEP, live)
    trained.optimizer.load_state_dict(loaded["optim"])  # its learning rate
    return refused, differences(
        expected, copied({**trained.state(), "extra_state": loaded["extra_state"]})
    )


def _save_and_restart(version: int, tiny: Path, scratch: Path) -> dict[str, Any]:
    """Save, then load into a differently initialised rank, once for each place to load from."""
    said: list[str] = []
    log = logging.getLogger("trinity_sync.storage.restore")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: said.append(record.getMessage()) is None)
    root = scratch / "job"
    trained = Trained(tiny, version)
    for _ in range(STEP):
        trained.step()
    killed = coordinator_of(root)  # is never closed, and so leaves its slots
    manager = trained.manager(killed)
    folder = str(step_folder(root, STEP) / "actor")
    manager.save_checkpoint(folder, STEP)
    expected = trained.state()
    manager.wait_on_save_thread()
    assert killed.latest_step() == STEP  # its slots are free again

    found: dict[str, Any] = {}
    for source in ("spool", "disk"):
        if source == "disk":
            killed.close()  # takes the slots of this rank with it
        said.clear()
        restarted = Trained(tiny, version, seed=1000)
        restarted.step()
        coordinator = coordinator_of(root)
        restarted.manager(coordinator).load_checkpoint(folder)
        found[source] = (differences(expected, restarted.state()), len(said))
        assert all(f"from the {source}" in message for message in said), said
        restarted.step()  # what was loaded can be trained on
        coordinator.close()
    plain = copied(coordinator_of(root).load(STEP))
    found["plain"] = (differences(expected, plain), len(said))
    if version == 2:
        found["in place"] = _fill(root, expected, restarted, dist.get_rank())

    runs = len(list_runs(root))
    dist.barrier()
    if dist.get_rank() == 1:
        with (Path(folder) / "optim_world_size_2_rank_1.pt").open("r+b") as shard:
            shard.seek(-3000, 2)
            shard.write(b"x")
    dist.barrier()
    try:
        restarted.manager(coordinator_of(root)).load_checkpoint(folder)
    except CommitError as error:
        found["corrupted"] = (str(error).partition(":")[0], len(list_runs(root)) - runs)
    return found


@pytest.mark.parametrize("version", [1, 2], ids=["FSDP1", "FSDP2"])
def test_a_restarted_run_has_the_saved_state_bit_for_bit(
    version: int, tiny: Path, tmp_path: Path
) -> None:
    for found in on_ranks(_save_and_restart, version, tiny, tmp_path, scratch=tmp_path):
        corrupted = found.pop("corrupted")
        if version == 2:
            assert found.pop("in place") == (True, [])
        assert found == {"spool": ([], 3), "disk": ([], 3), "plain": ([], 6)}
        # a file of one rank: all ranks say so, and no run begins
        shard = step_folder(tmp_path / "job", STEP) / "actor/optim_world_size_2_rank_1.pt"
        assert corrupted == (f"{shard} is corrupted", 0)
