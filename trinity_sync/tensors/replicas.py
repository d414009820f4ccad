"""Which ranks have the same shards, as under HSDP, and shards that another rank has saved.

Replicas are equal by construction, as the optimizer steps of all of them have the same gradients.
Nothing compares them: as DCP, a save takes the first.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


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
