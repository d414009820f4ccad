"""A tiny model under FSDP1 or FSDP2, as veRL builds it, and the training that changes it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, StateDictType
from torch.distributed.fsdp.api import ShardedStateDictConfig
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager as VerlManager
from verl.utils.fsdp_utils import apply_fsdp2

from tests.support.states import copied
from trinity_sync.integrations.verl import FSDPCheckpointManager


def gathered(state: Any) -> Any:
    """The same structure with whole tensors, which PyTorch gathers."""
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    if isinstance(state, list):
        return [gathered(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


def manager_of(kind: type, engine: Any, **more: Any) -> Any:
    """A checkpoint manager as veRL's engine makes it."""
    parts = (engine.module, engine.optimizer, engine.lr_scheduler)
    return kind(*parts, engine.model_config.get_processor(), engine.checkpoint_config, **more)


class Trained:
    """Model, optimizer and schedule of one rank."""

    def __init__(
        self,
        folder: Path,
        version: int,
        *,
        seed: int = 0,
        replicas: int = 1,
        original: bool = False,
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed + dist.get_rank())
        shape, names = (replicas, dist.get_world_size() // replicas), ("ddp", "fsdp")
        if replicas == 1:
            shape, names = shape[1:], names[1:]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if version == 1:
            # not sync_module_states, which veRL asks for: FSDP1 refuses it on CPU
            self.model: Any = FSDP(
                module,
                auto_wrap_policy=ModuleWrapPolicy({Qwen2DecoderLayer}),
                device_id=torch.device("cpu"),
                device_mesh=mesh,
                use_orig_params=original,
            )
            FSDP.set_state_dict_type(
                self.model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
            )
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
            apply_fsdp2(module, {"mesh": mesh, "mp_policy": policy}, {})
            self.model = module
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.vocabulary = module.config.vocab_size

    def step(self) -> float:
        """One optimizer step on random tokens."""
        tokens = torch.randint(self.vocabulary, (2, 8))
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.item()

    def manager(self, coordinator: Any = None, **contents: list[str]) -> FSDPCheckpointManager:
        return FSDPCheckpointManager(*self._parts(contents), coordinator=coordinator)

    def verls_manager(self, **contents: list[str]) -> VerlManager:
        return VerlManager(*self._parts(contents))

    def _parts(self, contents: dict[str, list[str]]) -> tuple[Any, ...]:
        config = CheckpointConfig(**contents)
        return self.model, self.optimizer, self.schedule, self.tokenizer, config

    def state(self) -> dict[str, Any]:
        """A copy of everything that a checkpoint holds, by component."""
        from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

        return copied(
            {
                "model": dict(self.model.state_dict()),
                "optim": self.optimizer.state_dict(),
                "extra_state": {
                    "lr_scheduler": self.schedule.state_dict(),
                    "rng": BaseCheckpointManager.get_rng_state(),
                },
            }
        )
