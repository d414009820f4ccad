"""From the shards of all ranks to whole tensors: what lies where, and the one copy of it.

A rank's image says for each of its tensors, under FSDP a DTensor, what the whole tensor looks like
and which part of it the rank holds. Put together, that is a plan: each whole tensor with its parts.
The plan is the same for all versions of one structure, so it is made once; nothing in the images is
unpickled but tensors and plain values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trinity_sync.errors import WeightSyncError
from trinity_sync.snapshot.deserialize import deserialize_outline, get_byte_offset
from trinity_sync.snapshot.dtensor_shards import ShardBox, compute_own_box
from trinity_sync.snapshot.memcpy import Piece, copy_pieces
from trinity_sync.snapshot.torch_private import get_shard

Slice = tuple[int, int, int]
"""Dimension, start and stop: the part of a tensor that a tensor-parallel reader wants."""


@dataclass(frozen=True)
class Part:
    """What one image holds of a tensor."""

    image: int
    """Number of the image."""
    place: int
    """Byte of the image at which its first element lies."""
    start: tuple[int, ...]
    """Where it begins in the whole tensor."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Whole:
    """One tensor of a version."""

    names: tuple[str, ...]
    """Its name, as ``named_parameters()`` gives it, and those of parameters that are tied to it."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def plan_of(images: Sequence[memoryview]) -> tuple[Whole, ...]:
    """The whole tensors in the images of all ranks, in the order of the model.

    Raises:
        ImageError: an image cannot be read.
        WeightSyncError: the images do not make whole tensors.
    """
    found: dict[str, tuple[torch.dtype, tuple[int, ...], list[Part]]] = {}
    for number, image in enumerate(images):
        outline = deserialize_outline(image)
        if not isinstance(outline, Mapping):
            raise WeightSyncError(f"image {number} holds a {type(outline).__name__} and no weights")
        for name, value in outline.items():
            if not isinstance(value, torch.Tensor):
                continue
            shape = tuple(value.shape)
            known = found.setdefault(name, (value.dtype, shape, []))
            if known[:2] != (value.dtype, shape):
                raise WeightSyncError(
                    f"{name} is {known[0]} of shape {list(known[1])} in one rank's image and "
                    f"{value.dtype} of {list(shape)} in that of rank {number}"
                )
            if known[2] and not isinstance(value, DTensor):
                continue  # what is whole on every rank is taken from the first
            if part := _part(number, name, value):
                known[2].append(part)
    wholes: dict[Any, Whole] = {}
    for name, (dtype, shape, parts) in found.items():
        have = sum(prod(part.shape) for part in parts)
        if have != prod(shape):
            raise WeightSyncError(
                f"the images hold {have:,} of the {prod(shape):,} elements of {name}; is a rank's "
                "image missing?"
            )
        tied = (dtype, shape, tuple(parts)) if parts else name
        names = (*wholes[tied].names, name) if tied in wholes else (name,)
        wholes[tied] = Whole(names, dtype, shape, tuple(parts))
    return tuple(wholes.values())


def whole_tensors(
    plan: Sequence[Whole],
    images: Sequence[torch.Tensor],
    slices: Mapping[str, Slice],
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of the plan, in memory of its own; tied ones once, under their first name."""
    _require_known(slices, plan)
    for whole in plan:
        cut = _slice_of(whole, slices)
        tensor = torch.empty(_sliced(whole, cut), dtype=_wanted(whole, dtype))
        copy_pieces(list(_copies(whole, images, tensor, cut)))
        yield whole.names[0], tensor


