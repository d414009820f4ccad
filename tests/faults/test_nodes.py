"""What a job on two nodes survives: the death of one of them, and of its trainers on both."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import torch

from tests.integration.nodes.joined import a_rank_on_each, await_freed, joined, kill
from tests.integration.prefect_api import Api, key_of
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator, SaveFailedError, Settings
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import find_newest, read_latest_pointer, require_committed
from trinity_sync.storage.manifest import read_manifest

pytestmark = pytest.mark.slow

STATE = {"w": torch.arange(5000.0)}


def test_a_node_that_dies_before_its_images_are_persisted_fails_the_step_and_no_other(
    stack: StackState, stack_settings: Settings, root: Path, api: Api
) -> None:
    root.mkdir()
    with joined(stack, stack_settings, "doomed") as (settings, node):
        with a_rank_on_each(root, [stack_settings, settings]) as ranks:
            for saves in ranks:
                saves.save(1, {"model": STATE})
            for saves in ranks:
                saves.wait_all(250)
            await_freed(*ranks)

            ranks[0].save(2, {"model": STATE})  # a task on the other node waits for its rank

            def waits() -> bool:
                every = psutil.Process(node.pid).children(recursive=True)
                return any(each.name().startswith("ray::persist-model") for each in every)

            until(waits, "the task on the other node")
            kill(node)
            lost = r"step 2 .*node doomed, which holds role actor rank 1, has not written them"
            with pytest.raises(SaveFailedError, match=lost):
                ranks[0].wait_all(250)
            run = api.ended(api.run_of(key_of(root, 2)).id)
            assert run.state.is_failed()
            api.ended_tasks(run, "persist-model")
            assert [image.failed for image in ranks[0].spool.tickets()[0]] == [True]
            assert read_manifest(root, 2) is None
            assert find_newest(root).step == 1
            assert read_latest_pointer(root, "checkpoint") == 1

            for saves in ranks:  # whether Ray knows by now or not
                saves.save(3, {"model": STATE})
            with pytest.raises(SaveFailedError, match=r"step 3 .*node doomed"):
                ranks[0].wait_all(250)
        with CheckpointCoordinator(root, settings=stack_settings) as living:
            for step in (4, 5, 6):
                living.save(step, {"model": STATE})
                living.wait_all(250)
    require_committed(root, 1)
    assert find_newest(root).step == 6


def test_a_save_of_trainers_on_both_nodes_that_are_killed_right_after_submitting_commits(
    stack: StackState, stack_settings: Settings, root: Path, tmp_path: Path
) -> None:
    """Neither has asked for the flow run; the worker that does is on the node of rank 1."""
    script = textwrap.dedent(
        """
        import os, signal, sys, torch
        import torch.distributed as dist
        from trinity_sync import CheckpointCoordinator
        root, rendezvous, metadata, rank = *sys.argv[1:4], int(sys.argv[4])
        dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=2)
        saves = CheckpointCoordinator.of_process_group(root)
        state = {"w": torch.arange(5000.0) + rank}
        saves.save(2, {"model": state, "optim": state}, metadata=metadata)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    root.mkdir()
    metadata = tmp_path / "metadata"
    metadata.mkdir()
    (metadata / "config.json").write_text("{}")
    arguments = [str(path) for path in (root, tmp_path / "rendezvous", metadata)]
    with joined(stack, stack_settings, "other") as (other, _):
        trainers = []
        for rank, settings in enumerate((other, stack_settings)):
            env = {
                **os.environ,
                "TRINITY_SYNC_NODE": settings.node,
                "TRINITY_SYNC_SPOOL": str(settings.spool),
                "PREFECT_API_AUTH_STRING": "nobody:knows",  # its server refuses every request
                "GLOO_SOCKET_IFNAME": "lo",
            }
            command = [sys.executable, "-c", script, *arguments, str(rank)]
            trainers.append(subprocess.Popen(command, env=env))
        assert [trainer.wait(250) for trainer in trainers] == [-signal.SIGKILL] * 2
        until(lambda: read_manifest(root, 2), "the commit of step 2")
        files = [file.path for file in require_committed(root, 2).files]
        shards = [f"{c}_world_size_2_rank_{r}.pt" for c in ("model", "optim") for r in (0, 1)]
        assert files == [f"actor/{name}" for name in ("config.json", *shards)]
        for rank in (0, 1):
            shard = root / f"global_step_2/actor/model_world_size_2_rank_{rank}.pt"
            assert torch.equal(torch.load(shard)["w"], STATE["w"] + rank)
        spools = [open_job_spool(each.spool, root) for each in (other, stack_settings)]
        until(lambda: not any(spool.tickets()[0] for spool in spools), "the slots to be freed")
