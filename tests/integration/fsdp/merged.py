"""Whole tensors from the shards of a folder, put together by hand, to compare others with."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor


def merged_by_verl(folder: Path, to: Path) -> dict[str, torch.Tensor]:
    """The same by veRL's own merger, which writes a model to ``to``."""
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(folder),
        hf_model_config_path=str(folder / "huggingface"),
        target_dir=str(to),
    )
    FSDPModelMerger(config).merge_and_save()
    return load_file(to / "model.safetensors")


def merged(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of the model whose shards of all ranks are in ``folder``."""
    files = sorted(folder.glob("model_world_size_*_rank_*.pt"), key=_rank)
    shards = [torch.load(file, weights_only=False, mmap=True) for file in files]
    whole = {}
    for name, first in shards[0].items():
        if isinstance(first, DTensor) and first.placements[-1].is_shard():
            parts = [shard[name].to_local() for shard in shards]
            whole[name] = torch.cat(parts, dim=first.placements[-1].dim)
        else:
            whole[name] = first.to_local() if isinstance(first, DTensor) else first
    return whole


def _rank(file: Path) -> int:
    return int(file.stem.rpartition("_")[2])
