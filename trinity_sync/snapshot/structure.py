"""What decides the headers of an image: keys, shapes, dtypes, sharing and plain values.

Two states of equal structure are laid out in the same way, so only their tensor data has to be
copied. A state with a value that cannot be compared cheaply and surely (a NumPy array, an object
of a user's class, a tensor that carries attributes) has no structure here and is laid out afresh.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Structure = list[Any]
"""All that decides the headers, flat, in the order of a walk."""

_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))
_SPECIAL = _COMPLEX | _QUANTIZED
_PLAIN = frozenset((int, str, bytes, bool, type(None)))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a ``torch.Tensor`` is a strided view of a storage and no more than that."""
    return (
        (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not (tensor.dtype in _SPECIAL or tensor.is_neg() or tensor.__dict__)
    )


class _NotComparable(Exception):
    """The state holds a value whose equality says nothing about its pickle."""


def structure_of(state: Any) -> tuple[Structure, list[torch.UntypedStorage]] | None:
    """The structure of ``state`` and its non-empty storages in the order that it visits them.

    Returns None for a state that has to be laid out afresh.
    """
    found: Structure = []
    live: list[torch.UntypedStorage] = []
    numbers: dict[int, int] = {}
    note = found.append  # local names: this walk is all that a known state costs
    strided, tensor_type, parameter = torch.strided, torch.Tensor, torch.nn.Parameter

    def visit(value: Any) -> None:
        kind = type(value)
        note(kind)
        if kind is DTensor:
            if value.__dict__:
                raise _NotComparable
            # specs are shared by tensors and saves, and hold shape, strides, mesh and placements
            note(value._spec)
            note(value.requires_grad)
            value = value._local_tensor
            kind = type(value)
            note(kind)
        if kind is tensor_type or kind is parameter:
            dtype = value.dtype
            if value.__dict__ or value.layout is not strided:
                raise _NotComparable
            if dtype in _SPECIAL:
                if dtype in _QUANTIZED:
                    raise _NotComparable
                note(value.is_conj())
            storage = value.untyped_storage()
            nbytes, address = storage.nbytes(), storage._cdata
            number = numbers.get(address)
            if number is None:
                number = numbers[address] = len(numbers)
                if nbytes:
                    live.append(storage)
            found.extend(
                (
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
        elif kind is dict or kind is OrderedDict:
            note(len(value))
            if kind is OrderedDict:
                visit(value.__dict__)  # a module's state has its _metadata there
            for key, item in value.items():
                if type(key) is str:
                    note(key)
                else:
                    visit(key)
                visit(item)
        elif kind is list or kind is tuple:
            note(len(value))
            for item in value:
                visit(item)
        elif kind in _PLAIN:
            note(value)
        elif kind is float:
            note(value.hex())  # tells -0.0 from 0.0, and nan equals nan
        else:
            raise _NotComparable

    try:
        with torch._C.DisableTorchFunctionSubclass():  # attributes of DTensors are read as they are
            visit(state)
    except _NotComparable:
        return None
    return found, live
