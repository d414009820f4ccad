"""Which shards of DTensors a rank has, against torch's own splitting, and which are replicas."""

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.dtensors import make_dtensor, make_mesh
from trinity_sync.tensors.dtensors import ShardBox, compute_own_box, find_replicas

MESHES = {"4": torch.arange(4), "2x2": torch.tensor([[0, 1], [2, 3]])}


def dtensor(
    shape: tuple[int, ...], mesh: torch.Tensor, placements: tuple[Placement, ...], rank: int
) -> DTensor:
    """A DTensor of a rank with a shard that is never read."""
    devices: Any = DeviceMesh("cpu", mesh, _init_backend=False, _rank=rank)
    whole = torch.empty(shape)
    spec = DTensorSpec(devices, placements, TensorMeta(whole.shape, whole.stride(), whole.dtype))
    return DTensor(torch.empty(0), spec, requires_grad=False)


def compute_boxes(
    shape: tuple[int, ...], mesh: torch.Tensor, placements: Any, **how: bool
) -> dict[int, ShardBox]:
    boxes = {
        rank: compute_own_box(dtensor(shape, mesh, placements, rank), **how) for rank in range(4)
    }
    return {rank: box for rank, box in boxes.items() if box is not None}


def split(whole: torch.Tensor, mesh: torch.Tensor, placements: Any) -> dict[int, torch.Tensor]:
    """The shard of each rank, as torch splits tensors, one mesh dimension after the other."""
    shards = {}
    for at in itertools.product(*map(range, mesh.shape)):
        shard = whole
        for count, index, placement in zip(mesh.shape, at, placements, strict=True):
            if not isinstance(placement, Replicate):
                shard = placement._split_tensor(shard, count, with_padding=False)[0][index]
        shards[int(mesh[at])] = shard
    return shards


def box_slices(box: ShardBox) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(*box, strict=True))


@pytest.mark.parametrize("shape", [(8, 6), (9, 5), (7, 3), (5, 2), (1, 4), (4, 0)])
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ("4", (Shard(0),)),
        ("4", (Shard(1),)),
        ("4", (Replicate(),)),
        ("2x2", (Shard(0), Shard(1))),
        ("2x2", (Shard(0), Shard(0))),
        ("2x2", (Replicate(), Shard(0))),
        ("2x2", (Shard(1), Replicate())),
        ("2x2", (_StridedShard(0, split_factor=2), Shard(0))),
        ("2x2", (_StridedShard(1, split_factor=2), Shard(1))),
    ],
    ids=str,
)
def test_boxes_hold_what_torch_splits(
    shape: tuple[int, int], mesh: str, placements: tuple[Placement, ...]
) -> None:
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    shards = split(whole, MESHES[mesh], placements)
    for rank, box in compute_boxes(shape, MESHES[mesh], placements, of_replica=True).items():
        assert box.sizes == shards[rank].shape
        assert torch.equal(whole[box_slices(box)], shards[rank])
    boxes = compute_boxes(shape, MESHES[mesh], placements)
    seen = torch.zeros_like(whole)
    for box in boxes.values():
        seen[box_slices(box)] += 1
    assert seen.eq(1).all()


def test_a_scalar_has_one_box() -> None:
    assert compute_boxes((), MESHES["2x2"], (Replicate(), Replicate())) == {0: ((), ())}


@pytest.mark.parametrize(
    ("placements", "named"),
    [
        ((Replicate(), Partial()), "Partial"),
        ((_StridedShard(0, split_factor=2), Replicate()), "in several pieces"),
    ],
)
def test_placements_that_cannot_be_read_are_named(
    placements: tuple[Placement, ...], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        compute_boxes((8, 4), MESHES["2x2"], placements)


@pytest.mark.parametrize("nest", [lambda w: {"w": w}, lambda w: [{"w": w}], lambda w: {"a": (w,)}])
def test_shards_are_found_in_lists_as_well(nest: Any) -> None:
    """As of several optimizers: rank 0 would save its shards alone, for all."""
    shard = make_dtensor(torch.ones(3), make_mesh("cpu", 1, 2), torch.Size([6]))
    assert find_replicas([nest(shard)], 1) == (1,)
    assert find_replicas([nest(torch.ones(3))], 1) == ()
