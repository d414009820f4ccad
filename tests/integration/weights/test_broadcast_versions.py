"""Handshake, broadcast and version: a trainer and an explorer, each an actor of real Ray."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from trinity_sync import WeightSyncError
from trinity_sync.weights.broadcast import receive_weights
from trinity_sync.weights.process_group import join_weight_group, weight_group_address

ASK_S = 60.0


def ask(reference: Any) -> Any:
    return ray.get(reference, timeout=ASK_S)


@ray.remote(num_cpus=0, runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo"}})
class Party:
    """A trainer or an explorer, which is ready and goes on as it was told."""

    def __init__(self, synchronizer: Any, port: int) -> None:
        self._synchronizer, self._port = synchronizer, port

    def send(self, step: int, rendezvous: Path) -> None:
        import torch.distributed as dist

        from trinity_sync import fsdp_sync_weight_nccl

        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
        engine = SimpleNamespace(module=torch.nn.Linear(3, 4), is_param_offload_enabled=False)
        assert ask(self._synchronizer.ready_to_nccl_sync.remote("trainer", step)) == step
        fsdp_sync_weight_nccl(engine, self._join(0), version=step, synchronizer=self._synchronizer)

    def receive(self, *, killed: bool) -> list[str]:
        assert ask(self._synchronizer.ready_to_nccl_sync.remote("explorer", 0)) is not None
        names = []
        for name, _ in receive_weights(self._join(1)):
            names.append(name)
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
        return names

    def _join(self, rank: int) -> Any:
        return join_weight_group("127.0.0.1", self._port, rank=rank, world_size=2, timeout_s=20)


@pytest.fixture
def parties(synchronizer: Any) -> Iterator[list[Any]]:
    port = weight_group_address()[1]
    made = [Party.remote(synchronizer, port) for _ in range(2)]
    ask(synchronizer.set_trainer_status.remote("running"))
    ask(synchronizer.set_explorer_status.remote("running"))
    yield made
    for party in made:
        ray.kill(party)


def test_a_broadcast_that_all_have_makes_the_version(
    synchronizer: Any, parties: list[Any], tmp_path: Path
) -> None:
    trainer, explorer = parties
    waiting = synchronizer.wait_newer.remote(0, ASK_S)
    sent = trainer.send.remote(6, tmp_path / "rendezvous")
    assert ask(explorer.receive.remote(killed=False)) == ["weight", "bias"]
    ask(sent)
    found = ask(waiting)
    assert (found.step, found.source) == (6, "nccl")
    (reader,) = ask(synchronizer.readers.remote())
    assert (reader.name, reader.step, reader.behind) == ("explorer", 6, 0)


def test_a_reader_killed_in_mid_broadcast_leaves_the_version_where_it_was(
    synchronizer: Any, parties: list[Any], tmp_path: Path
) -> None:
    trainer, explorer = parties
    sent = trainer.send.remote(6, tmp_path / "rendezvous")
    with pytest.raises(ray.exceptions.ActorDiedError):
        ask(explorer.receive.remote(killed=True))
    with pytest.raises(WeightSyncError, match="no answer from rank 1"):
        ask(sent)
    assert ask(synchronizer.get_latest_model_version.remote()) == 0
    assert ask(synchronizer.latest.remote()) is None
    assert ask(synchronizer.readers.remote()) == ()
