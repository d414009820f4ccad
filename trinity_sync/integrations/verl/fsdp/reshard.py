"""Load a step that was saved by another number of ranks, or on another mesh.

Each rank outlines a part of the files, and all ranks exchange what the files hold. Then a rank
copies only the boxes that it needs: into the live model under FSDP2, into new optimizer states
otherwise. The step is leased meanwhile, and the digest of each file is compared before, by one of
the ranks.

FSDP1 with ``use_orig_params`` saves pieces of parameters, without placements. FSDP1 joins the
parameters of a wrapped module end to end, and gives each rank an equal chunk. So what a rank has of
a parameter follows from the parameter's place among the others and the number of ranks. A rank that
has nothing of a parameter has no state of it.
"""

import hashlib
import logging
import random
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trinity_sync.client.collective import gather_from_ranks, lease_on_rank_0, run_on_all_ranks
from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.formats.shard_reader import (
    SavedState,
    open_shard,
    outline_files,
    require_same_model,
)
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.integrations.verl.fsdp.state_dict import (
    get_model_state,
    has_only_adapters,
    require_placed,
)
from trinity_sync.layout import shard_file, split_role_path
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.restore import require_digest
from trinity_sync.tensors.deserialize import load_file
from trinity_sync.tensors.dtensors import (
    ShardBox,
    compute_chunk,
    compute_own_box,
    get_place,
    make_whole_box,
)
from trinity_sync.tensors.torch_private import (
    get_fsdp1_handle,
    get_original_parameters,
    get_shard,
    get_whole_numel,
)
from trinity_sync.tensors.unshard import Keys, is_flat, iter_tensors, join_keys, map_leaves

logger = logging.getLogger(__name__)


def is_on_this_mesh(role_folder: Path, model: Any) -> bool:
    """Return whether the model was saved on its mesh, with its placements; a collective call.

    As many ranks saved the folder as there are now.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    live = get_model_state(model)

    def is_alike() -> bool:
        try:
            saved = open_shard(role_folder / shard_file("model", world_size, rank))
        except (CommitError, ConfigError):
            return True  # the load itself says what is wrong with it
        return all(
            get_place(live[name]) == get_place(value)
            for name, value in saved.items()
            if name in live
        )

    return all(gather_from_ranks(run_on_all_ranks(role_folder, is_alike)))


def load_resharded(
    role_folder: Path,
    saved_by: int,
    components: Sequence[str],
    *,
    committed: bool,
    model: Any,
    optimizer: Any,
) -> Generator[tuple[str, Any], None, None]:
    """Yield this rank's state of each component, as this rank would have saved it.

    Collective on the default process group: every rank iterates to the end, and the step is leased
    until then. Under FSDP2 the model's state is the live parameters, with their new values. A step
    that is ``committed``, the same on all ranks, has a manifest; a folder elsewhere may be in
    veRL's layout. ``saved_by`` ranks saved it.

    Raises:
        CommitError: a file is missing, corrupted or cannot be read. All ranks raise it.
        ConfigError: model or optimizer differs from the saved one.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        logger.info(
            "%s was saved by %d ranks on another mesh, resharding it to %d",
            role_folder,
            saved_by,
            world_size,
        )
    with ExitStack() as leased:
        if committed:
            root, step, _ = split_role_path(role_folder)
            manifest = leased.enter_context(lease_on_rank_0(root, step))
            run_on_all_ranks(
                role_folder, lambda: _verify_files(role_folder, manifest, saved_by, components)
            )
        for component in components:
            if component == "model":
                yield component, _load_model_state(role_folder, saved_by, model)
            elif component == "optim":
                yield component, _load_optimizer_state(role_folder, saved_by, model, optimizer)
            else:
                extra = partial(_load_extra_state, role_folder, saved_by, rank)
                yield component, run_on_all_ranks(role_folder, extra)


