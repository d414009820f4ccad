"""The policy, trained by veRL: its FSDP engine, GRPO advantages and PPO loss.

Each rank has an instance. The methods are collective: every rank calls them in the same order.
"""

import hashlib
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from grpo_copy.cpu_platform import use_cpu
from grpo_copy.model import PAD, VOCABULARY
from grpo_copy.task import Batch

use_cpu()

# veRL reads the platform while it is imported
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import (  # noqa: E402
    ActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402


class Policy:
    """One rank's part of the policy, with its optimizer and learning-rate schedule.

    Args:
        model: folder with a Hugging Face model and tokenizer.
        learning_rate: peak of the schedule, reached after ten steps.
        seed: seed of torch, numpy and ``random``, to which the rank is added.
    """

    def __init__(self, model: Path, *, learning_rate: float = 2e-3, seed: int = 0) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed + dist.get_rank())
        np.random.seed(seed + dist.get_rank())
        random.seed(seed + dist.get_rank())
        self.engine = FSDPEngineWithLMHead(
            model_config=HFModelConfig(
                path=str(model),
                use_remove_padding=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "sdpa"},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_remove_padding=False,
                use_torch_compile=False,
                use_dynamic_bsz=False,
                mixed_precision={f"{what}_dtype": "fp32" for what in ("param", "reduce", "buffer")},
            ),
            optimizer_config=FSDPOptimizerConfig(lr=learning_rate, lr_warmup_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
        self.engine.initialize()
        self._loss = partial(
            ppo_loss,
            ActorConfig(
                strategy="fsdp2",
                rollout_n=1,
                ppo_micro_batch_size_per_gpu=1,
                clip_ratio_high=0.28,
            ),
        )

    def train_on(self, batch: Batch) -> float:
        """Take one optimizer step on this rank's half of ``batch``; returns this rank's loss."""
        with self.engine.train_mode():
            result = self.engine.train_batch(_for_verl(batch), self._loss)
        self.engine.lr_scheduler_step()
        return float(sum(result["loss"]))

    def fingerprint(self) -> dict[str, str]:
        """Return the SHA-256 of this rank's weights, optimizer state, schedule and RNG states.

        Python's own generator is not included: training does not use it, but threads of libraries
        do.
        """
        random_states = self.engine.checkpoint_manager.get_rng_state()
        return {
            "weights": _digest(self.engine.module.state_dict()),
            "optimizer": _digest(self.engine.optimizer.state_dict()),
            "schedule": _digest(self.engine.lr_scheduler.state_dict()),
            "random state": _digest([random_states["cpu"], random_states["numpy"]]),
        }


def _for_verl(batch: Batch) -> Any:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mask = torch.ones_like(batch.log_probs)
    token_rewards = torch.zeros_like(batch.log_probs)
    token_rewards[:, -1] = batch.rewards
    advantages, _ = compute_grpo_outcome_advantage(token_rewards, mask, batch.groups.numpy())
    mine = torch.arange(rank, len(batch.rewards), world_size)
    # shuffled, so a resumed run is bit-equal only with the saved RNG state
    mine = mine[torch.randperm(len(mine))]
    sequences = torch.cat([batch.prompts, batch.answers], dim=1)[mine]
    positions = torch.arange(sequences.shape[1]).expand_as(sequences)
    in_answer = torch.cat([torch.zeros_like(batch.prompts), torch.ones_like(batch.answers)], dim=1)
    return tu.get_tensordict(
        {
            "input_ids": _jagged(sequences),
            "position_ids": _jagged(positions),
            "loss_mask": _jagged(in_answer[mine]),
            "attention_mask": torch.ones_like(sequences),
            "prompts": batch.prompts[mine],
            "responses": batch.answers[mine],
            "response_mask": mask[mine],
            "old_log_probs": batch.log_probs[mine],
            "advantages": advantages[mine],
        },
        non_tensor_dict={
            "temperature": 1.0,
            "use_dynamic_bsz": False,
            "use_remove_padding": False,
            "micro_batch_size_per_gpu": len(mine),
            "global_batch_size": len(batch.rewards),
            "pad_token_id": VOCABULARY.index(PAD),
        },
    )


def _jagged(rows: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows.unbind()), layout=torch.jagged)


def _digest(value: Any) -> str:
    """Return the SHA-256 of all leaves with their paths, tensors by their bytes."""
    seen = hashlib.sha256()

    def walk(path: str, node: Any) -> None:
        if isinstance(node, dict):
            for key in node:
                walk(f"{path}/{key}", node[key])
        elif isinstance(node, list | tuple):
            for number, item in enumerate(node):
                walk(f"{path}/{number}", item)
        elif isinstance(node, torch.Tensor):
            local = node.to_local() if isinstance(node, DTensor) else node
            seen.update(f"{path} {node.dtype} {tuple(node.shape)} ".encode())
            seen.update(local.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(node, np.ndarray):
            seen.update(f"{path} {node.dtype} {node.shape} ".encode())
            seen.update(node.tobytes())
        else:
            seen.update(f"{path} {node!r} ".encode())

    walk("", value)
    return seen.hexdigest()
