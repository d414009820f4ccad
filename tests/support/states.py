"""Copies of states, and what differs between two; without veRL, whose import takes seconds."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def copied(state: Any) -> Any:
    """The same structure with plain copies of this rank's tensors."""
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    if isinstance(state, DTensor):
        return state.to_local().detach().clone()
    return state.detach().clone() if isinstance(state, torch.Tensor) else state


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal, also of NaN and of zeros with a sign."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    plain = [copied(each).resolve_conj().resolve_neg().contiguous() for each in (left, right)]
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in plain))


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two states differ in any bit."""
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return [f"{path}: keys"]
        return [d for key in left for d in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return [f"{path}: length"]
        pairs = enumerate(zip(left, right, strict=True))
        return [d for n, (a, b) in pairs for d in differences(a, b, f"{path}/{n}")]
    if isinstance(left, torch.Tensor):
        return [] if equal_bits(left, right) else [path]
    same = left == right
    return [] if (same if isinstance(same, bool) else same.all()) else [path]
