"""Fill the tensors of a live state from the bytes of a ``.pt`` file, in place.

The state of the file is unpickled over memory that nothing has touched, which costs nothing, and
compared with the live one by name. Then each byte of the file belongs to a live tensor, is copied
to it later, as for a tensor that is not contiguous, or is no tensor's.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from trinity_sync.errors import ConfigError
from trinity_sync.tensors.deserialize import UnreadStorage, deserialize_unread
from trinity_sync.tensors.memcpy import copy_pieces, view_bytes, view_memory
from trinity_sync.tensors.torch_private import get_shard, get_storage_id


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
        number = max(0, bisect_right(self.spans, start, key=attrgetter("start")) - 1)
        for span in self.spans[number:]:
            if span.start >= end:
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
    filling = Filling(matching.state, filled=[pair.live for pair in matching.pairs])
    by_storage = defaultdict[int, list[Pair]](list)
    for pair in matching.pairs:
        by_storage[get_storage_id(pair.source.untyped_storage())].append(pair)
    for key, unread in storages.items():
        _plan_storage(filling, unread, by_storage[key], in_place=matching.is_plain)
    filling.spans.sort(key=attrgetter("start"))
    return filling


def plan_copies(saved: Any, live: Any) -> Filling:
    """Plan to copy each tensor of a state that was loaded to the live one of its name.

    Raises:
        ConfigError: as `plan_filling`.
    """
    matching = _match(saved, live)
    return Filling(
        matching.state, copies=matching.pairs, filled=[pair.live for pair in matching.pairs]
    )


_NAMED = 5
"""Tensors that an error names."""
_PLAIN = (str, bytes, int, float, complex, type(None), torch.Size, torch.dtype, torch.device)
"""Values that refer to no tensor."""


@dataclass
class _Matching:
    """A state that was loaded, and the live tensors that are now in it."""

    state: Any = None
    pairs: list[Pair] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    is_plain: bool = True
    """Whether there is no object that may have tensors of the state as well."""

    def replace(self, saved: Any, live: Any, name: str = "") -> Any:
        """Return ``saved`` with the tensors of ``live``, and collect them."""
        if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
            if why := _find_difference(saved, live):
                self.differing.append(f"{name[1:]} {why}")
            self.pairs.append(Pair(get_shard(saved), get_shard(live).detach()))
            return live
        if isinstance(saved, dict) and isinstance(live, Mapping):
            for key in [*saved, *(key for key in live if key not in saved)]:
                found = self.replace(saved.get(key), live.get(key), f"{name}.{key}")
                if key in saved:
                    saved[key] = found
            return saved
        if isinstance(saved, list | tuple) and isinstance(live, list | tuple):
            both = enumerate(zip_longest(saved, live))
            items = [self.replace(*two, f"{name}.{n}") for n, two in both][: len(saved)]
            if isinstance(saved, list):
                saved[:] = items
            elif any(item is not was for item, was in zip(items, saved, strict=True)):
                return saved._make(items) if hasattr(saved, "_make") else tuple(items)
            return saved
        self.differing += (f"{each} is not among those to fill" for each in _tensors(saved, name))
        self.differing += (f"{each} was not saved" for each in _tensors(live, name))
        self.is_plain &= isinstance(saved, _PLAIN)
        return saved


def _match(saved: Any, live: Any) -> _Matching:
    matching = _Matching()
    matching.state = matching.replace(saved, live)
    if differing := matching.differing:
        more = f", and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        raise ConfigError(
            f"the step has other tensors than those to fill: {'; '.join(differing[:_NAMED])}{more}"
            ". Nothing was changed. Pass a state of the structure that was saved, or use load"
        )
    return matching


def _tensors(value: Any, name: str) -> Iterator[str]:
    """Yield the names of the tensors in a nested state."""
    if isinstance(value, torch.Tensor):
        yield name[1:]
    elif isinstance(value, Mapping | list | tuple):
        inner = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in inner:
            yield from _tensors(each, f"{name}.{key}")


def _find_difference(saved: torch.Tensor, live: torch.Tensor) -> str:
    for each in (saved, live):
        if type(each) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor):
            return f"is a {type(each).__name__}, which cannot be filled in place"
    kinds = [_describe(each) for each in (saved, live)]
    if kinds[0] != kinds[1]:
        return "was saved as {}, and is {}".format(*kinds)
    if live.is_meta or live.layout != torch.strided or live.is_quantized:
        return f"is {'on the meta device' if live.is_meta else 'not dense'}"
    return ""


def _describe(tensor: torch.Tensor) -> str:
    placed = ""
    if isinstance(tensor, DTensor):
        placed = f" {tensor.placements} with {list(get_shard(tensor).shape)} here"
    return f"{tensor.dtype} {list(tensor.shape)}{placed}"


def _plan_storage(
    filling: Filling, unread: UnreadStorage, pairs: Sequence[Pair], *, in_place: bool
) -> None:
    """Plan where the bytes of a storage go: to live tensors, or to the storage, to be copied."""
    placed: dict[Any, Pair] = {}
    tied: list[Pair] = []
    for pair in pairs:
        start = unread.start + pair.source.storage_offset() * pair.source.element_size()
        place = start, start + pair.source.nbytes, pair.source.dtype, pair.source.shape
        first = placed.setdefault(place, pair)
        if first.live.data_ptr() != pair.live.data_ptr():
            tied.append(Pair(first.live, pair.live))
    spans = [Span(start, end, pair.live) for (start, end, *_), pair in placed.items()]
    spans.sort(key=attrgetter("start"))
    are_apart = all(one.end <= other.start for one, other in pairwise(spans))
    # no tensor that is not filled, as an attribute of a dict, has a part of the storage
    are_all = len({id(pair.source) for pair in pairs}) == unread.tensors
    if in_place and are_apart and are_all and all(map(_has_same_bytes, pairs)):
        filling.spans += (span._replace(target=_view_bytes(span.target)) for span in spans)
        filling.copies += tied
    else:
        end = unread.start + unread.storage.nbytes()
        filling.spans.append(Span(unread.start, end, view_bytes(unread.storage)))
        filling.copies += pairs


def _has_same_bytes(pair: Pair) -> bool:
    """Return whether the live tensor's memory is to have the bytes of the file's."""
    return all(each.is_contiguous() and not each.is_conj() and not each.is_neg() for each in pair)


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    start = tensor.storage_offset() * tensor.element_size()
    return view_bytes(tensor.untyped_storage())[start : start + tensor.nbytes]
