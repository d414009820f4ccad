"""Optimizer states of FSDP1 with ``use_orig_params``: pieces of parameters, without placements.

FSDP1 joins the parameters of a wrapped module end to end, and gives each rank an equal chunk. So
what a rank has of a parameter follows from the parameter's place among the others and the number of
ranks. A rank that has nothing of a parameter has no state of it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from trinity_sync.errors import ConfigError
from trinity_sync.formats.saved_shard import open_shard
from trinity_sync.snapshot.dtensor_shards import compute_chunk
from trinity_sync.snapshot.torch_private import get_fsdp1_handle, get_original_parameters


class FlatPlace(NamedTuple):
    """Where a parameter lies in the flat parameter of its module; all in elements."""

    start: int
    length: int
    total: int
    """Length of the flat parameter, without the padding at its end."""
    mine: tuple[int, int]
    """Start and end of this rank's piece, in the parameter."""

    def cut(self, world_size: int, rank: int) -> tuple[int, int]:
        """Return start and end of a rank's piece, in the parameter."""
        begin, size = compute_chunk(self.total, world_size, rank)
        first, last = (min(max(at - self.start, 0), self.length) for at in (begin, begin + size))
        return first, last


def find_places(model: Any, params: Sequence[Any]) -> dict[int, FlatPlace]:
    """Return the place of each optimizer parameter, by number; none without ``use_orig_params``.

    Raises:
        ConfigError: some parameters are FSDP1's, and others are not.
    """
    found: dict[int, FlatPlace] = {}
    for module in model.modules():
        handle = get_fsdp1_handle(module)
        spans = get_original_parameters(handle)
        for param, start, end in spans:
            place = FlatPlace(start, end - start, spans[-1][2], (0, end - start))
            if handle.uses_sharded_strategy:
                place = place._replace(mine=place.cut(handle.world_size, handle.rank))
            found[id(param)] = place
    places = {n: found[id(param)] for n, param in enumerate(params) if id(param) in found}
    if places and len(places) < len(params):
        lacking = min(set(range(len(params))) - places.keys())
        raise ConfigError(
            f"parameter {lacking} of the optimizer is in no FSDP module, and others are: such an "
            "optimizer can be loaded only by as many ranks as saved it; use as many, or take "
            "optimizer out of checkpoint.load_contents"
        )
    return places


def load_pieces(
    folder: Path, saved_by: int, params: Sequence[Any], places: Mapping[int, FlatPlace]
) -> dict[int, dict[str, Any]]:
    """Return this rank's optimizer states, by number of the parameter and name of the state.

    The folder is a role's, which ``saved_by`` ranks saved.

    Raises:
        CommitError: a file cannot be read.
        ConfigError: the saved pieces are not those of these parameters.
    """
    state: dict[int, dict[str, Any]] = defaultdict(dict)
    filled: dict[tuple[int, str], int] = defaultdict(int)
    for rank in range(saved_by):
        cuts = {
            number: cut
            for number, place in places.items()
            if max((cut := place.cut(saved_by, rank))[0], place.mine[0])
            < min(cut[1], place.mine[1])
        }
        saved = open_shard(folder, "optim", saved_by, rank)["state"] if cuts else {}
        for number, (begin, end) in cuts.items():
            first, last = places[number].mine
            low, high = max(begin, first), min(end, last)
            for key, value in saved.get(number, {}).items():
                if not isinstance(value, torch.Tensor) or not value.ndim:
                    copied = value.clone() if isinstance(value, torch.Tensor) else value
                    state[number].setdefault(key, copied)
                    continue
                if isinstance(value, DTensor) or value.numel() != end - begin:
                    raise _make_error(folder, saved_by, number, key)
                if key not in state[number]:
                    piece = torch.empty(last - first, dtype=value.dtype, device="cpu")
                    state[number][key] = piece.to(params[number].device)
                target = state[number][key][low - first : high - first]
                target.copy_(value.reshape(-1)[low - begin : high - begin])
                filled[number, key] += high - low
    for (number, key), length in filled.items():
        first, last = places[number].mine
        if length != last - first or params[number].numel() != length:
            raise _make_error(folder, saved_by, number, key)
        state[number][key] = state[number][key].view(params[number].shape)
    return dict(state)


def _make_error(folder: Path, saved_by: int, number: int, key: str) -> ConfigError:
    return ConfigError(
        f"{folder}: state.{number}.{key} of the optimizer does not consist of the pieces that "
        f"{saved_by} ranks have of that parameter under FSDP1 with use_orig_params: that is "
        "resharded only where all ranks shard, and wrapping and mixed precision are as they were. "
        f"Load it with {saved_by} ranks, or take optimizer out of checkpoint.load_contents."
    )
