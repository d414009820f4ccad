"""FSDP2's meshes and DTensors without a process group, as a file of a rank contains them."""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def make_mesh(device_type: str, rank: int, world_size: int, name: str = "fsdp") -> DeviceMesh:
    """Return FSDP2's mesh over all ranks as a file that ``rank`` saved contains it.

    ``name`` is that of its dimension, empty for none.
    """
    ranks = torch.arange(world_size, dtype=torch.int32, device="cpu")
    mesh: Any = DeviceMesh(
        device_type,
        ranks,
        mesh_dim_names=(name,) if name else None,
        _init_backend=False,
        _rank=rank,
    )
    mesh._dim_group_names = ["0"]  # the default process group, where the file is loaded
    return mesh


def make_dtensor(shard: torch.Tensor, mesh: DeviceMesh, size: torch.Size) -> DTensor:
    """Return a DTensor of the whole size, sharded along dimension 0; its mesh is 1-dimensional."""
    stride = torch.empty(size, device="meta").stride()
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(size, stride, shard.dtype))
    return DTensor(shard, spec, requires_grad=False)
