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
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from trinity_sync.errors import ExportError
from trinity_sync.snapshot.safe_load import load_file

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
        if isinstance(first, DTensor):
            mesh, placements = first.device_mesh.mesh, tuple(first.placements)
            whole = self._together(name, dtype, mesh, placements)
        else:
            whole = first.to(dtype, copy=True)
            for rank in range(1, len(self.files)):
                if not torch.equal(first, self._part(name, rank)):
                    raise self._unfit(name, f"differs between rank 0 and rank {rank}")
        if whole.shape != first.shape:
            raise self._unfit(name, f"has {tuple(whole.shape)}, not {tuple(first.shape)}")
        return whole.contiguous()

    def _together(
        self, name: str, dtype: torch.dtype, mesh: torch.Tensor, placements: tuple[Placement, ...]
    ) -> torch.Tensor:
        if not placements:
            part = self._part(name, int(mesh))
            local = part.to_local() if isinstance(part, DTensor) else part
            return local.to(dtype)
        placement, inner = placements[0], placements[1:]
        if type(placement) is Replicate:
            return self._together(name, dtype, mesh[0], inner)
        if type(placement) is Shard:
            parts = [self._together(name, dtype, row, inner) for row in mesh]
            return torch.cat(parts, dim=placement.dim)
        raise self._unfit(name, f"is placed as {placement}, which is neither whole nor split")

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
