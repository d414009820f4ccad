"""Assembly of the complete tensors of a model from the files of all ranks, one at a time.

A file of ``torch.save`` is what an image in shared memory is, so files are put together as images
are (`unshard`). They are mapped; only tensors and plain values are unpickled.
"""

import mmap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from trinity_sync.errors import ExportError, ImageError, WeightSyncError
from trinity_sync.tensors.dtensor_shards import have_equal_bits
from trinity_sync.tensors.unshard import combine_tensor, plan_unshard, view_full_tensor

Meta = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a complete tensor."""


class ShardedModel:
    """A model that ranks saved, each in a file of its own; ``files`` are in the order of ranks.

    Raises:
        ExportError: the files are not the shards of one model.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._images = [_map_file(path) for path in files]
        try:
            images = [image.numpy().data for image in self._images]
            plan = plan_unshard(images, compare_replicas=True)
        except (ImageError, WeightSyncError) as error:
            raise ExportError(
                f"{files[0].parent}: {error}; these files are not the shards of one FSDP model, "
                "export another step"
            ) from error
        self._tensors = {name: full for full in plan for name in full.names}

    @property
    def metas(self) -> dict[str, Meta]:
        """Shape and dtype of each tensor, by its name in the plain model."""
        return {name: (torch.Size(full.shape), full.dtype) for name, full in self._tensors.items()}

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two complete tensors have the same bits."""
        one, two = self._tensors[name], self._tensors[other]
        return one is two or (
            (one.shape, one.dtype) == (two.shape, two.dtype)
            and have_equal_bits(*(view_full_tensor(each, self._images) for each in (one, two)))
        )

    def read_tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a complete tensor, in memory of its own; each part is converted by itself."""
        return combine_tensor(replace(self._tensors[name], read_dtype=dtype), self._images)


def _map_file(path: Path) -> torch.Tensor:
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(content, dtype=torch.uint8)
