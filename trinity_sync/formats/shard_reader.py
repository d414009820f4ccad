"""Whole tensors out of the files of all ranks, one at a time; the files are mapped, not read.

What FSDP saves is a DTensor a parameter: this rank's part, with the mesh and the placements that
say where it belongs. No process group is needed to put the parts together again.
"""

import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trinity_sync.errors import ExportError
from trinity_sync.snapshot.dtensor_shards import compute_shard_boxes
from trinity_sync.snapshot.safe_load import load_file
from trinity_sync.snapshot.torch_private import get_shard

Meta = tuple[torch.Size, torch.dtype]


class ShardedModel:
    """The model that ranks saved, each in a file of its own.

    Args:
        files: by rank. Unpickled with ``weights_only`` where that is possible, else, if they are
            trusted (``snapshot.safe_load``), as veRL does it, which runs what they say.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._states: dict[int, dict[str, Any]] = {}

    @property
    def names(self) -> list[str]:
        """The tensors, in the order in which they were saved."""
        return list(self._state(0))

    def meta(self, name: str) -> Meta:
        """Shape and dtype of the whole tensor."""
        value = self._state(0)[name]
        if not isinstance(value, torch.Tensor):
            raise ExportError(
                f"{self.files[0]}: {name} is a {type(value).__name__} and no tensor; a model that "
                "holds such cannot be exported"
            )
        return value.shape, value.dtype

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor, in memory of its own, in a dtype (each part is cast by itself).

        Raises:
            ExportError: its parts do not make up the tensor.
        """
        first = self._state(0)[name]
        if not isinstance(first, DTensor):
            for rank in range(1, len(self.files)):
                if not torch.equal(first, self._part(name, rank)):
                    raise self._unfit(name, f"differs between rank 0 and rank {rank}")
            return first.to(dtype, copy=True).contiguous()
        try:
            boxes = compute_shard_boxes(first)
        except ValueError as error:
            raise self._unfit(name, str(error)) from error
        whole = torch.empty(first.shape, dtype=dtype)
        for rank, (offsets, sizes) in boxes.items():
            shard = get_shard(self._part(name, rank))
            if tuple(shard.shape) != sizes:
                raise self._unfit(name, f"has {list(shard.shape)} of rank {rank}, not {[*sizes]}")
            target = whole
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            target.copy_(shard)
        return whole

    def _part(self, name: str, rank: int) -> Any:
        try:
            return self._state(rank)[name]
        except KeyError:
            raise self._unfit(name, f"is missing in {self.files[rank].name}") from None
        except IndexError:
            raise self._unfit(name, f"has a part of rank {rank}, which saved no file") from None

    def _unfit(self, name: str, why: str) -> ExportError:
        return ExportError(
            f"{self.files[0].parent}: {name} {why}; these files are not the shards of one FSDP "
            "model, export another step"
        )

    def _state(self, rank: int) -> dict[str, Any]:
        if rank not in self._states:
            self._states[rank] = _load(self.files[rank])
        return self._states[rank]


def _load(path: Path) -> dict[str, Any]:
    mesh = logging.getLogger("torch.distributed.device_mesh")
    level = mesh.level
    mesh.setLevel(
        logging.ERROR
    )  # it warns that there is no process group, which is as it should be
    try:
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError:
            state = load_file(path, mmap=True)
    except (RuntimeError, ValueError, AttributeError, ImportError) as error:
        raise ExportError(f"{path} is no file of torch.save: {error}") from error
    finally:
        mesh.setLevel(level)
    if not isinstance(state, dict):
        raise ExportError(f"{path} holds a {type(state).__name__} and no state of a model")
    return state
