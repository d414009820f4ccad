"""Unsharding: the shards of all ranks to full tensors, with one copy of each byte.

A rank's image describes each of its tensors, a DTensor under FSDP: the shape of the full tensor and
the box of it that the rank holds. Combined, these are the plan: each full tensor with its chunks.
The plan is the same for all versions of one structure and is made once. Only tensors and plain
values are unpickled.
"""

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import add
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trinity_sync.errors import WeightSyncError
from trinity_sync.tensors.deserialize import (
    Unread,
    describe_form,
    deserialize_outline,
    find_fault,
    get_byte_offset,
)
from trinity_sync.tensors.dtensors import (
    ShardBox,
    compute_chunk,
    compute_own_box,
    have_equal_bits,
    make_whole_box,
)
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
    is_conj: bool = False
    """Whether the image has the conjugates of its elements."""
    is_neg: bool = False
    """Whether the image has the negatives of its elements."""


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


@dataclass(frozen=True)
class TensorOutline:
    """What the image of one rank says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    chunk: TensorChunk | None
    """None if the image holds nothing of it, or only what that of another rank has as well."""
    is_plain: bool
    """Whether each rank has all of it, in a plain tensor."""


Outline = Mapping[str, TensorOutline]
"""The tensors of a rank's image, by name."""
Keys = tuple[Any, ...]
"""Path of a value in a nested state: ``("state", 0, "exp_avg")``."""


