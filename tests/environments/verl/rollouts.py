"""veRL's actor and rollout workers on the CPU, with what a test asks them."""

import hashlib
from typing import Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica

from tests.environments.verl.ppo import RANKS, configured

BACKEND = "trinity_sync"
WORKERS = 2
"""Of one replica, tensor-parallel."""
Digests = dict[str, str]


def digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and all bits."""
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


class Actor(ActorRolloutRefWorker):
    """veRL's own actor with its FSDP engine."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, seed: int) -> None:
        """As an optimizer step does, in every weight."""
        random = torch.Generator().manual_seed(1000 * self.rank + seed)
        with torch.no_grad():
            for parameter in self.actor.engine.module.parameters():
                shard = parameter.to_local()
                shard.add_(torch.randn(shard.shape, generator=random).to(shard.dtype))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self) -> Digests:
        """Of what the engine gives to be sent."""
        return {name: digest(each) for name, each in self.actor.engine.get_per_tensor_param()[0]}


class ServerAdapter(BaseRollout):
    """Stands for vLLM's: loads into a model of Transformers, which then generates."""

    def __init__(self, config: Any, model_config: Any) -> None:
        super().__init__(config, model_config, device_mesh=None)
        made = AutoConfig.from_pretrained(self.model_config.path)
        self.model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
        self.global_steps: int | None = None

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        into = self.model.state_dict()
        async for name, weight in weights:
            into.pop(name).copy_(weight)
        assert not into, f"{list(into)} did not arrive"
        self.global_steps = global_steps


class Rollout(CheckpointEngineWorker):
    """veRL's own rollout worker; `update_late` is what a partial rollout calls."""

    def __init__(self, rollout_config: Any, model_config: Any) -> None:
        super().__init__(rollout_config, model_config, ServerAdapter(rollout_config, model_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def newest_step(self) -> int | None:
        return await self.checkpoint_engine.newest_step()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def update_late(self, global_steps: int) -> None:
        weights = self.checkpoint_engine.get_weights(global_steps)
        await self.server_adapter.update_weights(weights, global_steps=global_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self) -> Digests:
        return {name: digest(each) for name, each in self.server_adapter.model.state_dict().items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serves(self) -> int | None:
        return self.server_adapter.global_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate(self) -> list[int]:
        answer = self.server_adapter.model.generate(
            torch.tensor([[1, 5]]), max_new_tokens=4, do_sample=False
        )
        return answer[0].tolist()


class Replica(RolloutReplica):
    """A replica without servers, of which there are none to interrupt."""

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        raise NotImplementedError

    async def launch_servers(self) -> None:
        raise NotImplementedError


def config_with_us(model: str, root: str) -> DictConfig:
    """veRL's own defaults, with the settings that the how-to says."""
    config = configured(model, root)
    rollout = {
        "tensor_model_parallel_size": WORKERS,
        "checkpoint_engine": {
            "backend": BACKEND,
            "custom_backend_module": "trinity_sync.integrations.verl.checkpoint_engine",
            "engine_kwargs": {BACKEND: {"root": root}},
        },
    }
    bf16 = {"fsdp_config": {"model_dtype": "bf16"}}
    return OmegaConf.merge(config, {"actor_rollout_ref": {"rollout": rollout, "actor": bf16}})


def start(model: str, root: str) -> tuple[Any, Any, CheckpointEngineManager]:
    """Start trainer and rollout workers; return their groups, and veRL's manager of both."""
    config = config_with_us(model, root).actor_rollout_ref
    classes = {
        "actor": RayClassWithInitArgs(ray.remote(Actor), config=config, role="actor"),
        "rollout": RayClassWithInitArgs(
            ray.remote(Rollout),
            rollout_config=omega_conf_to_dataclass(config.rollout),
            model_config=omega_conf_to_dataclass(config.model),
        ),
    }
    actors, rollouts = (
        RayWorkerGroup(
            resource_pool=RayResourcePool(processes),
            ray_cls_with_init=classes[name],
            device_name="cpu",
        )
        for name, processes in (("actor", [RANKS]), ("rollout", [1] * WORKERS))
    )
    actors.init_model()
    replica = Replica(0, config.rollout, config.model)
    replica.workers = rollouts.workers
    made = omega_conf_to_dataclass(config.rollout.checkpoint_engine)
    return actors, rollouts, CheckpointEngineManager(made, actors, [replica])
