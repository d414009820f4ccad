"""The cache key of a layout: keys, shapes, dtypes, sharing and plain values of a state.

Two states with equal keys have the same layout, so only their tensor data has to be copied, and
their floats, which are kept apart because they differ from save to save. A state with a value that
cannot be compared cheaply and reliably (a large NumPy array, an object of a user's class, a tensor
with attributes) has no key, and is laid out again at each save.
"""

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from trinity_sync.tensors.torch_private import (
    disable_subclasses,
    get_spec_and_shard,
    get_storage_id,
)


class UndetachedStateDict(dict[str, Any]):
    """A ``state_dict(keep_vars=True)`` that is laid out and staged as ``state_dict()`` is.

    Detaching a DTensor takes 10 µs. Only the first layout needs tensors without gradients and
    attributes, so later saves of thousands of tensors skip it.
    """

    def detached(self) -> dict[str, Any]:
        """Return the state dict that is saved."""
        return {
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in self.items()
        }


LayoutKey = list[Any]
"""Everything that determines the headers except the floats' values, flat, in pickle order."""


@dataclass(frozen=True)
class StateWalk:
    """The result of a walk over a state."""

    structure: LayoutKey
    floats: bytes
    """`pack_floats`, in pickle order."""
    storages: list[torch.UntypedStorage]
    """Non-empty storages, each once."""


def pack_floats(floats: Sequence[float]) -> bytes:
    """Return floats as a pickle has them, eight bytes each; nan equals nan, -0.0 is not 0.0."""
    return struct.pack(f">{len(floats)}d", *floats)


_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))
_SPECIAL = _COMPLEX | _QUANTIZED
_PLAIN = frozenset((int, str, bytes, bool, type(None)))
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, DTensor))
_CONTAINERS = frozenset((dict, OrderedDict, UndetachedStateDict, list, tuple))


_ARRAY = 16 << 10
"""Largest NumPy array in bytes that is compared; a random state has 2.5 KB."""


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a ``torch.Tensor`` is a strided view of a storage and nothing more."""
    return (
        (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not (tensor.dtype in _SPECIAL or tensor.is_nested or tensor.is_neg())
        and not tensor.__dict__
    )


def _is_small(array: "np.ndarray[Any, Any]") -> bool:
    return array.nbytes <= _ARRAY and array.dtype.kind in "biuf" and array.flags.c_contiguous


class _NotComparable(Exception):
    """The state has a value whose equality does not imply an equal pickle."""


def walk_state(state: Any) -> StateWalk | None:
    """Walk over ``state`` and return its key; None if it has to be laid out again."""
    walk = _Walk(attributes_count=type(state) is not UndetachedStateDict)
    try:
        with disable_subclasses():  # attributes of DTensors are read as they are
            walk.visit(state)
    except Exception:  # whether it can be saved at all is for torch.save to say
        return None
    return StateWalk(walk.found, pack_floats(walk.floats), walk.live)


@dataclass
class _Walk:
    """What a walk has found; it is the whole cost of a known state."""

    attributes_count: bool
    found: LayoutKey = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    live: list[torch.UntypedStorage] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    firsts: list[torch.Tensor] = field(default_factory=list)
    """The first tensor in each storage."""
    seen: dict[int, int] = field(default_factory=dict)

    def visit(self, value: Any) -> None:
        """Add a value, and all that is in it."""
        kind = type(value)
        if kind in _TENSORS:
            self._add_tensor(value, kind)
            return
        add, seen, visit = self.found.append, self.seen, self.visit
        add(kind)
        if kind is float:
            self.floats.append(value)
        elif kind in _PLAIN:
            add(value)
        elif kind not in _CONTAINERS and not (kind is np.ndarray and _is_small(value)):
            raise _NotComparable
        elif (address := id(value)) in seen:
            add(~seen[address])  # a pickle also has it once
        else:
            seen[address] = len(seen)
            if kind is np.ndarray:
                self.found += (value.dtype.str, value.shape, value.tobytes())
                return
            add(len(value))
            if kind is list or kind is tuple:
                for item in value:
                    visit(item)
                return
            for key, item in value.items():
                if type(key) is str:
                    add(key)
                else:
                    visit(key)
                visit(item)
            if kind is OrderedDict:
                visit(value.__dict__)  # a module's state has its _metadata there

    def _add_tensor(self, value: Any, kind: Any) -> None:
        given, add_all, attributes_count = value, self.found.extend, self.attributes_count
        if kind is DTensor:
            if attributes_count and value.__dict__:
                raise _NotComparable
            # specs are shared by tensors and saves, and hold shape, strides, mesh and placements
            spec, shard = get_spec_and_shard(value)
            add_all((kind, spec, value.requires_grad))
            value, kind = shard, type(shard)
        if kind not in _TENSORS or kind is DTensor or value.layout is not torch.strided:
            raise _NotComparable
        if attributes_count and value.__dict__:
            raise _NotComparable
        dtype = value.dtype
        if dtype in _SPECIAL:
            if dtype in _QUANTIZED:
                raise _NotComparable
            self.found.append(value.is_conj())
        storage = value.untyped_storage()
        nbytes, address = storage.nbytes(), get_storage_id(storage)
        number = self.numbers.get(address)
        if number is None:
            number = self.numbers[address] = len(self.numbers)
            self.firsts.append(given)
            if nbytes:
                self.live.append(storage)
        elif given is not self.firsts[number]:  # a pickle has an object once
            self.found.append(self.seen.setdefault(id(given), len(self.seen)))
        add_all(
            (
                kind,
                dtype,
                value.shape,
                value.stride(),
                value.storage_offset(),
                None if value.is_cpu else value.device,
                value.requires_grad,
                value.is_neg(),
                number,
                nbytes,
            )
        )
