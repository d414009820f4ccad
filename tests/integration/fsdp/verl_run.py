"""A driver of veRL's own trainer on real worker groups: two ranks that are actor and critic.

Run by ``test_verl_switch.py`` with the root, the model and what to do; veRL is as it was installed,
and the environment alone says that trinity_sync is to be used.
"""

import json
import sys
from pathlib import Path
from typing import Any

import cpu_workers
import ray
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer import config as verl_config
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync


def trainer_of(root: Path, model: Path) -> Any:
    """What the trainer has after its set-up, without the servers for rollouts."""
    config = OmegaConf.load(Path(verl_config.__file__).parent / "_generated_ppo_trainer.yaml")
    config.trainer.default_local_dir = str(root)
    config.actor_rollout_ref.actor.strategy = config.critic.strategy = "fsdp2"
    environment = get_ppo_ray_runtime_env(config)
    environment["env_vars"] |= cpu_workers.ENVIRONMENT
    ray.init(num_cpus=4, runtime_env=environment, log_to_driver=False)
    roles = {
        role: RayClassWithInitArgs(ray.remote(cpu_workers.OnCPU), str(model))
        for role in ("actor", "critic")
    }
    both = RayWorkerGroup(
        RayResourcePool([2], use_gpu=False, max_colocate_count=1),
        create_colocated_worker_cls(roles),
        device_name="cpu",
    )
    groups = both.spawn(prefix_set=roles)
    for group in groups.values():
        group.reset()
    trainer = object.__new__(PPOTrainerSync)
    trainer.config, trainer.trainer_mode, trainer.use_critic = config, "sync", True
    trainer.actor_rollout_wg, trainer.critic_wg = groups["actor"], groups["critic"]
    trainer.train_dataloader = StatefulDataLoader(list(range(100)), batch_size=1)
    trainer.checkpoint_callback = build_checkpoint_callback(config)
    return trainer


def main(root: str, model: str) -> None:
    """Load what there is, train two steps, save both, and say what was seen."""
    trainer = trainer_of(Path(root), Path(model))
    trainer._load_checkpoint()
    began, batches = trainer.global_steps, iter(trainer.train_dataloader)
    loaded = trainer.actor_rollout_wg.weights(), trainer.critic_wg.weights()
    first = next(batches).item()
    next(batches)
    for _ in range(2):
        trainer.global_steps += 1
        trainer.actor_rollout_wg.change()
        trainer.critic_wg.change()
        trainer._save_checkpoint()
    trainer.actor_rollout_wg.async_calls_finalize_fn_exec(blocking=True)
    saved = trainer.actor_rollout_wg.weights(), trainer.critic_wg.weights()
    print(json.dumps({"began": began, "first": first, "loaded": loaded, "saved": saved}))


main(*sys.argv[1:])
