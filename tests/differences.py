"""Comparison of two states, which needs nothing but PyTorch."""

from typing import Any

import torch


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
        return [] if left.dtype == right.dtype and torch.equal(left, right) else [path]
    same = left == right
    return [] if (same if isinstance(same, bool) else same.all()) else [path]
