"""Checks before a save that what is saved can be loaded, and before a load that it is there."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.fs.atomic import revalidate_folder
from trinity_sync.layout import (
    FULL_CHECKPOINT_MARK,
    MANIFEST,
    PRIVATE_FOLDER,
    shard_file,
    split_role_path,
)
from trinity_sync.snapshot.dtensor_shards import compute_own_box
from trinity_sync.storage.discovery import is_foreign, require_committed
from trinity_sync.storage.latest_pointer import read_latest_pointer

_SHARD = re.compile(r"(?P<component>\w+)_world_size_(?P<world_size>\d+)_rank_\d+\.pt")


def check_loadable(role_folder: Path, world_size: int, components: Sequence[str]) -> int:
    """Require that a folder is committed and complete; return the number of ranks that saved it.

    That is ``world_size``, of the ranks that load it, if the folder has shards of as many.
    One rank calls it for all. The names of the files are checked, not their sizes or content.
    Only files are checked in jobs that trinity_sync never saved, and in a step without a manifest
    that the latest pointer names: another system saved it into this job.

    Raises:
        CommitError: the step is not committed, or a component or a rank's shard is missing.
        ConfigError: the folder is missing.
    """
    if not role_folder.is_dir():
        raise ConfigError(f"there is no checkpoint folder {role_folder}; check the path to resume")
    names = _list_committed_files(role_folder)
    if names is None:
        names = [path.name for path in role_folder.iterdir()]
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    sizes = {
        name: {int(each["world_size"]) for each in shards if each["component"] == name}
        for name in components
    }
    for component, found in sizes.items():
        if not found:
            raise CommitError(
                f"{role_folder} holds no {component!r}, so it cannot be loaded; resume from a "
                "step that latest_checkpointed_iteration.txt names, or take the component out of "
                "checkpoint.load_contents"
            )
    common = set.intersection(*sizes.values()) if sizes else {world_size}
    if not common:
        raise CommitError(
            f"{role_folder} holds components of different numbers of ranks; load another step"
        )
    saved_by = world_size if world_size in common else max(common)
    missing = {shard_file(name, saved_by, rank) for name in components for rank in range(saved_by)}
    missing.difference_update(names)
    if missing:
        raise CommitError(f"{role_folder} lacks {', '.join(sorted(missing))}; load another step")
    return saved_by


def require_placed(state: Mapping[str, Any]) -> None:
    """Require of each DTensor that its shards can be put together, by whatever reads them.

    Raises:
        ConfigError: the shards of one cannot; the message names it and its placements.
    """
    for name, value in state.items():
        if isinstance(value, DTensor):
            try:
                compute_own_box(value)
            except ValueError as error:
                raise ConfigError(
                    f"{name} {error}. Another mesh, an export and readers of weights could not "
                    "put it together; give each rank one piece of it (Shard, Replicate, or "
                    "fully_shard over parallelize_module)"
                ) from error


def require_whole_parameters(model: Any, optimizer: Any) -> None:
    """Require that no parameter of a VeOmni model is a slice that its DTensor does not tell.

    With VeOmni's expert parallelism the ranks have different experts under one name, in DTensors of
    the same shape and place. It and Muon also have several optimizers with one state dict.

    Raises:
        ConfigError: the model or optimizer is one of these.
    """
    if getattr(model, "_fqn2spec_info", None) or getattr(optimizer, "_is_multi_optimizer", False):
        raise ConfigError(
            "VeOmni's expert parallelism and its optimizer muon cannot be saved by trinity_sync: "
            "another mesh, an export and readers of weights would put experts together wrongly; "
            "set expert_parallel_size=1 and optim.optimizer=adamw, or unset "
            "VERL_USE_EXTERNAL_MODULES"
        )


def _list_committed_files(role_folder: Path) -> list[str] | None:
    """Return the role's committed file names; None if trinity_sync did not save the step."""
    try:
        root, step, role = split_role_path(role_folder)
    except ConfigError:
        return None
    revalidate_folder(role_folder.parent)  # another node may have committed it just now
    if not (role_folder.parent / MANIFEST).exists():
        marked = (role_folder.parent / FULL_CHECKPOINT_MARK).exists()  # its manifest was lost
        is_latest = not marked and read_latest_pointer(root, "checkpoint") == step
        foreign = is_latest and is_foreign(role_folder.parent)
        if foreign or not (root / PRIVATE_FOLDER).exists():
            return None  # the pointer moves to a committed step after its manifest and mark exist
    prefix = f"{role}/"
    files = require_committed(root, step, paths=()).files  # the load itself checks them
    return [r.path.removeprefix(prefix) for r in files if r.path.startswith(prefix)]
