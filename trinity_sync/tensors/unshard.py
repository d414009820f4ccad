"""Unsharding: the shards of all ranks to full tensors, with one copy of each byte.

A rank's image describes each of its tensors, a DTensor under FSDP: the shape of the full tensor and
the box of it that the rank holds. Combined, these are the plan: each full tensor with its chunks.
The plan is the same for all versions of one structure and is made once. Only tensors and plain
values are unpickled.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trinity_sync.errors import WeightSyncError
from trinity_sync.tensors.deserialize import deserialize_outline, get_byte_offset
from trinity_sync.tensors.dtensor_shards import ShardBox, compute_own_box, have_equal_bits
from trinity_sync.tensors.memcpy import Piece, copy_pieces
from trinity_sync.tensors.torch_private import get_shard, map_plain_names


@dataclass(frozen=True)
class TensorChunk:
    """The box of a full tensor that one image holds."""

    image: int
    """Index of the image."""
    byte_offset: int
    """Byte of the image at which the first element lies."""
    offsets: tuple[int, ...]
    """Index of the first element in the full tensor."""
    sizes: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements, in the image."""


@dataclass(frozen=True)
class FullTensor:
    """One tensor of a version, and the chunks that it consists of."""

    names: tuple[str, ...]
    """Its name in the plain model, and those of the parameters that are tied to it."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]
    read_dtype: torch.dtype
    """dtype to which it is rounded as it is read."""


def plan_unshard(
    images: Sequence[memoryview], *, compare_replicas: bool = False
) -> tuple[FullTensor, ...]:
    """Return the full tensors that the images of all ranks hold, in the order of the model.

    Plain tensors are replicas, of which the first is used; ``compare_replicas`` reads them all.

    Raises:
        ImageError: an image cannot be read.
        WeightSyncError: the images do not add up to full tensors.
    """
    found: dict[str, tuple[torch.dtype, tuple[int, ...], dict[tuple[int, ...], TensorChunk]]] = {}
    for rank, image in enumerate(images):
        outline = deserialize_outline(image)
        if not isinstance(outline, Mapping):
            raise WeightSyncError(
                f"the image of rank {rank} holds a {type(outline).__name__}, not a dict of weights"
            )
        for name, given in map_names(outline).items():
            value = outline[given]
            if not isinstance(value, torch.Tensor):
                continue
            shape = tuple(value.shape)
            known = found.setdefault(name, (value.dtype, shape, {}))
            if known[:2] != (value.dtype, shape):
                raise WeightSyncError(
                    f"{name} is {known[0]} of shape {list(known[1])} in an earlier rank's image "
                    f"and {value.dtype} of shape {list(shape)} in that of rank {rank}"
                )
            if known[2] and not isinstance(value, DTensor) and not compare_replicas:
                continue
            if chunk := _get_chunk(rank, name, value):
                first = known[2].setdefault(chunk.offsets, chunk)
                if first is not chunk and not _are_copies(value.dtype, (first, chunk), images):
                    raise WeightSyncError(
                        f"{name} differs between ranks {first.image} and {rank}, which are not on "
                        "one mesh, so where each part belongs is not known; shard it on a mesh "
                        "with all ranks that have parts"
                    )
    plan: dict[Any, FullTensor] = {}
    for name, (dtype, shape, parts) in found.items():
        chunks = tuple(parts.values())
        numel = sum(prod(chunk.sizes) for chunk in chunks)
        if numel != prod(shape):
            raise WeightSyncError(
                f"the images hold {numel:,} of the {prod(shape):,} elements of {name}; is a rank's "
                "image missing?"
            )
        key = (dtype, shape, chunks) if chunks else name
        names = (*plan[key].names, name) if key in plan else (name,)
        plan[key] = FullTensor(names, dtype, shape, chunks, dtype)
    return tuple(plan.values())


def round_plan(
    plan: Sequence[FullTensor], dtype: torch.dtype | None, keep_float32: Collection[str]
) -> tuple[FullTensor, ...]:
    """Return a plan by which floating-point tensors are rounded to ``dtype`` as they are read.

    Those named in ``keep_float32`` are not; a dtype of None rounds nothing.
    """
    return tuple(
        replace(full, read_dtype=dtype)
        if dtype and full.dtype.is_floating_point and not {*full.names} & {*keep_float32}
        else full
        for full in plan
    )


def combine_tensor(full: FullTensor, images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a full tensor on the CPU, in memory of its own."""
    tensor = torch.empty(full.shape, dtype=full.read_dtype, device="cpu")
    copy_pieces(list(_copy_chunks(full, images, tensor)))
    return tensor


