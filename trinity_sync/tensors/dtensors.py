"""DTensors: where each rank's shard lies in the whole tensor, and which ranks have the same ones.

FSDP, and FSDP2 with tensor parallelism, save DTensors: this rank's shard with the mesh and the
placements of all ranks. The offsets are those that torch computes for DCP; this module adds that
shards which torch places in several pieces are refused, since one offset cannot say where they lie.

Each tensor has a mesh of its own, which may be a submesh: with tensor parallelism, a norm lies on
the ``dp`` ranks of its ``tp`` rank, and those of the other ``tp`` ranks have copies. The mesh does
not say that they are copies, so what reads one of them compares them. Replicas, as under HSDP, are
equal by construction, as the optimizer steps of all of them have the same gradients. Nothing
compares them: as DCP, a save takes the first.
"""

import gc
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from trinity_sync.tensors.torch_private import StridedShard, compute_shard_of_coordinate


class ShardBox(NamedTuple):
    """The part of a whole tensor that one rank holds: first index and length in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def make_whole_box(shape: Sequence[int]) -> ShardBox:
    """Return the box of a rank that holds a whole tensor."""
    return ShardBox((0,) * len(shape), tuple(shape))


def compute_own_box(tensor: DTensor, *, of_replica: bool = False) -> ShardBox | None:
    """Return the part of the whole tensor that the rank of ``tensor`` holds.

    None for a rank outside of the mesh, and unless ``of_replica`` for all replicas but the first:
    then the boxes of all ranks do not overlap, and together they are the whole tensor. The values
    of tensors are not read, so they may be fake.

    Raises:
        ValueError: a placement is neither Shard nor Replicate, or places a shard in several pieces;
            the message says which.
    """
    coordinate = [*(tensor.device_mesh.get_coordinate() or ())]
    if not coordinate:
        return None
    boxes = _compute_boxes(tensor.shape, tensor.device_mesh.shape, tensor.placements)
    if of_replica:
        pairs = zip(coordinate, tensor.placements, strict=True)
        coordinate = [0 if isinstance(placement, Replicate) else at for at, placement in pairs]
    return boxes.get(tuple(coordinate))


def get_place(value: Any) -> tuple[Any, ...] | None:
    """Return a DTensor's mesh and placements; values with equal ones have interchangeable shards.

    None for other values, which every rank has in full.
    """
    return (value.device_mesh, value.placements) if isinstance(value, DTensor) else None


def have_equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two plain tensors are equal bit by bit, including NaN."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (a, b)))


def compute_chunk(length: int, count: int, index: int) -> tuple[int, int]:
    """Return start and length of chunk ``index`` as ``torch.chunk`` splits; it may be empty."""
    size = -(-length // count)
    start = min(index * size, length)
    return start, min(size, length - start)


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
    filled = [box for box in boxes if 0 not in box.sizes]
    for dim, length in enumerate(shape):
        intervals = sorted({(box.offsets[dim], box.sizes[dim]) for box in filled})
        ends = [0, *itertools.accumulate(size for _, size in intervals)]
        if filled and [*(start for start, _ in intervals), length] != ends:
            return False
    return True


def find_replicas(states: Iterable[Any], rank: int) -> tuple[int, ...]:
    """Return the ranks that have the same shards of all DTensors in states as ``rank``, this one.

    They are in the order of the mesh, so the first is the same on all of them. Empty if there are
    no DTensors.
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for tensor in iter_dtensors(states):
        key = id(tensor.device_mesh), tensor.placements
        if key not in found:
            found[key] = _list_replicas(tensor)
    if not found:
        return ()
    first, *others = found.values()
    return tuple(each for each in first if all(each in of for of in others)) or (rank,)


def iter_dtensors(value: Any) -> Iterator[DTensor]:
    """Yield the DTensors of a nested state."""
    if isinstance(value, DTensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from iter_dtensors(each)


def _list_replicas(tensor: DTensor) -> list[int]:
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    place = tuple(
        slice(None) if isinstance(placement, Replicate) else at
        for at, placement in zip(coordinate, tensor.placements, strict=True)
    )
    ranks: list[int] = mesh.mesh[place].flatten().tolist()
    return ranks


def adopt_meshes(state: Any, live: Any = ()) -> None:
    """Put the DTensors of a state that was loaded on this process's meshes.

    A mesh in a file has the place and the process groups of the rank that saved it. One that equals
    no mesh of this process stays as it is. Of several equal ones, such as those of actor and
    reference, all ranks take that of a tensor in ``live``, or the newest: they have groups of their
    own, and ranks that gather in different ones wait for each other for ever.
    """
    loaded = {id(tensor.device_mesh): tensor.device_mesh for tensor in iter_dtensors(state)}
    if not loaded or not dist.is_initialized():
        return
    meshes = [each for each in gc.get_objects() if type(each) is DeviceMesh]
    own = [each for each in meshes if id(each) not in loaded and _is_own(each)]
    first = {id(tensor.device_mesh) for tensor in iter_dtensors(live)}
    own.sort(key=lambda mesh: (id(mesh) in first, _list_groups(mesh)), reverse=True)
    for mesh in loaded.values():
        for each in own:
            if each == mesh:
                vars(mesh).update(vars(each))
                break


def _list_groups(mesh: DeviceMesh) -> list[tuple[int, str]]:
    """Return what sorts a mesh's groups by age on all of its ranks: their names are numbers."""
    return [(len(group.group_name), group.group_name) for group in mesh.get_all_groups()]


def _is_own(mesh: DeviceMesh) -> bool:
    coordinate = mesh.get_coordinate()
    if coordinate is None or mesh.mesh[tuple(coordinate)] != dist.get_rank():
        return False
    with suppress(RuntimeError):  # its groups are those of another process
        return bool(mesh.get_all_groups())
    return False
