"""Fill the tensors of a live state from the bytes of a ``.pt`` file, in place.

The state of the file is unpickled over memory that nothing has touched, which costs nothing, and
compared with the live one by name. Then each byte of the file belongs to a live tensor, is copied
to it later, as for a tensor that is not contiguous, or is no tensor's.
"""

import copy
import logging
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trinity_sync.errors import ConfigError, ImageError
from trinity_sync.tensors.deserialize import (
    UnreadStorage,
    describe_form,
    deserialize_unread,
    find_fault,
)
from trinity_sync.tensors.dtensors import have_equal_bits
from trinity_sync.tensors.memcpy import copy_pieces, view_bytes, view_memory
from trinity_sync.tensors.torch_private import count_users, get_shard, get_storage_id
from trinity_sync.tensors.unshard import iter_tensors, join_keys

logger = logging.getLogger(__name__)


class Pair(NamedTuple):
    """A tensor that was loaded, or its shard, and the live one of the same name."""

    source: torch.Tensor
    live: torch.Tensor


class Span(NamedTuple):
    """Bytes of the file that go to a tensor."""

    start: int
    end: int
    target: torch.Tensor
    """``uint8`` of shape ``[end - start]``."""


@dataclass
class Filling:
    """What is to be filled from one file, and how."""

    state: Any
    """The state of the file, with live tensors at the places of those of the same names."""
    spans: list[Span] = field(default_factory=list)
    """In the order of the file; they do not overlap."""
    copies: list[Pair] = field(default_factory=list)
    """To be copied once the file is read."""
    filled: list[torch.Tensor] = field(default_factory=list)
    """Live tensors, or their shards."""

    @property
    def is_in_memory(self) -> bool:
        """Whether all spans go to memory, and none to a GPU."""
        return all(span.target.device.type == "cpu" for span in self.spans)

    def put(self, at: int, piece: memoryview) -> None:
        """Copy a piece of the file, which starts at byte ``at``, to where it belongs."""
        for start, end, span in self._cut(at, at + len(piece)):
            if span is None:
                continue
            source = torch.frombuffer(piece, dtype=torch.uint8)
            part, target = source[start - at : end - at], span.target[start - span.start :]
            if target.device.type == "cpu":
                copy_pieces([(target.data_ptr(), part.data_ptr(), len(part))], threads=1)
            else:
                target[: len(part)].copy_(part)

    def places(self, at: int, nbytes: int) -> list[memoryview]:
        """Return the memory of a part of the file; new memory for bytes that are no tensor's."""
        return [
            memoryview(bytearray(end - start))
            if span is None
            else memoryview(
                view_memory(span.target.data_ptr() + start - span.start, end - start)
            ).cast("B")
            for start, end, span in self._cut(at, at + nbytes)
        ]

    def finish(self) -> None:
        """Do what is left to do when the file is read."""
        with torch.no_grad():
            for source, live in self.copies:
                live.copy_(source)
        torch.autograd.graph.increment_version(self.filled)

    def _cut(self, start: int, end: int) -> Iterator[tuple[int, int, Span | None]]:
        """Yield the parts of a part of the file, each of a span or of none."""
        first = max(0, bisect_right(self.spans, start, key=attrgetter("start")) - 1)
        for number in range(first, len(self.spans)):
            if (span := self.spans[number]).start >= end:
                break
            if span.end <= start:
                continue
            if start < span.start:
                yield start, span.start, None
            start = max(start, span.start)
            yield start, min(end, span.end), span
            start = span.end
        if start < end:
            yield start, end, None