def copy_whole(
    plan: Sequence[Whole],
    images: Sequence[torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    slices: Mapping[str, Slice],
    dtype: torch.dtype | None = None,
) -> None:
    """Copy every tensor of the plan to where it belongs in ``targets``, all or nothing.

    Floating-point ones are rounded to ``dtype`` where one is given.

    Raises:
        WeightSyncError: names, shapes or dtypes differ, or a target is a DTensor, has no memory, or
            one place for several elements; nothing was copied.
    """
    _require_known(slices, plan)
    problems: list[str] = []
    filled: set[int] = set()
    jobs: list[tuple[Whole, torch.Tensor, Slice | None]] = []
    for whole in plan:
        named = [name for name in whole.names if name in targets]
        if not named:
            problems.append(f"{whole.names[0]} is not in what it is loaded into")
        cut = _slice_of(whole, slices)
        for name in named:
            target = targets[name]
            wanted = _wanted(whole, dtype)
            if target.dtype != wanted or tuple(target.shape) != _sliced(whole, cut):
                problems.append(
                    f"{name} is {wanted} of shape {list(_sliced(whole, cut))}, to be loaded "
                    f"into {target.dtype} of {list(target.shape)}"
                )
            elif unfit := _unfit(target):
                problems.append(f"{name} {unfit}")
            elif target.data_ptr() not in filled or not target.numel():
                filled.add(target.data_ptr())
                jobs.append((whole, target, cut))
    known = {name for whole in plan for name in whole.names}
    for name, target in targets.items():  # those that are not known are tied to others, or wrong
        if name not in known and (_unfit(target) or target.data_ptr() not in filled):
            problems.append(f"{name} is not in the version")
    if problems:
        more = f" and {len(problems) - 5} more" if problems[5:] else ""
        raise WeightSyncError(
            f"the weights do not fit: {'; '.join(problems[:5])}{more}. Nothing was loaded; build "
            "the model from the trainer's config, or pass a dict of the tensors that are wanted; "
            "WeightReader(dtype=...) rounds to another dtype"
        )
    with torch.inference_mode():  # which lets inference tensors be written, and all others
        copy_pieces([piece for job in jobs for piece in _copies(job[0], images, *job[1:])])


def _part(number: int, name: str, value: torch.Tensor) -> Part | None:
    """Return what the image holds of a tensor; None if that is nothing, or in another image too."""
    local, box = value, ShardBox((0,) * value.ndim, tuple(value.shape))
    if isinstance(value, DTensor):
        if value.device_mesh.get_coordinate() is None:
            raise WeightSyncError(f"rank {number} holds {name} without a place in its device mesh")
        try:
            own = compute_own_box(value)
        except ValueError as error:
            raise WeightSyncError(f"{name} {error}") from error
        if own is None:
            return None
        local, box = get_shard(value), own
    if box.sizes != tuple(local.shape):
        raise WeightSyncError(
            f"rank {number} holds {list(local.shape)} of {name} where {list(box.sizes)} was "
            f"expected of a tensor of {list(value.shape)}"
        )
    if not local.numel():
        return None
    return Part(number, get_byte_offset(local), box.offsets, box.sizes, local.stride())


def _copies(
    whole: Whole, images: Sequence[torch.Tensor], target: torch.Tensor, cut: Slice | None
) -> Iterator[Piece]:
    """The copies that fill ``target``; what is not plain memory on both sides is copied at once."""
    for part in whole.parts:
        source = torch.empty(0, dtype=whole.dtype).set_(
            images[part.image].untyped_storage(),
            part.place // whole.dtype.itemsize,
            part.shape,
            part.stride,
        )
        into = target
        for dim, (begin, length) in enumerate(zip(part.start, part.shape, strict=True)):
            end = begin + length
            if cut and cut[0] == dim:
                first, last = max(begin, cut[1]), min(end, cut[2])
                source = source.narrow(dim, min(first - begin, length), max(last - first, 0))
                begin, end = first - cut[1], max(first, last) - cut[1]
            if (begin, end) != (0, into.shape[dim]) and source.numel():
                into = into.narrow(dim, begin, end - begin)
        if not source.numel():
            continue
        plain = into.dtype == source.dtype and into.device.type == "cpu"
        if plain and into.is_contiguous() and source.is_contiguous():
            yield into.data_ptr(), source.data_ptr(), source.numel() * source.element_size()
        else:
            into.copy_(source)


def _unfit(target: torch.Tensor) -> str | None:
    """Why a tensor cannot be filled, and what to do; None if it can."""
    if isinstance(target, DTensor):
        return "is a DTensor: load before sharding, or pass its to_local() and its slice"
    if target.layout is not torch.strided or (target.numel() and not target.data_ptr()):
        return "has no memory to copy to: call model.to_empty(device=...) first if it is on meta"
    if any(by == 0 and n > 1 for n, by in zip(target.shape, target.stride(), strict=True)):
        return "is expanded, with one place for several elements: clone() it"
    return None


def _wanted(whole: Whole, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype and whole.dtype.is_floating_point else whole.dtype


def _slice_of(whole: Whole, slices: Mapping[str, Slice]) -> Slice | None:
    return next((slices[name] for name in whole.names if name in slices), None)


def _sliced(whole: Whole, cut: Slice | None) -> tuple[int, ...]:
    if cut is None:
        return whole.shape
    dim, start, stop = cut
    if not (0 <= dim < len(whole.shape) and 0 <= start <= stop <= whole.shape[dim]):
        raise WeightSyncError(
            f"slice {cut} of {whole.names[0]}, which has shape {list(whole.shape)}, is outside of "
            "it; give (dimension, start, stop)"
        )
    return (*whole.shape[:dim], stop - start, *whole.shape[dim + 1 :])


def _require_known(slices: Mapping[str, Slice], plan: Sequence[Whole]) -> None:
    if unknown := set(slices) - {name for whole in plan for name in whole.names}:
        raise WeightSyncError(f"slices are given of {sorted(unknown)}, which the version has not")
