"""The cache key of a layout: keys, shapes, dtypes, sharing and plain values of a state.

Two states with equal keys have the same layout, so only their tensor data has to be copied, and
their floats, which are kept apart because they differ from save to save. A state with a value that
cannot be compared cheaply and reliably (a large NumPy array, an object of a user's class, a tensor
with attributes) has no key, and is laid out again at each save.
"""

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    found: LayoutKey = []
    floats: list[float] = []
    live: list[torch.UntypedStorage] = []
    numbers: dict[int, int] = {}
    firsts: list[torch.Tensor] = []
    """The first tensor in each storage."""
    seen: dict[int, int] = {}
    # local names: this walk is the whole cost of a known state
    add, add_all = found.append, found.extend
    strided, tensor_type, parameter = torch.strided, torch.Tensor, torch.nn.Parameter
    attributes_count = type(state) is not UndetachedStateDict

    def walk(value: Any) -> None:
        kind, given = type(value), value
        if kind is DTensor:
            if attributes_count and value.__dict__:
                raise _NotComparable
            # specs are shared by tensors and saves, and hold shape, strides, mesh and placements
            spec, shard = get_spec_and_shard(value)
            add_all((kind, spec, value.requires_grad))
            value = shard
            kind = type(value)
        if kind is tensor_type or kind is parameter:
            dtype = value.dtype
            if (attributes_count and value.__dict__) or value.layout is not strided:
                raise _NotComparable
            if dtype in _SPECIAL:
                if dtype in _QUANTIZED:
                    raise _NotComparable
                add(value.is_conj())
            storage = value.untyped_storage()
            nbytes, address = storage.nbytes(), get_storage_id(storage)
            number = numbers.get(address)
            if number is None:
                number = numbers[address] = len(numbers)
                firsts.append(given)
                if nbytes:
                    live.append(storage)
            elif given is not firsts[number]:  # a pickle has an object once
                add(seen.setdefault(id(given), len(seen)))
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
            return
        add(kind)
        if kind is float:
            floats.append(value)
        elif kind in _PLAIN:
            add(value)
        elif kind not in _CONTAINERS and not (kind is np.ndarray and _is_small(value)):
            raise _NotComparable
        elif (address := id(value)) in seen:
            add(~seen[address])  # a pickle also has it once
        else:
            seen[address] = len(seen)
            if kind is np.ndarray:
                add_all((value.dtype.str, value.shape, value.tobytes()))
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

    visit: Callable[[Any], None] = walk
    try:
        with disable_subclasses():  # attributes of DTensors are read as they are
            visit(state)
    except Exception:  # whether it can be saved at all is for torch.save to say
        return None
    finally:
        visit = add  # a function that refers to itself would live until a garbage collection
    return StateWalk(found, pack_floats(floats), live)
