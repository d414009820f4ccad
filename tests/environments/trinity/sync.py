"""Weights from Trinity's real engine to its real explorer, through our parts in their place.

Run by ``make trinity``.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.environments.trinity.conftest import Configure
from tests.support.waiting import until
from trinity_sync import Checkpoints
from trinity_sync.errors import ConfigError
from trinity_sync.integrations.trinity.switch import PLUGINS
from trinity_sync.integrations.verl.driver import open_metrics
from trinity_sync.layout import step_folder, steps_on_disk
from trinity_sync.stack.services import StackState
from trinity_sync.storage.discovery import read_latest_pointer
from trinity_sync.storage.manifest import read_manifest


@pytest.fixture(scope="module")
def switched_on(stack: StackState) -> None:
    """By Trinity's own loader of plugins."""
    from trinity.utils.plugin_loader import load_plugins

    os.environ["TRINITY_PLUGIN_DIRS"] = str(PLUGINS)
    load_plugins()


@pytest.fixture
def config(configure: Configure, switched_on: None) -> Any:
    """As Trinity reads and checks it."""
    from trinity.common.config import load_config

    trainer = {"save_interval": 1, "total_steps": 9, "max_checkpoints_to_keep": 2}
    return load_config(str(configure(trainer))).check_and_update()


@pytest.fixture
def cluster(config: Any) -> Iterator[Any]:
    """Ray, joined as Trinity joins it."""
    import ray

    before = signal.getsignal(signal.SIGTERM)
    ray.init(namespace=config.ray_namespace, runtime_env={"env_vars": config.get_envs()})
    yield ray
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def synchronizer(cluster: Any, config: Any) -> Iterator[Any]:
    from trinity.manager.synchronizer import Synchronizer

    actor = Synchronizer.get_actor(config)
    yield actor
    actor.stop.remote()


def test_what_an_explorer_logs_is_recorded_for_the_version_that_it_has_measured(
    config: Any, root: Path
) -> None:
    from trinity.utils.monitor import MONITOR

    config.trainer.save_interval = 2
    named = {"project": "tests", "group": "", "name": "sft", "role": config.explorer.name}
    monitor = MONITOR.get(config.monitor.monitor_type)(**named, config=config)
    for version, step in ((1, 10), (2, 11), (9, 12)):
        monitor.log({"rollout/model_version": version, "rollout/reward/mean": 0.5}, step=step)
        monitor.log({"eval/copy/accuracy:mean@1": version / 10}, step)
    monitor.log({"bench/copy/accuracy/mean@1": 0.75}, 3)
    monitor.close()
    open_metrics(root).close()
    found = {step: Checkpoints(root).metrics(step) for step in (1, 2, 3, 9)}
    measured = {step: metrics.get("eval/copy/accuracy_mean@1") for step, metrics in found.items()}
    assert measured == {1: None, 2: 0.2, 3: None, 9: 0.9}
    assert found[2]["rollout/reward/mean"] == 0.5
    assert found[3] == {"bench/copy/accuracy/mean@1": 0.75}