def plan_filling(image: memoryview, live: Any) -> Filling:
    """Find out how the tensors of ``live`` are filled from a file, which is unpickled in full.

    ``image`` is a mapping of the file, of which little is read.

    Raises:
        ConfigError: the states have not the same tensors; the message names those that differ.
        ImageError: as `deserialize_unread`.
    """
    saved, storages = deserialize_unread(image)
    matching = _match(saved, live)
    by_storage = defaultdict[int, list[Pair]](list)
    for pair in matching.pairs:
        by_storage[get_storage_id(pair.source.untyped_storage())].append(pair)
    sizes = {key: sum(each.source.nbytes for each in pairs) for key, pairs in by_storage.items()}
    if lost := [key for key, nbytes in sizes.items() if nbytes and key not in storages]:
        raise ImageError(f"{len(lost)} storages of the state are not in the file")
    for key in storages.keys() - by_storage.keys():  # such as the ranks of meshes
        unread = storages.pop(key)
        nbytes = unread.storage.nbytes()
        part = torch.frombuffer(image, dtype=torch.uint8, count=nbytes, offset=unread.start)
        view_bytes(unread.storage).copy_(part)
    matching.require_same_where_shared(lambda pair: _view_saved(image, storages, pair.source))
    matching.require_equal()
    plans = {key: _place(unread, by_storage[key]) for key, unread in storages.items()}
    filling = Filling(matching.state, filled=[pair.live for pair in matching.pairs])
    for key, unread in storages.items():
        spans, tied = plans[key] or ([], [])
        is_on_cpu = all(span.target.device.type == "cpu" for span in spans)
        if plans[key] is None or not (matching.is_plain or is_on_cpu):
            end = unread.start + unread.storage.nbytes()
            filling.spans.append(Span(unread.start, end, view_bytes(unread.storage)))
            filling.copies += by_storage[key]
            continue
        filling.spans += spans
        filling.copies += tied
        for pair in by_storage[key] if not matching.is_plain else ():
            pair.source.data = pair.live  # an object that has the tensor as well sees its values
    filling.spans.sort(key=attrgetter("start"))
    return filling


def _view_saved(
    image: memoryview, storages: Mapping[int, UnreadStorage], source: torch.Tensor
) -> torch.Tensor:
    start = storages[get_storage_id(source.untyped_storage())].start
    at = int(start + source.storage_offset() * source.element_size())
    part = torch.frombuffer(image, dtype=torch.uint8, count=_span(source), offset=at)
    return part.view(source.dtype).as_strided(source.shape, source.stride())


def plan_copies(saved: Any, live: Any) -> Filling:
    """Plan to copy each tensor of a state that was loaded to the live one of its name.

    Raises:
        ConfigError: as `plan_filling`.
    """
    matching = _match(saved, live)
    matching.require_same_where_shared(lambda pair: pair.source.resolve_conj().resolve_neg())
    matching.require_equal()
    return Filling(
        matching.state, copies=matching.pairs, filled=[pair.live for pair in matching.pairs]
    )


NOT_LIVE = (
    "extra state or a copy, with which the module does not compute (dict(state) fills tensors that "
    "you have put there)"
)


def find_copies(owner: torch.nn.Module | Mapping[str, Any], named: Mapping[str, Any]) -> list[str]:
    """Return the names of values in the state of a module that are not its own tensors.

    ``owner`` is the module, or the dict that was passed instead. In one of ``state_dict()``, a
    tensor whose memory no other object has is a copy, unless that is true of all: the module may be
    gone.
    """
    if isinstance(owner, torch.nn.Module):
        tensors = (*owner.parameters(), *owner.buffers())
        own = {_identify(each) for each in tensors if not describe_form(each)}
        return [n for n, each in named.items() if describe_form(each) or _identify(each) not in own]
    copies = [name for name, each in named.items() if not isinstance(each, torch.Tensor)]
    if not hasattr(owner, "_metadata"):
        return copies
    plain = {n: get_shard(each) for n, each in named.items() if not describe_form(each)}
    storages = {name: each.untyped_storage() for name, each in plain.items()}
    here = Counter(map(get_storage_id, storages.values()))
    sole = [n for n, each in storages.items() if count_users(each) <= here[get_storage_id(each)]]
    if len(sole) < len(storages):
        return copies + sole
    if sole:
        logger.warning(
            "nothing else refers to the tensors of the state that is filled: if its module lives, "
            "as one of FSDP1 does, pass the module, or call its load_state_dict with the result"
        )
    return copies


def get_live_state(target: Any) -> Any:
    """Return the state of a module, which can be filled; the module if it has copies, as FSDP1's.

    Anything else is returned as it is.
    """
    if not isinstance(target, torch.nn.Module):
        return target
    state = target.state_dict()
    return target if find_copies(target, state) else state


