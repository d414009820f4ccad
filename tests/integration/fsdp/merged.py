"""Whole tensors from the shards of a folder, put together by hand, to compare others with."""

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor


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