def view_full_tensor(full: FullTensor, images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a full tensor on the CPU: a view of its image if that holds all of it, or a copy.

    A rounded tensor is a copy.
    """
    if len(full.chunks) == 1 and full.read_dtype == full.dtype:
        return _view_chunk(full.dtype, full.chunks[0], images)
    return combine_tensor(full, images)


def copy_full_tensors(
    plan: Sequence[FullTensor],
    images: Sequence[torch.Tensor],
    targets: Mapping[str, torch.Tensor],
) -> None:
    """Copy every tensor of the plan into the target of its name: all of them, or none.

    Targets are named as in the plain model, on any device.

    Raises:
        WeightSyncError: names, shapes or dtypes differ, or a target is a DTensor, has no memory, or
            shares one place between elements. Nothing was copied.
    """
    problems: list[str] = []
    filled: set[int] = set()
    jobs: list[tuple[FullTensor, torch.Tensor]] = []
    for full in plan:
        named = [name for name in full.names if name in targets]
        if not named:
            problems.append(f"{full.names[0]} is not in what it is loaded into")
        wanted, shape = full.read_dtype, full.shape
        for name in named:
            target = targets[name]
            if (target.dtype, tuple(target.shape)) != (wanted, shape):
                problems.append(
                    f"{name} is {wanted} of shape {list(shape)}, to be loaded into {target.dtype} "
                    f"of {list(target.shape)}"
                )
            elif problem := _find_problem(target):
                problems.append(f"{name} {problem}")
            elif target.data_ptr() not in filled or not target.numel():
                filled.add(target.data_ptr())
                jobs.append((full, target))
    known = {name for full in plan for name in full.names}
    for name, target in targets.items():  # an unknown target is tied to another one, or an error
        if name not in known and (_find_problem(target) or target.data_ptr() not in filled):
            problems.append(f"{name} is not in the version")
    if problems:
        more = f" and {len(problems) - 5} more" if problems[5:] else ""
        raise WeightSyncError(
            f"the weights do not fit: {'; '.join(problems[:5])}{more}. Nothing was loaded; build "
            "the model from the trainer's config, or pass a dict of the tensors to load; "
            "WeightReader(dtype=...) rounds to another dtype"
        )
    with torch.inference_mode():  # allows writes to inference tensors as well
        copy_pieces(
            [piece for full, target in jobs for piece in _copy_chunks(full, images, target)]
        )


def _get_chunk(rank: int, name: str, value: torch.Tensor) -> TensorChunk | None:
    """Return what the image holds of a tensor; None if nothing, or what another image has too."""
    local, box = value, ShardBox((0,) * value.ndim, tuple(value.shape))
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            raise WeightSyncError(f"rank {rank} holds {name} but is not in its device mesh")
        try:
            own = compute_own_box(value)
        except ValueError as error:
            raise WeightSyncError(f"{name} {error}") from error
        if own is None:
            return None
        local, box = get_shard(value), own
    if box.sizes != tuple(local.shape):
        raise WeightSyncError(
            f"rank {rank} holds {list(local.shape)} of {name} where {list(box.sizes)} was "
            f"expected of a tensor of shape {list(value.shape)}"
        )
    if not local.numel():
        return None
    return TensorChunk(rank, get_byte_offset(local), box.offsets, box.sizes, local.stride())


def _are_copies(
    dtype: torch.dtype, chunks: Sequence[TensorChunk], images: Sequence[memoryview]
) -> bool:
    """Compare what equal submeshes hold, such as those of a norm under tensor parallelism."""
    first, second = (
        _view_chunk(
            dtype,
            replace(chunk, image=0),
            [torch.frombuffer(images[chunk.image], dtype=torch.uint8)],
        )
        for chunk in chunks
    )
    return have_equal_bits(first, second)


def _view_chunk(
    dtype: torch.dtype, chunk: TensorChunk, images: Sequence[torch.Tensor]
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(
        images[chunk.image].untyped_storage(),
        chunk.byte_offset // dtype.itemsize,
        chunk.sizes,
        chunk.stride,
    )


def _copy_chunks(
    full: FullTensor, images: Sequence[torch.Tensor], target: torch.Tensor
) -> Iterator[Piece]:
    """Yield the memcpys that fill ``target``; what needs more than a memcpy is copied at once."""
    for chunk in full.chunks:
        source = _view_chunk(full.dtype, chunk, images)
        into = target
        for dim, (begin, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            if length != into.shape[dim]:
                into = into.narrow(dim, begin, length)
        plain = into.dtype == source.dtype and into.device.type == "cpu"
        if plain and into.is_contiguous() and source.is_contiguous():
            yield into.data_ptr(), source.data_ptr(), source.numel() * source.element_size()
        else:
            into.copy_(source)


def _find_problem(target: torch.Tensor) -> str | None:
    """Return why a tensor cannot be filled, and what to do; None if it can."""
    if isinstance(target, DTensor):
        return "is a DTensor: load before sharding, or copy its part of iter_views() to to_local()"
    if target.layout is not torch.strided or (target.numel() and not target.data_ptr()):
        return "has no memory to copy to: call model.to_empty(device=...) first if it is on meta"
    if any(by == 0 and n > 1 for n, by in zip(target.shape, target.stride(), strict=True)):
        return "is expanded, with one place for several elements: clone() it"
    return None


def map_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in a state by those in the plain model, without those of torch's wrappers.

    Raises:
        WeightSyncError: two of them have one name there.
    """
    try:
        return map_plain_names(state)
    except ValueError as error:
        raise WeightSyncError(f"{error}; save and load the state of the plain model") from error
