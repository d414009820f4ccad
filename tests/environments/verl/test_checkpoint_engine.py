"""veRL's own `CheckpointEngineManager`, actor of two ranks and rollout workers, on our back end."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.conftest import QUIET, environment
from tests.environments.verl.sft import ALONE, IMPORTS, make_world
from tests.support.ray_nodes import ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NODE = {"object_store_memory": 100_000_000, "include_dashboard": False}


@dataclass
class World:
    root: Path
    actors: Any
    rollouts: Any
    manager: Any


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two Ray nodes: the trainer and a rollout worker on the first, a worker on the second."""
    import tests.environments.verl.cpu  # noqa: F401  # not when tests are collected: it replaces names of torch
    from tests.environments.verl.ppo import RANKS
    from tests.environments.verl.rollouts import start

    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    with tempfile.TemporaryDirectory(prefix="trinity_sync-test-", dir="/dev/shm") as spool:
        variables = QUIET | {
            "TRINITY_SYNC_SPOOL": spool,
            "VERL_USE_EXTERNAL_MODULES": ALONE,
            "PYTHONPATH": os.pathsep.join(IMPORTS),
            "OMP_NUM_THREADS": "1",
        }
        with environment(variables), ray_cluster() as nodes:
            nodes.add_node(**NODE, num_cpus=RANKS + 1)
            nodes.add_node(**NODE, num_cpus=1)
            ray.init(nodes.address, log_to_driver=False)
            yield World(folder / "ckpts", *start(str(folder / "model"), str(folder / "ckpts")))


def test_each_update_arrives_bit_for_bit_in_all_workers(world: World) -> None:
    assert world.rollouts.newest_step() == [None, None]
    assert len(set(world.rollouts.node())) == 2  # one of them gets it through the object store
    for step in range(1, 5):
        world.actors.change(step)
        world.manager.update_weights(step)
        sent = world.actors.digests()[0]
        assert world.rollouts.digests() == [sent, sent]
        assert all(each.startswith("torch.bfloat16") for each in sent.values())
        assert world.rollouts.serves() == [step, step]
    assert len(set(map(tuple, world.rollouts.generate()))) == 1


def test_rollouts_take_newer_weights_when_they_can_also_once_the_trainer_is_dead(
    world: World,
) -> None:
    before, sent = world.rollouts.digests(), {}
    for step in (11, 12, 13):
        world.actors.change(step)
        ray.get(
            world.actors.update_weights(global_steps=step, mode="trinity_sync")
        )  # of no other rank
        sent[step] = world.actors.digests()[0]
    assert world.rollouts.digests() == before  # a rollout goes on with what it has
    take_late(world, 13)
    assert world.rollouts.digests() == [sent[13], sent[13]]

    world.actors.change(14)
    sent[14] = world.actors.digests()[0]
    sending = world.actors.update_weights(global_steps=14, mode="trinity_sync")
    for actor in world.actors.workers:
        ray.kill(actor)
    ray.wait(sending, num_returns=len(sending), timeout=250)
    newest = world.rollouts.newest_step()[0]
    assert newest in (13, 14)
    take_late(world, newest)
    assert world.rollouts.digests() == [sent[newest], sent[newest]]


def take_late(world: World, step: int) -> None:
    """All workers of the replica take the step that they agreed on."""
    assert world.rollouts.newest_step() == [step, step]
    world.rollouts.update_late(step)
    assert world.rollouts.serves() == [step, step]
