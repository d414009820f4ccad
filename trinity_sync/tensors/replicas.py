"""Which ranks have the same shards, as under HSDP, and shards that another rank has saved.

Replicas are equal by construction, as the optimizer steps of all of them have the same gradients.
Nothing compares them: as DCP, a save takes the first.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from trinity_sync.tensors.torch_private import get_shard
from trinity_sync.tensors.unshard import iter_leaves


def find_replicas(states: Iterable[Mapping[Any, Any]], rank: int) -> tuple[int, ...]:
    """Return the ranks that have the same shards of all DTensors in states as ``rank``, this one.

    They are in the order of the mesh, so the first is the same on all of them. Empty if there are
    no DTensors.
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    for state in states:
        for _, value in iter_leaves(state):
            if isinstance(value, DTensor):
                key = id(value.device_mesh), value.placements
                if key not in found:
                    found[key] = _list_replicas(value)
    if not found:
        return ()
    first, *others = found.values()
    return tuple(each for each in first if all(each in of for of in others)) or (rank,)


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


def rebind(state: Any, meshes: Mapping[DeviceMesh, DeviceMesh]) -> Any:
    """Return a state in nested dicts with its DTensors on this process's meshes.

    A mesh in a file has the place and the process groups of the rank that saved it.
    """
    if isinstance(state, dict):
        return {key: rebind(value, meshes) for key, value in state.items()}
    if not isinstance(state, DTensor) or state.device_mesh not in meshes:
        return state
    return DTensor.from_local(
        get_shard(state),
        meshes[state.device_mesh],
        state.placements,
        run_check=False,
        shape=state.shape,
        stride=state.stride(),
    )
