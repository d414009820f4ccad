"""The driver of a PPO training by veRL's own parts, as far as it goes without rollouts.

``python -m tests.environments.verl.ppo MODEL ROOT STEPS SAVE_EVERY LOG``: veRL's environment of
Ray, actor and critic in its colocated worker groups of two ranks, and of `RayPPOTrainer` the
methods that update both, save and resume. What rollouts would give is made up, from the position of
the dataloader. With ``STRATEGY=veomni`` the engines are VeOmni's.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer import config as verl_config
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import (
    ActorRolloutRefWorker,
    TrainingWorker,
    TrainingWorkerConfig,
)
from verl.workers.utils.losses import value_loss

from trinity_sync.integrations.verl.driver import wrap_fit

RANKS, BATCH, PROMPT, ANSWER, VOCABULARY = 2, 4, 2, 4, 16
STRATEGY = os.environ.get("STRATEGY", "fsdp2")
ENGINES = "veomni_" if STRATEGY == "veomni" else ""
DEFAULTS = Path(verl_config.__file__).parent / f"_generated_ppo_{ENGINES}trainer.yaml"
FP32 = {f"{what}_dtype": "fp32" for what in ("param", "reduce", "buffer")}
MODEL = {
    "use_remove_padding": False,
    "enable_gradient_checkpointing": False,
    "override_config": {"attn_implementation": "sdpa"},
}
ENGINE = {"strategy": STRATEGY, "use_torch_compile": False, "mixed_precision": FP32}
if ENGINES:
    ENGINE |= {
        "mixed_precision": True,
        "attn_implementation": "sdpa",
        "moe_implementation": "eager",
    }
OF_ACTOR, OF_CRITIC = ("veomni", "veomni") if ENGINES else ("fsdp_config", "fsdp")
PART = {
    "strategy": STRATEGY,
    "ppo_mini_batch_size": BATCH,
    "ppo_micro_batch_size_per_gpu": 1,
    "optim": {"lr": 1e-3},
}


def configured(model: str, root: str) -> Any:
    """veRL's own defaults, for a tiny model on two ranks without accelerators."""
    ours = {
        "trainer": {"default_local_dir": root, "n_gpus_per_node": RANKS, "device": "cpu"},
        "actor_rollout_ref": {
            "model": {"path": model, **MODEL},
            "actor": {"use_torch_compile": False, OF_ACTOR: ENGINE, **PART},
            "rollout": {"name": "none", "log_prob_micro_batch_size_per_gpu": 1},
        },
        "critic": {"model": {"path": model, **MODEL}, OF_CRITIC: ENGINE, **PART},
    }
    OmegaConf.set_struct(defaults := OmegaConf.load(DEFAULTS), False)
    config = OmegaConf.merge(defaults, ours)
    OmegaConf.resolve(config)
    return config


def worker_groups(config: Any) -> tuple[Any, Any]:
    """Those of actor and critic, as `RayPPOTrainer.init_workers` makes them."""
    critic = omega_conf_to_dataclass(config.critic)
    critic.engine.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
    of_critic = TrainingWorkerConfig(
        model_type="value_model",
        model_config=critic.model,
        engine_config=critic.engine,
        optimizer_config=critic.optim,
        checkpoint_config=critic.checkpoint,
    )
    actor = {"config": config.actor_rollout_ref, "role": "actor"}
    classes = {
        "actor": RayClassWithInitArgs(ray.remote(ActorRolloutRefWorker), **actor),
        "critic": RayClassWithInitArgs(ray.remote(TrainingWorker), config=of_critic),
    }
    colocated = RayWorkerGroup(
        resource_pool=RayResourcePool([RANKS]),
        ray_cls_with_init=create_colocated_worker_cls(class_dict=classes),
        device_name="cpu",
    )
    groups = colocated.spawn(prefix_set=classes.keys())
    return groups["actor"], groups["critic"]


def trainer_of(config: Any) -> Any:
    """A `RayPPOTrainer` with what its methods around checkpoints and updates need."""
    trainer = object.__new__(RayPPOTrainer)
    trainer.config, trainer.use_critic = config, True
    trainer.global_steps, trainer.max_steps_duration = 0, 0.0
    trainer.train_dataloader = StatefulDataLoader(list(range(1000)), batch_size=1)
    trainer.actor_rollout_wg, trainer.critic_wg = worker_groups(config)
    trainer.critic_wg.reset()
    trainer.critic_wg.set_loss_fn(partial(value_loss, omega_conf_to_dataclass(config.critic)))
    trainer.actor_rollout_wg.init_model()
    return trainer


def experience(seed: int) -> DataProto:
    """What rollouts and rewards might have given."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, VOCABULARY, (BATCH, PROMPT + ANSWER), generator=random)
    ones = torch.ones(BATCH, ANSWER)

    def numbers() -> torch.Tensor:
        return torch.randn(BATCH, ANSWER, generator=random)

    return DataProto.from_single_dict(
        {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "position_ids": torch.arange(PROMPT + ANSWER).expand(BATCH, -1).contiguous(),
            "prompts": tokens[:, :PROMPT],
            "responses": tokens[:, PROMPT:],
            "response_mask": ones,
            "old_log_probs": -2.8 * ones,
            "advantages": numbers(),
            "values": numbers(),
            "returns": numbers(),
        }
    )


def main(model: str, root: str, steps: int, save_every: int, log: Path) -> None:
    """Train, save, and go on from what was saved."""
    config = configured(model, root)
    environment = OmegaConf.to_container(OmegaConf.create(get_ppo_ray_runtime_env(config)))
    ray.init("local", num_cpus=8, include_dashboard=False, runtime_env=environment)
    config.trainer.save_freq = save_every
    trainer = trainer_of(config)
    trainer._load_checkpoint()

    def fit(trainer: Any) -> None:
        with log.open("a", buffering=1) as lines:
            for (seed,) in trainer.train_dataloader:
                trainer.global_steps += 1
                batch = experience(int(seed))
                seen = [trainer._update_actor(batch), trainer._update_critic(batch)]
                metrics = {
                    k: repr(v) for each in seen for k, v in each.meta_info["metrics"].items()
                }
                kept = {key: value for key, value in metrics.items() if "perf" not in key}
                lines.write(json.dumps({"step": trainer.global_steps, **kept}) + "\n")
                if trainer.global_steps % save_every == 0:
                    trainer._save_checkpoint()
                if trainer.global_steps == steps:
                    break

    wrap_fit(fit)(trainer)


if __name__ == "__main__":
    model, root, steps, save_every, log = sys.argv[1:]
    main(model, root, int(steps), int(save_every), Path(log))
