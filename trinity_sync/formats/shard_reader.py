"""Assembly of complete tensors from the files of all ranks, one at a time; the files are mapped.

FSDP saves a DTensor for each parameter: the rank's local tensor, with its mesh and placements. They
are sufficient to assemble the tensor, without a process group.
"""

import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trinity_sync.errors import ExportError
from trinity_sync.formats.saved_component import narrow
from trinity_sync.tensors.dtensor_shards import (
    compute_own_box,
    compute_shard_boxes,
    have_equal_bits,
    is_outside_mesh,
)
from trinity_sync.tensors.safe_load import load_file
from trinity_sync.tensors.torch_private import get_shard, map_plain_names

Meta = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a complete tensor."""


class ShardedModel:
    """A model that ranks saved, each in a file of its own; ``files`` are in the order of ranks.

    Files are unpickled with ``weights_only`` if possible, otherwise, if they are trusted
    (``tensors.safe_load``), completely as in veRL, which runs their code.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)
        self._states: dict[int, dict[str, Any]] = {}

    @property
    def names(self) -> list[str]:
        """Names of the tensors in the plain model, in the order in which they were saved.

        Raises:
            ExportError: another rank saved tensors of which rank 0 has no part.
        """
        first = self._open_state(0)
        for rank in range(1, len(self.files)):
            if more := self._open_state(rank).keys() - first.keys():
                raise self._make_error(min(more), f"is in {self.files[rank].name}, not of rank 0")
        return list(first)

    def read_meta(self, name: str) -> Meta:
        """Return shape and dtype of a complete tensor.

        Raises:
            ExportError: the value is not a tensor.
        """
        value = self._open_state(0)[name]
        if not isinstance(value, torch.Tensor):
            raise ExportError(
                f"{self.files[0]}: {name} is a {type(value).__name__}, not a tensor; such a model "
                "cannot be exported"
            )
        return value.shape, value.dtype

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two complete tensors have the same bits."""
        (shape, dtype), meta = self.read_meta(name), self.read_meta(other)
        if (shape, dtype) != meta:
            return False
        one, two = (self._open_state(0)[each] for each in (name, other))
        sharded = isinstance(one, DTensor), isinstance(two, DTensor)
        if sharded == (False, False) or (all(sharded) and one.placements == two.placements):
            return all(
                have_equal_bits(*(get_shard(self._get_part(each, rank)) for each in (name, other)))
                for rank in range(len(self.files))
            )
        return have_equal_bits(*(self.read_tensor(each, dtype) for each in (name, other)))

    def read_tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a complete tensor, in memory of its own; each part is converted by itself.

        Raises:
            ExportError: the files do not contain all of the tensor.
        """
        first = self._open_state(0)[name]
        if not isinstance(first, DTensor):
            for rank in range(1, len(self.files)):
                if not torch.equal(first, self._get_part(name, rank)):
                    raise self._make_error(name, f"differs between rank 0 and rank {rank}")
            return first.to(dtype, copy=True).contiguous()
        try:
            boxes = compute_shard_boxes(first, rank=0)
        except ValueError as error:
            raise self._make_error(name, str(error)) from error
        full = torch.empty(first.shape, dtype=dtype, device="cpu")
        for rank, box in boxes.items():
            shard = get_shard(self._get_part(name, rank))
            if tuple(shard.shape) != box.sizes:
                raise self._make_error(
                    name, f"has {list(shard.shape)} of rank {rank}, not {[*box.sizes]}"
                )
            narrow(full, *box).copy_(shard)
        for rank in range(len(self.files)):
            if is_outside_mesh(first, 0, rank) and not self._is_copy(name, rank, full):
                raise self._make_error(
                    name, f"on {first.device_mesh} differs between rank 0 and rank {rank}"
                )
        return full

    def _is_copy(self, name: str, rank: int, full: torch.Tensor) -> bool:
        """Return whether what a rank of another submesh saved is equal, or nothing."""
        part = self._get_part(name, rank)
        if not isinstance(part, DTensor) or part.shape != full.shape:
            return False
        box = compute_own_box(part)
        return box is None or torch.equal(narrow(full, *box), get_shard(part).to(full.dtype))

    def _get_part(self, name: str, rank: int) -> Any:
        try:
            return self._open_state(rank)[name]
        except KeyError:
            raise self._make_error(name, f"is missing in {self.files[rank].name}") from None
        except IndexError:
            raise self._make_error(
                name, f"has a part of rank {rank}, which saved no file"
            ) from None

    def _make_error(self, name: str, why: str) -> ExportError:
        return ExportError(
            f"{self.files[0].parent}: {name} {why}; these files are not the shards of one FSDP "
            "model, export another step"
        )

    def _open_state(self, rank: int) -> dict[str, Any]:
        if rank not in self._states:
            self._states[rank] = _load(self.files[rank])
        return self._states[rank]


def _load(path: Path) -> dict[str, Any]:
    mesh = logging.getLogger("torch.distributed.device_mesh")
    level = mesh.level
    mesh.setLevel(logging.ERROR)  # it warns that there is no process group
    try:
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError:
            state = load_file(path, mmap=True)
    except (RuntimeError, ValueError, AttributeError, ImportError) as error:
        raise ExportError(f"{path} is not a file of torch.save: {error}") from error
    finally:
        mesh.setLevel(level)
    if not isinstance(state, dict):
        raise ExportError(f"{path} contains a {type(state).__name__}, not the state of a model")
    try:
        return {name: state[saved] for name, saved in map_plain_names(state).items()}
    except ValueError as error:
        raise ExportError(f"{path}: {error}; save the state of the plain model") from error