@pytest.mark.timeout(600)
def test_explorers_get_each_version_by_commits_and_from_memory(
    synchronizer: Any, config: Any, root: Path
) -> None:
    from trinity.common.constants import RunningStatus, SyncMethod
    from trinity.trainer.trainer import get_trainer_wrapper

    from tests.environments.trinity.explorer import Weights, batches_of, differences, explorer_of

    async def story() -> None:
        engine = get_trainer_wrapper(config)
        await engine.prepare()
        await synchronizer.set_trainer_status.remote(RunningStatus.RUNNING)
        (explorer, model), batches = explorer_of(config, synchronizer), batches_of(config)
        await explorer._pull_latest_weights()
        assert explorer.model_version == 0
        assert model.weights == {}, "version 0 is the base model, which explorers have"

        seen: list[Weights] = []
        stale = step_folder(root, 2) / "actor"
        stale.mkdir(parents=True)
        save_file({"of_an_earlier_run": torch.ones(1)}, stale / "model.safetensors")
        for step in range(1, 5):
            await engine.train_step(await batches.read())
            await engine.save_state_dict()
            await explorer._pull_latest_weights()
            assert explorer.model_version == step
            seen.append(model.weights)
        await engine.wait_for_save()
        assert differences(seen[0], seen[1])
        assert seen[0].keys() == seen[1].keys(), "without what Trinity has left itself"
        assert read_latest_pointer(root, "state_dict") == 4
        assert read_latest_pointer(root, "checkpoint") is None
        until(lambda: steps_on_disk(root) == [3, 4], "what is superseded to go")

        config.synchronizer.sync_method = SyncMethod.MEMORY
        await engine.upload_state_dict()
        explorer.model_version = 3
        await explorer._pull_latest_weights()
        assert explorer.model_version == 4
        await engine.train_step(await batches.read())
        await engine.upload_state_dict()
        await explorer._pull_latest_weights()
        assert explorer.model_version == 5
        assert differences(model.weights, seen[3])

        from_memory = model.weights
        await engine.save_checkpoint(block_until_saved=True)
        await model.sync_model_weights(5, SyncMethod.CHECKPOINT, 60)
        assert differences(model.weights, from_memory) == []
        assert set(read_manifest(root, 5).kinds) == {"checkpoint", "state_dict"}

        explorer.model_version = 9  # of a trainer that was killed, and went on from an earlier step
        await explorer._pull_latest_weights()
        assert explorer.model_version == 5

    asyncio.run(story())


def test_a_synchronizer_ends_with_its_last_user(cluster: Any, config: Any) -> None:
    from tests.environments.trinity.explorer import Module

    def is_there() -> bool:
        named = cluster.util.list_named_actors(all_namespaces=True)
        return {"name": "synchronizer", "namespace": config.ray_namespace} in named

    first, second = Module.remote(), Module.remote()
    assert cluster.get([first.ask.remote(config), second.ask.remote(config)]) == [0, 0]
    cluster.kill(first)
    assert cluster.get(second.ask.remote(config)) == 0
    assert is_there()
    cluster.kill(second)
    until(lambda: not is_there(), "its end")


def test_two_jobs_in_a_namespace_are_refused(
    synchronizer: Any, config: Any, tmp_path: Path
) -> None:
    from trinity.manager.synchronizer import Synchronizer

    config.checkpoint_job_dir = str(tmp_path / "another")
    with pytest.raises(ConfigError, match="give each job another ray_namespace"):
        Synchronizer.get_actor(config)


def test_a_process_without_the_switch_is_found_out(cluster: Any, config: Any) -> None:
    from trinity.manager.synchronizer import Synchronizer

    theirs = cluster.remote(Synchronizer).options(name="synchronizer").remote(config, None)
    with pytest.raises(ConfigError, match="Trinity's own"):
        Synchronizer.get_actor(config)
    cluster.kill(theirs)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("trainer", "trainer_type", "tinker"),
        ("trainer", "trainer_strategy", "megatron"),
        ("model", "lora_configs", ["an adapter"]),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    config: Any, section: str, name: str, value: Any
) -> None:
    from trinity.manager.synchronizer import Synchronizer

    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=f"{section}.{name}.*unset TRINITY_PLUGIN_DIRS"):
        Synchronizer.get_actor(config)


def test_every_method_that_trinity_calls_of_its_synchronizer_is_there(switched_on: None) -> None:
    from trinity.manager.synchronizer import Synchronizer

    from trinity_sync.integrations.trinity.synchronizer import TrinitySynchronizer

    public = {name for name in vars(Synchronizer) if not name.startswith("_")}
    lacking = public - set(dir(TrinitySynchronizer))
    assert lacking == {"setup_weight_sync_group"}, "which nothing in Trinity calls"
