"""Saves of Megatron's sharded state dicts, in folders that its ``dist_checkpointing`` reads.

`DistCheckpointSaver` does what ``dist_checkpointing.save`` does up to the plan of the files: it
extracts the common state, and lets each data-parallel rank save a part of what all of them have.
The files are then staged in shared memory, from where they are committed.

A folder has the files of Megatron's back end ``torch_dist``::

    common.pt         state that is the same on all ranks, and the content metadata
    metadata.json     name and version of the back end
    .metadata         DCP's index
    __0_0.distcp      what rank 0 saves
"""

import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trinity_sync.client.collective import lease_on_rank_0, open_on_all_ranks
from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.client.save_submitter import SaveHandle
from trinity_sync.client.state_saver import DcpFolders
from trinity_sync.errors import ConfigError, ImageError, from_extra
from trinity_sync.integrations.dcp.planned_file import (
    PlannedFile,
    make_planning_group,
    reduce_flags,
)
from trinity_sync.layout import check_name
from trinity_sync.snapshot.image import LaidOut

with from_extra("megatron"):
    from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.exchange_utils import (
        ShardDistribution,
        determine_main_replica_uniform_distribution,
    )
    from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        distribute_main_replicas_with_precomputed_distribution,
    )
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        mcore_to_pyt_state_dict,
    )
    from megatron.core.dist_checkpointing.validation import (
        determine_global_metadata,
        validate_sharding_integrity,
    )

BACKEND, VERSION = "torch_dist", 1
CONTENT_METADATA = "content_metadata"
"""Key of the content metadata in the common state."""


