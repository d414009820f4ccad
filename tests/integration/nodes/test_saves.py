"""A save whose ranks are on two Ray nodes, each with a memory of its own."""

import subprocess
from pathlib import Path

import pytest
import torch

from tests.integration.nodes.joined import (
    MOUNTS_OF_ITS_OWN,
    a_rank_on_each,
    await_freed,
    joined,
)
from tests.integration.prefect_api import Api, key_of, kind_of
from trinity_sync import SaveFailedError, Settings
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.restore import load_shards


def state(rank: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(5000.0) + rank}


pytestmark = pytest.mark.slow


def test_it_commits_and_loads_bit_equal_from_the_memory_of_each(
    stack: StackState, stack_settings: Settings, root: Path, api: Api
) -> None:
    root.mkdir(exist_ok=True)
    with (
        joined(stack, stack_settings, "other") as (other, _),
        a_rank_on_each(root, [other, stack_settings]) as ranks,
    ):
        for rank, saves in enumerate(ranks):
            saves.save(4, {"model": state(rank)})
        for saves in ranks:
            saves.wait_all(120)
        assert [file.rank for file in require_committed(root, 4).files] == [0, 1]
        await_freed(*ranks)
        for rank, saves in enumerate(ranks):
            file = f"actor/model_world_size_2_rank_{rank}.pt"
            (restored,) = load_shards(root, 4, [file], spool=saves.spool)
            assert restored.source == "spool"
            for found in (restored.state, torch.load(root / "global_step_4" / file)):
                assert torch.equal(found["w"], state(rank)["w"])
        run = api.ended(api.run_of(key_of(root, 4)).id)
        names = ["commit", "persist-model", "persist-model"]
        assert sorted(map(kind_of, api.ended_tasks(run, *names))) == names


def test_a_node_that_writes_to_a_disk_of_its_own_fails_the_save_and_is_named(
    stack: StackState, stack_settings: Settings, root: Path
) -> None:
    root.mkdir(exist_ok=True)
    if subprocess.run([*MOUNTS_OF_ITS_OWN, "true"], capture_output=True).returncode:
        pytest.skip("a process may have no mounts of its own here")
    with (
        joined(stack, stack_settings, "alone", own_disk=root) as (other, _),
        a_rank_on_each(root, [stack_settings, other]) as ranks,
    ):
        for rank, saves in enumerate(ranks):
            saves.save(4, {"model": state(rank)})
        named = r"rank_1\.pt, which node alone wrote, is missing on the node of the commit"
        with pytest.raises(SaveFailedError, match=named):
            ranks[0].wait_all(120)
        with pytest.raises(SaveFailedError, match=named):
            ranks[1].wait_all(120)
    assert not (root / "global_step_4/manifest.json").exists()