def _identify(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*_get_place(get_shard(tensor)), tensor.dtype, tensor.device)


_NAMED = 5
"""Tensors that an error names."""
_PLAIN = (str, bytes, int, float, complex, type(None), torch.Size, torch.dtype, torch.device)
"""Values that refer to no tensor."""


@dataclass
class _Matching:
    """A state that was loaded, and the live tensors that are now in it."""

    state: Any = None
    pairs: list[Pair] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    meshes: dict[tuple[int, int], tuple[str, DeviceMesh, DeviceMesh]] = field(default_factory=dict)
    """Those of DTensors, saved and live, each with the name of the first."""
    is_plain: bool = True
    """Whether there is no object that may have tensors of the state as well."""

    def replace(self, saved: Any, live: Any, name: str = "") -> Any:
        """Return ``saved`` with the tensors of ``live``, and collect them."""
        if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
            if why := _find_difference(saved, live):
                self.differing.append(f"{name[1:]} {why}")
            elif isinstance(saved, DTensor) and isinstance(live, DTensor):
                meshes = saved.device_mesh, live.device_mesh
                self.meshes.setdefault((id(meshes[0]), id(meshes[1])), (name[1:], *meshes))
            self.names.append(name[1:])
            self.pairs.append(Pair(get_shard(saved), get_shard(live).detach()))
            return live
        if isinstance(saved, dict) and isinstance(live, Mapping):
            state = copy.copy(saved)  # it may be in the state twice, and live may not
            for key in find_copies(live, live) if hasattr(live, "_metadata") else ():
                if live[key] is not saved.get(key):  # both are None otherwise
                    self.differing.append(f"{f'{name}.{key}'[1:]} is {NOT_LIVE}")
            for key in [*saved, *(key for key in live if key not in saved)]:
                found = self.replace(saved.get(key), live.get(key), f"{name}.{key}")
                if key in saved:
                    state[key] = found
            return state
        if isinstance(saved, list | tuple) and isinstance(live, list | tuple):
            both = enumerate(zip_longest(saved, live))
            items = [self.replace(*two, f"{name}.{n}") for n, two in both][: len(saved)]
            if isinstance(saved, list):
                return type(saved)(items)
            if any(item is not was for item, was in zip(items, saved, strict=True)):
                return saved._make(items) if hasattr(saved, "_make") else tuple(items)
            return saved
        self.differing += (f"{each} is not among those to fill" for each in _tensors(saved, name))
        self.differing += (f"{each} was not saved" for each in _tensors(live, name))
        self.is_plain &= isinstance(saved, _PLAIN)
        return saved

    def require_same_where_shared(self, view: Callable[[Pair], torch.Tensor]) -> None:
        """Collect live tensors that share memory which the file has other values for.

        So are those that lie there in another form than in the file, whatever their values.
        ``view`` returns the data that the first tensor of a pair has in the file. Parts of one
        tensor with gaps between their elements are not compared: they may lie side by side.
        """
        places: dict[Any, int] = {}
        device, end, last = "", 0, 0
        found = ((n, live) for n, (_, live) in enumerate(self.pairs) if live.numel())
        ordered = ((str(live.device), live.data_ptr(), -_span(live), n) for n, live in found)
        for on, start, span, number in sorted(ordered) if not self.differing else ():
            pair = self.pairs[number]
            first = places.setdefault((on, *_get_place(pair.live)), number)
            if first == number and on == device and start < end:
                first = last
            if first != number and not _agree(self.pairs[first], pair, view):
                names = self.names[max(first, number)], self.names[min(first, number)]
                self.differing.append(
                    "{} shares memory with {}, and has other values or another form in the step"
                    "".format(*names)
                )
            if (on != device or start - span > end) and -span == pair.live.nbytes:
                device, end, last = on, start - span, number

    def require_equal(self) -> None:
        """Raise an error if the tensors differ, once the ranks of meshes are read."""
        for name, *meshes in self.meshes.values():
            ranks = [each.mesh for each in meshes]
            if not torch.equal(*ranks):
                places = "was saved on ranks {}, and is on {}"
                self.differing.append(f"{name} {places.format(*(each.tolist() for each in ranks))}")
        if differing := self.differing:
            more = f", and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
            raise ConfigError(
                "the step has other tensors than those to fill: "
                f"{'; '.join(differing[:_NAMED])}{more}. Nothing was changed. Pass a state of the "
                "structure that was saved, or use load"
            )


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _get_place(tensor: torch.Tensor) -> tuple[Any, ...]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [stride for size, stride in steps if size > 1]
    return tensor.data_ptr(), tensor.shape, *strides, tensor.is_conj(), tensor.is_neg()