class DistCheckpointSaver:
    """Saves sharded state dicts of one role; each rank has one, and making it is a collective call.

    Args:
        saves: this rank's coordinator, of all ranks of the default process group.
        folders: folder below that of the role, by component (``model``, ``optim``,
            ``extra_state``).
        role: role of the states.
        replicas: process group of the ranks that have the same state, among which it is divided:
            Megatron's data-parallel group with context parallelism.

    Raises:
        ConfigError: the coordinator is not one of all ranks of the default process group.
    """

    def __init__(
        self,
        saves: CheckpointCoordinator,
        folders: Mapping[str, str],
        *,
        role: str = "actor",
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.saves = saves
        self.role = check_name("role", role)
        self._group = make_planning_group(saves)
        self._folders = {
            component: _Folder(saves.rank, self._group, replicas, path)
            for component, path in folders.items()
        }

    def save(
        self,
        step: int,
        collect: Callable[[], Mapping[str, dict[str, Any]]],
        *,
        content_metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        keep: int = 0,
    ) -> SaveHandle:
        """Submit a checkpoint; a collective call.

        The ranks plan a folder together the first time, and when the structure of its state or the
        length of a pickled value has changed on any of them. Otherwise they exchange some numbers.

        Args:
            step, keep: as in `CheckpointCoordinator.save`.
            collect: returns this rank's sharded state dicts by component. Megatron changes them.
            content_metadata: as in ``dist_checkpointing.save``, for each of them.
            files: small files of rank 0 to commit with them, by path below the role's folder.

        Returns:
            As `CheckpointCoordinator.save`.

        Raises:
            ConfigError, SpoolError: as in `CheckpointCoordinator.save`.
            ImageError: as in `CheckpointCoordinator.save`, on all ranks if one cannot collect or
                pickle its part, or if shards are missing.
        """
        what = f"step {step}, role {self.role}"
        try:
            return self.saves.save_dcp(
                step,
                lambda: self._lay_out(what, collect, content_metadata, files or {}),
                role=self.role,
                keep=keep,
            )
        finally:
            for folder in self._folders.values():
                folder.forget()

    def _lay_out(
        self,
        what: str,
        collect: Callable[[], Mapping[str, dict[str, Any]]],
        content_metadata: Mapping[str, Any] | None,
        files: Mapping[str, bytes],
    ) -> DcpFolders:
        """Return this rank's files; all ranks raise the error of any."""
        folders, failure = self._folders, ""
        laid_out: dict[str, LaidOut | None] = dict.fromkeys(folders)
        try:
            states = dict(collect())
            for name, folder in folders.items():
                folder.take(states.pop(name, {}), content_metadata)
                laid_out[name] = folder.lay_out_again()
            if states:
                raise ConfigError(f"{', '.join(states)} has no folder; name it in `folders`")
        except Exception as error:  # any error of Megatron's or of a user's objects
            failure = f"rank {self.saves.rank} cannot collect its part: {error!r}"
        needed = [folder.has_state for folder in folders.values()]
        unplanned = [file is None for file in laid_out.values()]
        failed, *flags = reduce_flags([bool(failure), *needed, *unplanned], self._group)
        if failed:
            raise_first(failure, what, self._group)
        small = dict(files)
        for name, is_needed, is_unplanned in zip(
            folders, flags[: len(folders)], flags[len(folders) :], strict=True
        ):
            if is_needed and is_unplanned:
                laid_out[name] = folders[name].plan(what)
            if is_needed:
                small.update(folders[name].list_small_files())
            else:
                laid_out[name] = None
        return {name: file for name, file in laid_out.items() if file}, small


def raise_first(failure: str, what: str, group: dist.ProcessGroup | None) -> None:
    """Raise the failure of the first rank that has one, on all ranks; a collective call.

    An empty failure is none; without a group there is one process.

    Raises:
        ImageError: a rank has one.
    """
    failures = [failure]
    if group is not None:
        failures *= dist.get_world_size(group)
        dist.all_gather_object(failures, failure, group=group)
    if first := next(filter(None, failures), ""):
        raise ImageError(f"{what}: nothing was submitted, because {first}")


class _Folder:
    """A folder of one sharded state dict."""

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup | None,
        replicas: dist.ProcessGroup | None,
        path: str,
    ) -> None:
        self._path = path
        self._group = group
        self._replicas = replicas
        # as TorchDistSaveShardedStrategy makes it
        make_planner = partial(MCoreSavePlanner, flatten_state_dict=False)
        self._file = PlannedFile(rank, group, make_planner, folder=path)
        self._distribution: ShardDistribution | None = None
        """Which rank saves what several have; None for ranks without replicas."""
        self._planned: list[Any] | None = None
        """Shards of the plan, without data; shards that the distribution lacks would be dropped."""
        self._sharded: dict[str, Any] = {}
        self._common = b""
        self.has_state = False
        """Whether this rank has anything to save."""

    def take(self, state: dict[str, Any], content_metadata: Mapping[str, Any] | None) -> None:
        """Keep the state of the next save, and pickle what all ranks have in common on rank 0."""
        self.has_state = bool(state)
        if state and content_metadata is not None:
            described = content_metadata.items()  # Megatron leaves out process groups as well
            content = {k: v for k, v in described if not isinstance(v, dist.ProcessGroup)}
            state = {**state, CONTENT_METADATA: content}
        # `plan` validates what the ranks save together
        self._sharded, common = save_preprocess(state, validate_access_integrity=False)
        if dist.get_rank() == 0:
            pickled = io.BytesIO()
            torch.save(common, pickled)
            self._common = pickled.getvalue()

    def forget(self) -> None:
        """Drop what refers to the state."""
        self._sharded, self._common = {}, b""

    def lay_out_again(self) -> LaidOut | None:
        """Return this rank's file by the plan of the save before; None if that no longer fits."""
        if self._planned != self._describe():
            return None
        shards = list(nested_values(self._sharded))
        replica_ids = [shard.replica_id for shard in shards]
        try:
            return self._file.lay_out_again(self._divide())
        except Exception:  # which `plan` raises on all ranks
            return None
        finally:
            for shard, replica_id in zip(shards, replica_ids, strict=True):
                shard.replica_id = replica_id

    def plan(self, what: str) -> LaidOut:
        """Divide and plan with all ranks; return this rank's file.

        Raises:
            ImageError: on all ranks: shards are missing or saved twice, or a value cannot be
                pickled.
        """
        self._planned = None  # after an error all ranks plan again
        described, divided, failure = self._describe(), {}, ""
        self._distribution = determine_main_replica_uniform_distribution(
            self._sharded, self._replicas
        )
        try:
            divided = self._divide()
        except Exception as error:  # any error of a user's objects
            failure = f"rank {dist.get_rank()} cannot pickle its part: {error!r}"
        _, of_all_ranks = determine_global_metadata(self._sharded)
        try:
            validate_sharding_integrity(of_all_ranks)  # on rank 0
        except Exception as error:  # Megatron has several for shards that do not fit
            failure = failure or f"the ranks' shards do not make whole tensors: {error!r}"
        raise_first(failure and f"in {self._path} {failure}", what, self._group)
        file = self._file.plan(divided, what)
        self._planned = described
        return file

    def list_small_files(self) -> dict[str, bytes]:
        """Return what rank 0 saves besides its file, by path; empty on other ranks."""
        if dist.get_rank():
            return {}
        config = asdict(CheckpointingConfig(BACKEND, VERSION))
        return {
            f"{self._path}/{COMMON_STATE_FNAME}": self._common,
            f"{self._path}/{CONFIG_FNAME}": json.dumps(config).encode(),
            f"{self._path}/.metadata": self._file.index,
        }

    def _describe(self) -> list[Any]:
        return [shard.without_data() for shard in nested_values(self._sharded)]

    def _divide(self) -> dict[str, Any]:
        """Return what this rank saves, as DCP plans it."""
        distribute_main_replicas_with_precomputed_distribution(
            self._sharded, self._replicas, self._distribution
        )
        shards: dict[str, list[Any]] = defaultdict(list)
        for shard in nested_values(self._sharded):
            if is_main_replica(shard.replica_id):
                key = shard.unique_key if isinstance(shard, ShardedObject) else shard.key
                shards[key].append(shard)
        return mcore_to_pyt_state_dict(shards)


@contextmanager
def open_checked(root: Path, step: int, role: str) -> Iterator[Path]:
    """Make a folder with a role's files of a committed step, which Megatron reads in the block.

    The ranks open the files and compare them with their digests, each a part of them, before any
    rank enters the block. Beginning and end are collective calls.

    Args:
        root: the job's root.
        step: a committed step.
        role: role of the states.

    Raises:
        CommitError: on all ranks: the step is not committed, is replaced meanwhile, is corrupted,
            or has files of another user, which Megatron would unpickle.
    """
    with lease_on_rank_0(root, step) as manifest:
        records = [record for record in manifest.files if record.role == role]
        with open_on_all_ranks(root, manifest, records, unpickled=True) as files:
            yield files.make_folder(
                role, {record.path.removeprefix(f"{role}/"): record.path for record in records}
            )
