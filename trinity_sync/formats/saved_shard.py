"""The state of a component that one rank saved, with its tensors mapped from the file."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.layout import shard_file

Keys = tuple[Any, ...]
"""Path of a leaf in a state: ``("state", 0, "exp_avg")``."""


def open_shard(folder: Path, component: str, world_size: int, rank: int) -> Mapping[Any, Any]:
    """Return a rank's state from the folder of a role; its tensors are mapped from the file.

    Raises:
        CommitError: the file is missing, or ``weights_only`` cannot read it.
        ConfigError: it does not contain a dict.
    """
    path = folder / shard_file(component, world_size, rank)
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CommitError(
            f"{path} cannot be read with weights_only, so it cannot be resharded: {error}\n"
            f"Load it with {world_size} ranks, or choose another step."
        ) from error
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"{path} has a {type(state).__name__}, and only dicts can be resharded; load it "
            f"with {world_size} ranks"
        )
    return state


def iter_leaves(state: Mapping[Any, Any], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the values in nested dicts, each with its path."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from iter_leaves(value, (*above, key))
        else:
            yield (*above, key), value


def get_leaf(state: Any, keys: Keys) -> Any:
    """Return the value at a path; None if there is none."""
    for key in keys:
        state = state.get(key) if isinstance(state, Mapping) else None
    return state


def narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return a box of a tensor, given its first index and its length in each dimension."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
