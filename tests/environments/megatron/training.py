"""A small GPT that real Megatron trains on gloo ranks, with veRL's manager or ours."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from omegaconf import OmegaConf
from transformers import Qwen2Config

VOCABULARY, LENGTH = 64, 16


class Trained:
    """A model and its optimizer.

    Args:
        tensor: tensor-parallel size; ranks of no parallelism are data-parallel.
        pipeline, context, expert: sizes of the other parallelisms. With one of them, the gradients
            are drawn, since Megatron's schedules and attention need a GPU.
        virtual: parts of the model on each pipeline rank, or 0 for one that is not interleaved.
        experts: of each layer; by default as many as expert parallelism needs.
        distributed: bfloat16 weights, whose optimizer keeps float32 masters and is sharded over the
            data-parallel ranks; otherwise float32 weights and a whole optimizer.
        reshardable: the distributed optimizer is gathered at each save.
    """

    def __init__(
        self,
        tensor: int,
        *,
        seed: int = 0,
        distributed: bool = True,
        reshardable: bool = False,
        pipeline: int = 1,
        virtual: int = 0,
        context: int = 1,
        expert: int = 1,
        experts: int = 0,
        layers: int = 2,
    ) -> None:
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        sizes = {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "virtual_pipeline_model_parallel_size": virtual or None,
            "context_parallel_size": context,
            "expert_model_parallel_size": expert,
        }
        mpu.initialize_model_parallel(**sizes)
        self.draws = max(pipeline, context, expert, experts) > 1
        experts = experts or (2 * expert if expert > 1 else 0)
        self.distributed, self.reshardable = distributed, reshardable
        dtype = torch.bfloat16 if distributed else torch.float32
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        tensor_parallel.random.initialize_rng_tracker(force_reset=True)
        tensor_parallel.get_cuda_rng_tracker().set_states({"model": torch.get_rng_state()})
        self.config = TransformerConfig(
            num_layers=layers,
            hidden_size=64,
            num_attention_heads=4,
            **sizes,
            pipeline_dtype=torch.bfloat16 if distributed else torch.float32,
            num_moe_experts=experts or None,
            moe_token_dispatcher_type="allgather",
            use_cpu_initialization=True,
            add_bias_linear=False,  # padding between parameters would be saved, with any content
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            bf16=distributed,
            params_dtype=dtype,
        )
        for_ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        self.parts = [
            DistributedDataParallel(self.config, for_ddp, part.to(dtype))
            for part in self._make_parts(virtual, experts)
        ]
        self.model = self.parts[0]
        for part in self.parts:
            part.broadcast_params()
        for_optimizer = OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-4,
            bf16=distributed,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        self.optimizer = get_megatron_optimizer(for_optimizer, self.parts)
        self.schedule = OptimizerParamScheduler(
            self.optimizer, 0.0, 1e-3, 1e-4, 2, 20, "linear", 0.0, 0.0, 20, "constant"
        )

    def _make_parts(self, virtual: int, experts: int) -> Iterator[GPTModel]:
        """Make the parts of the model that this rank has, in their order."""
        for stage in range(virtual) if virtual else (None,):
            where = {"ignore_virtual": False, "vp_stage": stage}
            yield GPTModel(
                self.config,
                get_gpt_layer_local_spec(num_experts=experts or None),
                VOCABULARY,
                LENGTH,
                pre_process=mpu.is_pipeline_first_stage(**where),
                post_process=mpu.is_pipeline_last_stage(**where),
                vp_stage=stage,
            )

    def load(self, manager: Any, folder: str) -> None:
        """Load a step, with torch's Adam in the place of Transformer Engine's.

        Megatron loads into states, which torch's Adam has after one step only. It leaves the number
        of steps where Transformer Engine's Adam has it, in the groups.
        """
        self._train()  # without the schedule, to which Megatron adds what it loads
        manager.load_checkpoint(folder)
        for adam in (each.optimizer for each in self.optimizer.chained_optimizers):
            for group in adam.param_groups:
                for parameter in group["params"]:
                    if "step" in group:
                        adam.state[parameter]["step"] = torch.tensor(float(group["step"]))

    def step(self) -> float:
        """Train one step, and return the loss."""
        loss = self._train()
        self.schedule.step(1)
        return loss

    def _train(self) -> float:
        """Train on numbers of the RNG, which is part of the saved state."""
        if self.draws:
            parameters = [each for part in self.parts for each in part.parameters()]
            for parameter in parameters:
                parameter.main_grad.copy_(torch.randn(parameter.shape))
            for part in self.parts:
                part.finish_grad_sync()
            self.optimizer.step()
            return float(sum(each.float().square().sum() for each in parameters))
        tokens = torch.randint(VOCABULARY, (2, LENGTH))
        positions = torch.arange(LENGTH).expand_as(tokens)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(tokens, positions, mask, labels=tokens).mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return float(loss)

    def make_manager(
        self, kind: type, *, contents: Sequence[str] = ("model", "optimizer", "extra"), **named: Any
    ) -> Any:
        """Return a manager with the arguments of veRL's Megatron engine."""
        hf_config = Qwen2Config(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2)
        megatron = {
            "dist_ckpt_optim_fully_reshardable": self.reshardable,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        arguments = {
            "config": OmegaConf.create({"model": {"path": ""}, "megatron": megatron}),
            "checkpoint_config": OmegaConf.create(
                {"save_contents": [*contents], "load_contents": [*contents], "async_save": False}
            ),
            "model_config": hf_config,
            "transformer_config": self.config,
            "role": "actor",
            "model": self.parts,
            "arch": "Qwen2ForCausalLM",
            "hf_config": hf_config,
            "param_dtype": self.config.params_dtype,
            "share_embeddings_and_output_weights": False,
            "processing_class": None,
            "optimizer": self.optimizer,
            "optimizer_scheduler": self.schedule,
            "use_distributed_optimizer": self.distributed,
            "use_checkpoint_opt_param_scheduler": True,
            "use_dist_checkpointing": True,
        }
        return kind(**arguments | named)
