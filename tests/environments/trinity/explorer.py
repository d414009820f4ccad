"""Trinity's own explorer, without what serves the model, since vLLM needs a GPU.

It is imported once the stack is there: Ray reads how to authenticate when it is imported.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray
import torch
from trinity.buffer import get_buffer_reader
from trinity.common.config import Config
from trinity.common.constants import RunningStatus, SyncMethod
from trinity.common.models.utils import load_state_dict_iterator
from trinity.explorer.explorer import Explorer
from trinity.manager.synchronizer import Synchronizer
from trinity.utils.plugin_loader import load_plugins

Weights = dict[str, torch.Tensor]


class Model:
    """In the place of the engine that serves: it keeps the weights that it was told to load.

    It gets them by the same functions of Trinity that Trinity's extension of vLLM calls.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.weights: Weights = {}

    async def sync_model_weights(self, version: int, method: SyncMethod, timeout: float) -> None:
        await asyncio.to_thread(self._load, version, method)

    def _load(self, version: int, method: SyncMethod) -> None:
        if method == SyncMethod.CHECKPOINT:
            folder = Path(self._config.checkpoint_job_dir) / f"global_step_{version}" / "actor"
            self.weights = dict(load_state_dict_iterator(checkpoint_dir=str(folder)))
        else:
            actor = Synchronizer.get_actor(namespace=self._config.ray_namespace)
            sent = actor.get_model_state_dict_iterator.remote()
            self.weights = dict(ray.get(each) for each in sent)


def explorer_of(config: Config, synchronizer: Any) -> tuple[Explorer, Model]:
    """The explorer as it is once it is prepared."""
    explorer, model = object.__new__(Explorer), Model(config)
    explorer.config, explorer.logger = config, logging.getLogger("explorer")
    explorer.synchronizer, explorer.models = synchronizer, [model]
    explorer.model_version = -1
    ray.get(synchronizer.set_explorer_status.remote(RunningStatus.RUNNING))
    return explorer, model


def batches_of(config: Config) -> Any:
    """Trinity's reader of the data to train on."""
    return get_buffer_reader(config.buffer.trainer_input.experience_buffer)


def differences(one: Weights, other: Weights) -> list[str]:
    """Names of tensors that are not those of the other, as ``bfloat16``, which Trinity sends."""
    named = sorted({*one, *other})
    both = [name for name in named if name in one and name in other]
    unlike = [n for n in both if not torch.equal(one[n].bfloat16(), other[n].bfloat16())]
    return [*unlike, *(name for name in named if name not in both)]


@ray.remote(num_cpus=0)
class Module:
    """A trainer or explorer, as far as the Synchronizer sees it."""

    async def ask(self, config: Config) -> int:
        load_plugins()
        actor = Synchronizer.get_actor(config)
        return int(await actor.get_latest_model_version.remote())
