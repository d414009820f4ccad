"""A configuration of TorchTitan: its Llama 3 with two layers, on texts and a tokenizer of a folder.

``python -m tests.environments.torchtitan.train --module THIS_MODULE --config tiny`` trains it in a
folder that `make_assets` has prepared.
"""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig, derive
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from tests.support.job import mapped_nbytes
from trinity_sync.integrations.torchtitan import TrinitySyncCheckpointManager

WORDS = 100


def make_assets(folder: Path) -> None:
    """Write the texts and the tokenizer of words, of which ``tiny`` reads."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{n}": n for n in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "texts").mkdir()
    with (folder / "texts" / "texts.json").open("w") as texts:
        for n in range(400):
            words = " ".join(f"w{(n * k + k) % WORDS}" for k in range(3, 40))
            print(json.dumps({"text": words}), file=texts)


def tiny() -> Trainer.Config:
    """Return the configuration, with TorchTitan's own checkpoint manager."""
    return _make(model_registry("debugmodel"))


def experts() -> Trainer.Config:
    """Return that of its Qwen 3, whose layers are mixtures of experts."""
    return _make(qwen3.model_registry("debugmodel_moe"))


def _make(spec: ModelSpec) -> Trainer.Config:
    del spec.model.layers[2:]
    for layer in spec.model.layers:  # FlexAttention has no backward pass on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        hf_assets_path="tokenizer",
        dump_folder=".",
        model_spec=spec,
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=4),
        training=TrainingConfig(local_batch_size=2, seq_len=64, steps=12, disable_cuda_graphs=True),
        debug=DebugConfig(seed=7),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path="texts"),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        checkpoint=CheckpointManager.Config(
            enable=True, folder="ckpts", interval=2, last_save_model_only=False, keep_latest_k=3
        ),
    )


class DyingManager(TrinitySyncCheckpointManager):
    """All ranks die the instant after they have staged step 6.

    The memory of their first save is touched before it: weights, and two tensors of AdamW a weight,
    names and headers, rounded up to 2 MiB.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(TrinitySyncCheckpointManager.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module], **parts: Any) -> None:
        super().__init__(config, model_parts=model_parts, **parts)
        assert self._saves
        self._saves._stager.memory.run(looks=False)
        weights = sum(each.to_local().nbytes for part in model_parts for each in part.parameters())
        mapped = mapped_nbytes(self._saves.spool.slot("actor", "dcp", self._saves.rank, 0))
        assert 3 * weights <= mapped <= 3 * weights + (3 << 20), (weights, mapped)

    def _save(self, curr_step: int, *args: Any, **kwargs: Any) -> bool:
        saved = super()._save(curr_step, *args, **kwargs)
        if curr_step == 6:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        return saved


def dying() -> Trainer.Config:
    """Return `tiny`, saved through trinity_sync, of which all ranks die."""
    config = tiny()
    config.checkpoint = derive(config.checkpoint, DyingManager.Config)
    return config