def _verify_files(
    role_folder: Path, manifest: Manifest, saved_by: int, components: Sequence[str]
) -> None:
    """Verify the digests of this rank's part of the files: chunks have no digests of their own."""
    role = role_folder.name
    records = [
        record
        for record in manifest.files
        if (record.role, record.world_size) == (role, saved_by) and record.component in components
    ]
    for record in records[dist.get_rank() :: dist.get_world_size()]:
        path = role_folder.parent / record.path
        require_digest(path, record, digest_cached_file(path))


def _open_state(
    role_folder: Path, component: str, saved_by: int, flat_lengths: Mapping[int, int] | None = None
) -> SavedState:
    """Return the tensors of a component; a collective call.

    Each rank outlines and compares a part of the files.
    """
    files = [role_folder / shard_file(component, saved_by, rank) for rank in range(saved_by)]
    mine = range(dist.get_rank(), saved_by, dist.get_world_size())
    outlined = run_on_all_ranks(role_folder, lambda: outline_files(files, mine, flat_lengths))
    outlines = {rank: each for found in gather_from_ranks(outlined) for rank, each in found.items()}
    ordered = [outlines[rank] for rank in range(saved_by)]
    return run_on_all_ranks(role_folder, lambda: SavedState(files, ordered, compared=mine))


def _load_model_state(role_folder: Path, saved_by: int, model: Any) -> dict[str, Any]:
    saved = _open_state(role_folder, "model", saved_by)
    live = get_model_state(model)
    require_same_model(role_folder, saved.tensors, live, partial=has_only_adapters(saved.tensors))
    state = {name: live[name] for name in saved.tensors}
    targets = run_on_all_ranks(role_folder, lambda: _find_targets(state))
    _copy(role_folder, saved, targets)
    return state