def _agree(one: Pair, other: Pair, view: Callable[[Pair], torch.Tensor]) -> bool:
    """Return whether live tensors that share memory are to have the same values in it."""
    (at, *form), (live_at, *live_form) = map(_get_place, one)
    (other_at, *other_form), (other_live_at, *other_live_form) = map(_get_place, other)
    are_tied = (live_at, live_form) == (other_live_at, other_live_form)
    if are_tied and (at, form) == (other_at, other_form):
        return True
    if (
        form == live_form
        and other_form == other_live_form
        and at - live_at == other_at - other_live_at
    ):
        return True  # parts of one tensor, there as here
    return are_tied and form[-2:] == other_form[-2:] and have_equal_bits(view(one), view(other))


def _match(saved: Any, live: Any) -> _Matching:
    matching = _Matching()
    try:
        matching.state = matching.replace(saved, live)
    except RecursionError as error:
        raise ConfigError("a state that contains itself cannot be filled; use load") from error
    return matching


def _tensors(value: Any, name: str) -> Iterator[str]:
    for keys, _ in iter_tensors(value):
        yield join_keys((name, *keys))[1:]


def _find_difference(saved: torch.Tensor, live: torch.Tensor) -> str:
    if form := describe_form(saved):
        return f"is {form} in the step, which is not filled in place"
    if (fault := find_fault(live)) or _describe(saved) == _describe(live):
        return fault
    return f"was saved as {_describe(saved)}, and is {_describe(live)}"


def _describe(tensor: torch.Tensor) -> str:
    placed = ""
    if isinstance(tensor, DTensor):
        placed = f" {tensor.placements} with {list(get_shard(tensor).shape)} here"
    return f"{tensor.dtype} {list(tensor.shape)}{placed}"


_Placed = tuple[list[Span], list[Pair]]
"""Where the bytes of a storage go, and what is copied from there to tensors that are not tied."""


def _place(unread: UnreadStorage, pairs: Sequence[Pair]) -> _Placed | None:
    """Find where the bytes of a storage go; None if they have to be copied from the storage."""
    placed: dict[Any, Pair] = {}
    tied: list[Pair] = []
    for pair in pairs:
        start = unread.start + pair.source.storage_offset() * pair.source.element_size()
        place = start, start + pair.source.nbytes, pair.source.dtype, pair.source.shape
        first = placed.setdefault(place, pair)
        if first.live.data_ptr() != pair.live.data_ptr():
            tied.append(Pair(first.live, pair.live))
    spans = [Span(place[0], place[1], pair.live) for place, pair in placed.items()]
    spans.sort(key=attrgetter("start"))
    are_apart = all(one.end <= other.start for one, other in pairwise(spans))
    # no tensor that is not filled, as an attribute of a dict, has a part of the storage
    are_all = len({id(pair.source) for pair in pairs}) == unread.tensors
    if not (are_apart and are_all and all(map(_has_same_bytes, pairs))):
        return None
    return [span._replace(target=_view_bytes(span.target)) for span in spans], tied


def _has_same_bytes(pair: Pair) -> bool:
    """Return whether the live tensor's memory is to have the bytes of the file's."""
    return all(each.is_contiguous() and not each.is_conj() and not each.is_neg() for each in pair)


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    start = tensor.storage_offset() * tensor.element_size()
    return view_bytes(tensor.untyped_storage())[start : start + tensor.nbytes]