def iter_leaves(state: Any, above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the values in nested dicts and lists, each with its path, as DCP divides a state.

    A list without tensors and dicts is a value, and so is a tuple.
    """
    if not _is_divided(state):
        yield above, state
        return
    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        yield from iter_leaves(value, (*above, key))


def map_leaves(change: Callable[[Keys, Any], Any], state: Any, above: Keys = ()) -> Any:
    """Return a state with what a function makes of the path and value of each of `iter_leaves`."""
    if not _is_divided(state):
        return change(above, state)
    if isinstance(state, Mapping):
        return {key: map_leaves(change, value, (*above, key)) for key, value in state.items()}
    return [map_leaves(change, value, (*above, n)) for n, value in enumerate(state)]


def _is_divided(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list)
        and any(isinstance(each, torch.Tensor) or _is_divided(each) for each in value)
    )


def iter_tensors(value: Any, above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the tensors in a value and in all containers in it, each with its path."""
    if isinstance(value, torch.Tensor | Unread):
        yield above, value
    elif isinstance(value, Mapping | list | tuple | set):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from iter_tensors(each, (*above, key))


def join_keys(keys: Keys) -> str:
    """Return the name of a tensor in a nested state, as DCP makes it: its keys, joined by dots."""
    return ".".join(map(str, keys))


def plan_unshard(
    images: Sequence[memoryview],
    *,
    compare_replicas: bool = False,
    others: dict[str, Any] | None = None,
) -> tuple[FullTensor, ...]:
    """Return the full tensors that the images of all ranks hold, in the order of the model.

    Plain tensors are replicas, of which the first is used; ``compare_replicas`` reads them all.
    ``others`` gets what is no plain tensor in the first image; without it, a tensor is an error.

    Raises:
        ImageError: an image cannot be read.
        WeightSyncError: the images do not add up to full tensors.
    """
    outlines = []
    for rank, image in enumerate(images):
        state = _read_outline(image, rank)
        named = {name: state[given] for name, given in map_names(state).items()}
        outlines.append(
            {
                name: _outline_tensor(rank, name, value)
                for name, value in named.items()
                if not describe_form(value)
            }
        )
        for name, value in named.items():
            if others is None and isinstance(value, Unread):
                raise WeightSyncError(f"{name} is {describe_form(value)}")
            if others is not None and not rank and name not in outlines[0]:
                others[name] = value
    ranks = range(len(images))
    return combine_outlines(outlines, images, compared=ranks, compare_replicas=compare_replicas)


def outline_state(
    image: memoryview, rank: int, world_size: int, flat_lengths: Mapping[Any, int]
) -> Outline:
    """Return the tensors in the nested state of a rank's image, by the names of `join_keys`.

    ``flat_lengths`` are the numbers of elements of FSDP1's flat parameters, by their number in the
    optimizer. The state of each is plain tensors of ``ceil(length / world_size)`` elements, padded.

    Raises:
        ImageError: the image cannot be read.
        WeightSyncError: it holds no dict, other shards than it should, or shards in a tuple.
    """
    tensors = {}
    for above, leaf in iter_leaves(_read_outline(image, rank)):
        for keys, value in iter_tensors(leaf, above):
            name = join_keys(keys)
            if form := describe_form(value):
                raise WeightSyncError(f"{name} is {form}, of which no part can be read")
            if keys != above and isinstance(value, DTensor):
                raise WeightSyncError(
                    f"{name} is a DTensor in a {type(leaf).__name__}, which is not put together; "
                    "keep it in a list or a dict"
                )
            if keys[0] == "state" and is_flat(value, flat_lengths.get(keys[1])):
                tensors[name] = _outline_flat(rank, world_size, name, value, flat_lengths[keys[1]])
            else:
                tensors[name] = _outline_tensor(rank, name, value)
    return tensors


def is_flat(value: torch.Tensor, flat_length: int | None) -> bool:
    """Return whether a state of a parameter is a part of FSDP1's flat one, given its length."""
    return flat_length is not None and value.ndim == 1 and not isinstance(value, DTensor)


def combine_outlines(
    outlines: Sequence[Outline],
    images: Sequence[memoryview],
    *,
    compared: Container[int],
    compare_replicas: bool,
) -> tuple[FullTensor, ...]:
    """Return the full tensors of images, given the outline of each.

    Of what several images hold, the first is used; those of the ranks in ``compared`` are compared
    with it. The rest is as in `plan_unshard`.
    """
    found: dict[str, tuple[torch.dtype, tuple[int, ...], dict[tuple[int, ...], TensorChunk]]] = {}
    for rank, outline in enumerate(outlines):
        for name, value in outline.items():
            known = found.setdefault(name, (value.dtype, value.shape, {}))
            if known[:2] != (value.dtype, value.shape):
                raise WeightSyncError(
                    f"{name} is {known[0]} of shape {list(known[1])} in an earlier rank's image "
                    f"and {value.dtype} of shape {list(value.shape)} in that of rank {rank}"
                )
            chunk = value.chunk
            if chunk is None or (known[2] and value.is_plain and not compare_replicas):
                continue
            first = known[2].setdefault(chunk.offsets, chunk)
            if first is chunk or rank not in compared:
                continue
            if not _are_copies(value.dtype, (first, chunk), images):
                raise WeightSyncError(
                    f"{name} differs between ranks {first.image} and {rank}, which are not on one "
                    "mesh, so where each part belongs is not known; shard it on a mesh with all "
                    "ranks that have parts"
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
    copy_box(full, images, make_whole_box(full.shape), tensor)
    return tensor


def copy_box(
    full: FullTensor, images: Sequence[torch.Tensor], box: ShardBox, target: torch.Tensor
) -> None:
    """Copy a box of a full tensor into a target of the box's sizes, on any device."""
    copy_pieces([*_copy_chunks(full, images, target, box)])


def view_full_tensor(full: FullTensor, images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a full tensor on the CPU: a view of its image if that holds all of it, or a copy.

    A rounded tensor is a copy.
    """
    if len(full.chunks) == 1 and full.read_dtype == full.dtype:
        return view_chunk(full.dtype, full.chunks[0], images)
    return combine_tensor(full, images)


def copy_full_tensors(
    plan: Sequence[FullTensor],
    images: Sequence[torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    problems: Sequence[str] = (),
) -> None:
    """Copy every tensor of the plan into the target of its name: all of them, or none.

    Targets are named as in the plain model, on any device. ``problems`` is what else is an error.

    Raises:
        WeightSyncError: names, shapes or dtypes differ, or a target is a DTensor, has no memory, or
            shares one place between elements, or with a tensor of other values. Nothing was copied.
    """
    problems = [*problems]
    filled: dict[int, int] = {}
    """Bytes that are filled from an address on."""
    jobs: dict[Any, tuple[FullTensor, torch.Tensor]] = {}
    """What is copied to a place in memory."""
    for full in plan:
        named = [name for name in full.names if name in targets]
        if not named:
            problems.append(f"{full.names[0]} is not in what it is loaded into")
        wanted, shape = full.read_dtype, full.shape
        for name in named:
            target = targets[name]
            if problem := find_fault(target, whole=True):
                problems.append(f"{name} {problem}")
            elif (target.dtype, tuple(target.shape)) != (wanted, shape):
                problems.append(
                    f"{name} is {wanted} of shape {list(shape)}, to be loaded into "
                    f"{target.dtype} of {list(target.shape)}"
                )
            elif target.nbytes:  # empty tensors all have one address
                start = target.data_ptr()
                filled[start] = max(target.nbytes, filled.get(start, 0))
                place = target.device, start, target.shape, target.stride()
                first, _ = jobs.setdefault(place, (full, target))
                both = (view_full_tensor(each, images) for each in (first, full))
                if not (first is full or have_equal_bits(*both)):
                    problems.append(
                        f"{name} is not equal to {first.names[0]}, to which it is tied in what it "
                        "is loaded into"
                    )
    known = {name for full in plan for name in full.names}
    for name, target in targets.items():  # an unknown target is tied to another one, or an error
        if name in known:
            continue
        problem = find_fault(target, whole=True)
        if problem or target.nbytes > filled.get(target.data_ptr(), -1):
            problems.append(f"{name} {problem or 'is not in the version'}")
    if problems:
        more = f" and {len(problems) - 5} more" if problems[5:] else ""
        raise WeightSyncError(
            f"the weights do not fit: {'; '.join(problems[:5])}{more}. Nothing was loaded; build "
            "the model from the trainer's config, or pass a dict of the tensors to load; "
            "WeightReader(dtype=...) rounds to another dtype"
        )
    with torch.inference_mode():  # allows writes to inference tensors as well
        copy_pieces(
            [
                piece
                for full, target in jobs.values()
                for piece in _copy_chunks(full, images, target, make_whole_box(full.shape))
            ]
        )


def _read_outline(image: memoryview, rank: int) -> Mapping[Any, Any]:
    outline = deserialize_outline(image)
    if not isinstance(outline, Mapping):
        raise WeightSyncError(
            f"the image of rank {rank} holds a {type(outline).__name__}, not a dict of tensors"
        )
    return outline


def _outline_tensor(rank: int, name: str, value: torch.Tensor) -> TensorOutline:
    chunk = _get_chunk(rank, name, value)
    return TensorOutline(value.dtype, tuple(value.shape), chunk, not isinstance(value, DTensor))


def _outline_flat(
    rank: int, world_size: int, name: str, value: torch.Tensor, length: int
) -> TensorOutline:
    each = -(-length // world_size)
    if value.numel() != each:
        raise WeightSyncError(
            f"rank {rank} holds {value.numel():,} elements of {name}, where {length:,} over "
            f"{world_size} ranks make {each:,}: flat state of FSDP1 is resharded only where all "
            "ranks shard, and use_orig_params is off"
        )
    start, size = compute_chunk(length, world_size, rank)
    chunk = _describe_chunk(rank, value, ShardBox((start,), (size,)))
    return TensorOutline(value.dtype, (length,), chunk if size else None, is_plain=False)


def _get_chunk(rank: int, name: str, value: torch.Tensor) -> TensorChunk | None:
    """Return what the image holds of a tensor; None if nothing, or what another image has too."""
    local, box = value, make_whole_box(value.shape)
    if isinstance(value, DTensor):
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
    return _describe_chunk(rank, local, box)


def _describe_chunk(rank: int, local: torch.Tensor, box: ShardBox) -> TensorChunk:
    at, views = get_byte_offset(local), (local.is_conj(), local.is_neg())
    return TensorChunk(rank, at, box.offsets, box.sizes, local.stride(), *views)


def _are_copies(
    dtype: torch.dtype, chunks: Sequence[TensorChunk], images: Sequence[memoryview]
) -> bool:
    """Compare what equal submeshes hold, such as those of a norm under tensor parallelism."""
    first, second = (
        view_chunk(
            dtype,
            replace(chunk, image=0),
            [torch.frombuffer(images[chunk.image], dtype=torch.uint8)],
        )
        for chunk in chunks
    )
    return have_equal_bits(first, second)


def copy_value(value: Any, images: Sequence[torch.Tensor]) -> Any:
    """Return a value in the outline of the first image, with plain tensors in their own memory."""
    if isinstance(value, dict):
        return {key: copy_value(each, images) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_value(each, images) for each in value)
    if not isinstance(value, torch.Tensor | Unread):
        return value
    form = describe_form(value)
    if not form and isinstance(value, torch.Tensor):
        chunks = tuple(filter(None, [_get_chunk(0, "a tensor", value)]))
        if sum(prod(chunk.sizes) for chunk in chunks) == value.numel():
            full = FullTensor((), value.dtype, tuple(value.shape), chunks, value.dtype)
            return combine_tensor(full, images)
        form = "a DTensor of several ranks"
    raise WeightSyncError(f"is {form}, which is not read; load the step, and load_state_dict")


def view_chunk(
    dtype: torch.dtype, chunk: TensorChunk, images: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return a chunk as a view of its image; as a copy if the image has other values."""
    view = torch.empty(0, dtype=dtype, device="cpu").set_(
        images[chunk.image].untyped_storage(),
        chunk.byte_offset // dtype.itemsize,
        chunk.sizes,
        chunk.stride,
    )
    view = view.conj_physical() if chunk.is_conj else view
    return view.neg() if chunk.is_neg else view


def _copy_chunks(
    full: FullTensor, images: Sequence[torch.Tensor], target: torch.Tensor, box: ShardBox
) -> Iterator[Piece]:
    """Yield the memcpys that fill ``target``; what needs more than a memcpy is copied at once."""
    for chunk in full.chunks:
        begins = [*map(max, chunk.offsets, box.offsets)]
        ends = map(min, _end(chunk.offsets, chunk.sizes), _end(*box))
        sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
        if any(size <= 0 for size in sizes):
            continue
        source = _narrow(view_chunk(full.dtype, chunk, images), chunk.offsets, begins, sizes)
        into = _narrow(target, box.offsets, begins, sizes)
        plain = into.dtype == source.dtype and into.device.type == "cpu"
        plain = plain and not (chunk.is_conj or chunk.is_neg or into.is_conj() or into.is_neg())
        if plain and into.is_contiguous() and source.is_contiguous():
            yield into.data_ptr(), source.data_ptr(), source.numel() * source.element_size()
        else:
            into.copy_(source)


def _end(offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [*map(add, offsets, sizes)]


def _narrow(
    tensor: torch.Tensor, offsets: Sequence[int], begins: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """Return a box of the full tensor, given the part of it that begins at ``offsets``."""
    for dim, (offset, begin, size) in enumerate(zip(offsets, begins, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin - offset, size)
    return tensor


def map_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names in a state by those in the plain model, without those of torch's wrappers.

    Raises:
        WeightSyncError: two of them have one name there.
    """
    try:
        return map_plain_names(state)
    except ValueError as error:
        raise WeightSyncError(f"{error}; save and load the state of the plain model") from error
