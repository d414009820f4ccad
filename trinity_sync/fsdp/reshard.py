"""Load a step that was saved by another number of ranks, or on another mesh.

DCP's planner finds the chunks that a rank needs, and `SavedComponent` reads only those: into the
live model under FSDP2, into new optimizer states otherwise. The step is leased meanwhile, and the
digest of each file is compared before, by one of the ranks.
"""

import hashlib
import logging
import random
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from trinity_sync.client.collective import (
    broadcast_from_rank_0,
    gather_from_ranks,
    lease_on_rank_0,
    run_on_all_ranks,
)
from trinity_sync.errors import CommitError, ConfigError, TrinitySyncError
from trinity_sync.formats.saved_component import SavedComponent
from trinity_sync.formats.saved_shard import open_shard
from trinity_sync.fs.direct_io import digest_cached_file
from trinity_sync.fsdp.original_params import find_places, load_pieces
from trinity_sync.fsdp.state_dict import get_model_state, has_only_adapters
from trinity_sync.fsdp.validate import require_placed
from trinity_sync.layout import shard_file, split_role_path
from trinity_sync.snapshot.dtensor_shards import compute_chunk, get_place
from trinity_sync.snapshot.safe_load import load_file
from trinity_sync.snapshot.torch_private import get_whole_numel
from trinity_sync.storage.discovery import require_unreplaced
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.restore import require_digest

logger = logging.getLogger(__name__)


def is_on_this_mesh(role_folder: Path, model: Any) -> bool:
    """Return whether the model was saved on its mesh, with its placements; a collective call.

    As many ranks saved the folder as there are now.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    live = get_model_state(model)

    def is_alike() -> bool:
        try:
            saved = open_shard(role_folder, "model", world_size, rank)
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
        if committed:
            broadcast_from_rank_0(role_folder, lambda: require_unreplaced(root, manifest))
        dist.barrier()


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


def _load_model_state(role_folder: Path, saved_by: int, model: Any) -> dict[str, Any]:
    saved = run_on_all_ranks(role_folder, lambda: SavedComponent(role_folder, "model", saved_by))
    live = get_model_state(model)
    unknown = saved.tensors.keys() - live.keys()
    lacking = set() if has_only_adapters(saved.tensors) else live.keys() - saved.tensors.keys()
    other = {
        name
        for name in saved.tensors.keys() & live.keys()
        if saved.tensors[name].size != live[name].shape
    }
    if unknown or lacking or other:
        wrong = {"not in this model": unknown, "not saved": lacking, "of another shape": other}
        found = (f"{', '.join(sorted(names)[:5])} ({why})" for why, names in wrong.items() if names)
        raise ConfigError(
            f"{role_folder} holds another model: {'; '.join(found)}. Start from the model that was "
            "trained there, with the same LoRA settings."
        )
    state = {name: live[name] for name in saved.tensors}
    _read(saved, state)
    return state


def _load_optimizer_state(
    role_folder: Path, saved_by: int, model: Any, optimizer: Any
) -> dict[str, Any]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if places := run_on_all_ranks(role_folder, lambda: find_places(model, params)):
        groups = run_on_all_ranks(
            role_folder,
            lambda: open_shard(role_folder, "optim", saved_by, 0).get("param_groups", []),
        )
        _require_same_groups(role_folder, groups, optimizer)
        read_pieces = partial(load_pieces, role_folder, saved_by, params, places)
        return {"state": run_on_all_ranks(role_folder, read_pieces), "param_groups": groups}
    flat = {
        number: numel
        for number, param in enumerate(params)
        if (numel := get_whole_numel(param)) is not None  # FSDP1
    }
    read = partial(SavedComponent, role_folder, "optim", saved_by, flat_lengths=flat)
    saved = run_on_all_ranks(role_folder, read)
    groups = saved.values.get(("param_groups",), [])
    _require_same_groups(role_folder, groups, optimizer)
    state: dict[Any, dict[str, Any]] = {}
    targets = {}
    for name, (_, number, key) in saved.keys.items():
        kept, targets[name] = _allocate(saved, name, params[number], flat.get(number))
        state.setdefault(number, {})[key] = kept
    for keys, value in saved.values.items():
        if keys[0] == "state":
            state.setdefault(keys[1], {})[keys[2]] = value
    _read(saved, targets)
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


def _allocate(
    saved: SavedComponent, name: str, param: Any, flat_length: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor for this rank's part of an optimizer state, and a view of it for DCP."""
    size, dtype = saved.tensors[name].size, saved.tensors[name].properties.dtype
    if name not in saved.sharded and not (isinstance(param, DTensor) and size == param.shape):
        full = torch.empty(size, dtype=dtype, device="cpu")
        return full, full
    if flat_length is not None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        _, each = compute_chunk(flat_length, world_size, 0)
        if param.numel() != each:
            raise ConfigError(
                f"{saved.folder}: this run's optimizer keeps {param.numel():,} of {flat_length:,} "
                f"elements a rank, not {each:,}: flat state of FSDP1 is resharded only where all "
                "ranks shard. Change that, or take optimizer out of checkpoint.load_contents."
            )
        padded = torch.zeros(each, dtype=dtype, device=param.device)
        mine = padded[: compute_chunk(flat_length, world_size, rank)[1]]
        mesh = DeviceMesh.from_group(dist.group.WORLD, param.device.type)  # type: ignore[arg-type]
        seen = DTensor.from_local(mine, mesh, [Shard(0)], shape=size, stride=(1,))
        return padded, seen
    if size != param.shape:
        raise ConfigError(
            f"{saved.folder}: {name} of the optimizer is {list(size)}, its parameter is "
            f"{list(param.shape)}, so it cannot be resharded; load it with "
            f"{saved.world_size} ranks, or take optimizer out of checkpoint.load_contents"
        )
    like = torch.empty_like(param, dtype=dtype)
    return like, like


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


def _require_readable(saved: SavedComponent, targets: dict[str, Any]) -> None:
    """Compare this rank's part of the files; what they hold twice is read from one of them."""
    require_placed(targets)
    saved.require_equal_replicas(range(dist.get_rank(), saved.world_size, dist.get_world_size()))


def _read(saved: SavedComponent, targets: dict[str, Any]) -> None:
    run_on_all_ranks(saved.folder, partial(_require_readable, saved, targets))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        load(targets, storage_reader=saved, planner=planner)
    except CheckpointException as failed:
        rank, (error, _) = next(iter(failed.failures.items()))
        if isinstance(error, TrinitySyncError):
            raise error from failed
        raise CommitError(
            f"{saved.component} in {saved.folder} cannot be resharded; rank {rank}: {error!r}. "
            f"Load it with {saved.world_size} ranks, or take another step."
        ) from failed
    logger.info("%s: %s bytes of %s read", saved.folder, f"{saved.nbytes:,}", saved.component)
