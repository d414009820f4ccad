"""What decides the headers of an image: keys, shapes, dtypes, sharing and plain values.

Two states of equal structure are laid out in the same way, so only their tensor data has to be
copied. A state with a value that cannot be compared cheaply and surely (a NumPy array, an object
of a user's class, a tensor that carries attributes) has no structure here and is laid out afresh.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Structure = tuple[Any, ...]

_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_PLAIN = frozenset((int, str, bytes, bool, type(None)))


class _NotComparable(Exception):
    """The state holds a value whose equality says nothing about its pickle."""


def structure_of(state: Any) -> tuple[Structure, list[torch.UntypedStorage]] | None:
    """The structure of ``state`` and its non-empty storages in the order that it visits them.

    Returns None for a state that has to be laid out afresh.
    """
    live: list[torch.UntypedStorage] = []
    numbers: dict[int, int] = {}
    strided, is_complex = torch.strided, _COMPLEX  # local names: this is all a known state costs

    def visit(value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return visit_tensor(value)
        if kind is DTensor:
            layout = (value.device_mesh, value.placements, tuple(value.shape), value.stride())
            return (kind, layout, value.requires_grad, visit_tensor(value._local_tensor))
        if kind is dict or kind is OrderedDict:
            items: list[Any] = [kind]
            for key, item in value.items():
                items.append(key if type(key) is str else visit(key))
                items.append(visit_tensor(item) if type(item) is torch.Tensor else visit(item))
            return items
        if kind is list or kind is tuple:
            return (kind, [visit(item) for item in value])
        if kind in _PLAIN:
            return (kind, value)
        if kind is float:
            return (kind, value.hex())  # tells -0.0 from 0.0, and nan equals nan
        raise _NotComparable

    def visit_tensor(tensor: torch.Tensor) -> Structure:
        if tensor.layout is not strided or tensor.is_quantized or tensor.__dict__:
            raise _NotComparable
        storage = tensor.untyped_storage()
        nbytes, address, dtype = storage.nbytes(), storage._cdata, tensor.dtype
        number = numbers.get(address)
        if number is None:
            number = numbers[address] = len(numbers)
            if nbytes:
                live.append(storage)
        return (
            type(tensor),
            dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.device,
            tensor.requires_grad,
            dtype in is_complex and tensor.is_conj(),
            tensor.is_neg(),
            number,
            nbytes,
        )

    try:
        return (visit(state),), live
    except _NotComparable:
        return None
