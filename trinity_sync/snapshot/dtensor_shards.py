"""Where each rank's shard of a DTensor lies in the whole tensor, without a process group.

FSDP, and FSDP2 with tensor parallelism, save DTensors: this rank's shard with the mesh and the
placements of all ranks. The offsets are those that torch computes for DCP; this module adds that
shards which torch places in several pieces are refused, since one offset cannot say where they lie.
"""

import itertools
from collections.abc import Collection
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from trinity_sync.snapshot.torch_private import StridedShard, compute_shard_of_coordinate


class ShardBox(NamedTuple):
    """The part of a whole tensor that one rank holds."""

    offsets: tuple[int, ...]
    """First index in each dimension."""
    sizes: tuple[int, ...]
    """Length in each dimension."""


def compute_shard_boxes(tensor: DTensor) -> dict[int, ShardBox]:
    """Return the part of the whole tensor that each rank holds; of replicas, the first rank's.

    The boxes do not overlap, and together they are the whole tensor. Empty ones are included.

    Args:
        tensor: of any rank of the mesh; its shape is that of the whole tensor.

    Raises:
        ValueError: a placement is neither Shard nor Replicate, or places a shard in several pieces;
            the message says which.
    """
    boxes = _compute_boxes(*_layout(tensor))
    try:
        ranks = tensor.device_mesh.mesh
    except ValueError as error:
        raise ValueError(
            f"lies on a submesh, whose ranks torch does not tell without a process group ({error})"
        ) from error
    return {int(ranks[at]): box for at, box in boxes.items()}


def compute_own_box(tensor: DTensor) -> ShardBox | None:
    """Return the part of the whole tensor that the rank of ``tensor`` holds.

    None for all replicas but the first, and for a rank outside of the mesh. The values of tensors
    are not read, so they may be fake.

    Raises:
        ValueError: as `compute_shard_boxes`.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    return _compute_boxes(*_layout(tensor)).get(tuple(coordinate)) if coordinate else None


def compute_chunk(length: int, count: int, index: int) -> tuple[int, int]:
    """Return start and length of a chunk, as ``torch.chunk`` splits; chunks may be empty.

    Args:
        length: elements to split.
        count: number of chunks.
        index: number of the chunk, from 0.
    """
    size = -(-length // count)
    start = min(index * size, length)
    return start, min(size, length - start)


def _layout(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    return tuple(tensor.shape), tuple(tensor.device_mesh.shape), tuple(tensor.placements)


@lru_cache(maxsize=4096)  # the tensors of a model share a few layouts
def _compute_boxes(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> dict[tuple[int, ...], ShardBox]:
    """Return boxes by coordinate in the mesh."""
    for placement in placements:
        if type(placement) not in (Shard, StridedShard, Replicate):
            raise ValueError(f"is placed as {placement!r}; only Shard and Replicate can be read")
    axes = [
        range(1 if isinstance(placement, Replicate) else count)
        for count, placement in zip(mesh_shape, placements, strict=True)
    ]
    boxes = {}
    for at in itertools.product(*axes):
        sizes, offsets = compute_shard_of_coordinate(shape, mesh_shape, at, placements)
        boxes[at] = ShardBox(tuple(offsets), tuple(sizes))
    if not _are_tiles(shape, boxes.values()):
        raise ValueError(f"is placed as {placements}, with shards in several pieces")
    return boxes


def _are_tiles(shape: tuple[int, ...], boxes: Collection[ShardBox]) -> bool:
    """Return whether boxes, a product of intervals of each dimension, are the whole tensor."""
    if sum(prod(box.sizes) for box in boxes) != prod(shape):
        return False
    for dim, length in enumerate(shape):
        filled = [box for box in boxes if 0 not in box.sizes]
        intervals = {(box.offsets[dim], box.sizes[dim]) for box in filled}
        end = 0
        for start, size in sorted(intervals):
            if start != end:
                return False
            end += size
        if filled and end != length:
            return False
    return True