def _load_optimizer_state(
    role_folder: Path, saved_by: int, model: Any, optimizer: Any
) -> dict[str, Any]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    places = run_on_all_ranks(role_folder, lambda: find_places(model, params))
    file = role_folder / shard_file("optim", saved_by, 0)
    first = run_on_all_ranks(role_folder, lambda: open_shard(file))
    groups = first.get("param_groups", [])
    _require_same_groups(role_folder, groups, optimizer)
    if places:
        read_pieces = partial(load_pieces, role_folder, saved_by, params, places)
        return {"state": run_on_all_ranks(role_folder, read_pieces), "param_groups": groups}
    flat = {
        number: numel
        for number, param in enumerate(params)
        if (numel := get_whole_numel(param)) is not None  # FSDP1
    }
    saved = _open_state(role_folder, "optim", saved_by, flat)
    whole: dict[str, Any] = {}
    pieces: dict[str, tuple[ShardBox, torch.Tensor]] = {}

    def allocate(keys: Keys, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        name, number = join_keys(keys), keys[1]
        if is_flat(leaf, flat.get(number)):
            value, pieces[name] = _allocate_flat(leaf, params[number], flat[number])
            return value
        whole[name] = _allocate(name, leaf, params[number])
        return whole[name]

    state = map_leaves(allocate, first.get("state", {}), ("state",))
    targets = run_on_all_ranks(role_folder, lambda: _find_targets(whole))
    _copy(role_folder, saved, {**targets, **pieces})
    return {"state": state, "param_groups": groups}


def _require_same_groups(role_folder: Path, groups: Sequence[Any], optimizer: Any) -> None:
    theirs = [len(group["params"]) for group in groups]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != ours:
        raise ConfigError(
            f"the optimizer in {role_folder} has parameters in groups of {theirs}, this run's in "
            f"groups of {ours}. Train with the same FSDP strategy and parameter groups, or take "
            "optimizer out of checkpoint.load_contents."
        )


def _allocate(name: str, saved: torch.Tensor, param: Any) -> torch.Tensor:
    """Return memory for this rank's part of an optimizer state, of which rank 0 has ``saved``."""
    if isinstance(param, DTensor) and saved.shape == param.shape:
        return torch.empty_like(param, dtype=saved.dtype)
    if isinstance(saved, DTensor):
        raise ConfigError(
            f"{name} of the optimizer is {list(saved.shape)}, its parameter is "
            f"{list(param.shape)}, so it cannot be resharded; load it with as many ranks as saved "
            "it, or take optimizer out of checkpoint.load_contents"
        )
    return torch.empty(saved.shape, dtype=saved.dtype, device="cpu")


def _allocate_flat(
    saved: torch.Tensor, param: Any, length: int
) -> tuple[torch.Tensor, tuple[ShardBox, torch.Tensor]]:
    """Return memory for this rank's part of FSDP1's flat state, padded, and what to copy into it.

    ``length`` is that of the flat parameter.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start, size = compute_chunk(length, world_size, rank)
    _, each = compute_chunk(length, world_size, 0)
    if param.numel() != each:
        raise ConfigError(
            f"this run's optimizer keeps {param.numel():,} of {length:,} elements a rank, not "
            f"{each:,}: flat state of FSDP1 is resharded only where all ranks shard. Change that, "
            "or take optimizer out of checkpoint.load_contents."
        )
    padded = torch.zeros(each, dtype=saved.dtype, device=param.device)
    return padded, (ShardBox((start,), (size,)), padded[:size])


def _find_targets(state: Mapping[str, Any]) -> dict[str, tuple[ShardBox, torch.Tensor]]:
    """Return this rank's box of each tensor, and the memory for it.

    Raises:
        ConfigError: as `require_placed`.
    """
    require_placed(state)
    targets = {}
    for name, value in state.items():
        whole = make_whole_box(value.shape)
        box = compute_own_box(value, of_replica=True) if isinstance(value, DTensor) else whole
        if box is not None:
            targets[name] = box, get_shard(value).detach()
    return targets


def _copy(
    role_folder: Path, saved: SavedState, targets: Mapping[str, tuple[ShardBox, torch.Tensor]]
) -> None:
    nbytes = run_on_all_ranks(
        role_folder, lambda: sum(saved.copy_box(name, *target) for name, target in targets.items())
    )
    logger.info("%s: %s bytes of %d tensors read", role_folder, f"{nbytes:,}", len(targets))


def _load_extra_state(role_folder: Path, saved_by: int, rank: int) -> dict[str, Any]:
    """Return rank 0's schedule with this rank's RNG state, or one derived from that of rank 0."""

    def load_rank(saved_rank: int) -> Any:
        return load_file(role_folder / shard_file("extra_state", saved_by, saved_rank))

    first = load_rank(0)
    if rank < saved_by:
        return {**load_rank(rank), "lr_scheduler": first["lr_scheduler"]}
    if "rng" not in first:
        return dict(first)
    logger.info(
        "rank %d did not exist when %s was saved: deriving its RNG state from that of rank 0",
        rank,
        role_folder,
    )
    return {**first, "rng": derive_rng(first["rng"], rank)}


def derive_rng(rng: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return deterministic RNG states for a rank that has no saved ones, from those of rank 0.

    Both have the form of veRL's ``get_rng_state``.
    """
    digest = hashlib.sha256(rng["cpu"].numpy().tobytes() + str(rank).encode()).digest()
    seed = int.from_bytes(digest[:4], "big")
    derived: dict[str, Any] = {}
    for name in rng:
        if name == "numpy":
            derived[name] = np.random.RandomState(seed).get_state()
        elif name == "random":
            derived[name] = random.Random(seed).getstate()
        else:
            derived[name] = torch.Generator(name).manual_seed(seed).get_state()
    return derived


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
        file = folder / shard_file("optim", saved_by, rank)
        saved = open_shard(file)["state"] if cuts else {}
        for number, (begin, end) in cuts.items():
            first, last = places[number].mine
            low, high = max(begin, first), min(end, last)
            for key, value in saved.get(number, {}).items():
                if not isinstance(value, torch.Tensor) and any(iter_tensors(value)):
                    raise _make_error(folder, saved_by, number, key)
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
