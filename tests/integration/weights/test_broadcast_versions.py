"""Rendezvous, broadcast and version: a trainer and an explorer, each an actor of real Ray."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from tests.integration.weights.conftest import ASK_S, ask
from trinity_sync import WeightSyncError
from trinity_sync.weights.broadcast import receive_weights
from trinity_sync.weights.weight_group import WeightGroupHost, join_weight_group


@ray.remote(num_cpus=0, runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo"}})
class Member:
    """A trainer or an explorer, which is ready and goes on as it was told."""

    def listen(self, synchronizer: Any) -> int:
        # takes seconds, which are not those of the rendezvous
        from trinity_sync.integrations.verl import fsdp_sync_weight_nccl

        self._send, self._synchronizer = fsdp_sync_weight_nccl, synchronizer
        self._host = WeightGroupHost(address="127.0.0.1")
        return self._host.port

    def send(self, step: int, rendezvous: Path) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            own = {"init_method": f"file://{rendezvous}", "rank": 0, "world_size": 1}
            dist.init_process_group("gloo", **own)
        engine = SimpleNamespace(module=torch.nn.Linear(3, 4), is_param_offload_enabled=False)
        assert ask(self._synchronizer.ready_to_nccl_sync.remote("trainer", step)) == step
        group = self._host.join(world_size=2, timeout_s=60)
        self._send(engine, group, version=step, synchronizer=self._synchronizer)

    def receive(self, synchronizer: Any, port: int, *, killed: bool) -> list[str]:
        assert ask(synchronizer.ready_to_nccl_sync.remote("explorer", 0)) is not None
        names = []
        group = join_weight_group("127.0.0.1", port, rank=1, world_size=2, timeout_s=60)
        with receive_weights(group) as (_, tensors):
            for name, _ in tensors:
                names.append(name)
                if killed:
                    os.kill(os.getpid(), signal.SIGKILL)
        return names


@pytest.fixture(scope="module")
def trainer(ray_node: None) -> Iterator[Any]:
    """One for all tests, as it imports veRL."""
    member = Member.remote()
    yield member
    ray.kill(member)


@pytest.fixture
def members(synchronizer: Any, trainer: Any) -> Iterator[list[Any]]:
    explorer = Member.remote()
    ask(synchronizer.set_trainer_status.remote("running"))
    ask(synchronizer.set_explorer_status.remote("running"))
    yield [trainer, explorer]
    ray.kill(explorer)


def test_a_broadcast_that_all_have_makes_the_version(
    synchronizer: Any, members: list[Any], tmp_path: Path
) -> None:
    trainer, explorer = members
    waiting = synchronizer.wait_newer.remote(0, ASK_S)
    port = ask(trainer.listen.remote(synchronizer))
    sent = trainer.send.remote(6, tmp_path / "rendezvous")
    assert ask(explorer.receive.remote(synchronizer, port, killed=False)) == ["weight", "bias"]
    ask(sent)
    found = ask(waiting)
    assert (found.step, found.source) == (6, "nccl")
    (reader,) = ask(synchronizer.readers.remote())
    assert (reader.name, reader.step, reader.behind) == ("explorer", 6, 0)


def test_a_reader_killed_in_mid_broadcast_leaves_the_version_where_it_was(
    synchronizer: Any, members: list[Any], tmp_path: Path
) -> None:
    trainer, explorer = members
    port = ask(trainer.listen.remote(synchronizer))
    sent = trainer.send.remote(6, tmp_path / "rendezvous")
    with pytest.raises(ray.exceptions.ActorDiedError):
        ask(explorer.receive.remote(synchronizer, port, killed=True))
    with pytest.raises(WeightSyncError, match="rank 0 gave up"):
        ask(sent)
    assert ask(synchronizer.get_latest_model_version.remote()) == 0
    assert ask(synchronizer.latest.remote()) is None
    assert ask(synchronizer.readers.remote()) == ()
