"""A component that W ranks saved, as a storage reader of PyTorch Distributed Checkpoint (DCP).

DCP's planner finds the saved chunks that make up the requested tensors. It asks the storage reader
for the location of each chunk, and to read some of them. The locations follow from the file of rank
0 alone: each DTensor in it has the placement of its tensor over the mesh. Files are mapped and only
requested chunks are read, so no memory is needed besides the target tensors.
"""

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from trinity_sync.errors import CommitError, ConfigError
from trinity_sync.layout import shard_file
from trinity_sync.tensors.dtensor_shards import (
    ShardBox,
    compute_chunk,
    compute_own_box,
    compute_shard_boxes,
    have_equal_bits,
    is_outside_mesh,
)
from trinity_sync.tensors.torch_private import get_shard

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


class SavedComponent(StorageReader):
    """A component of a role at one step, in W files; ``dcp.load`` reads it.

    ``folder`` is that of the role in the step, ``component`` is ``model`` or ``optim``. Tensors are
    named by their keys, joined by dots (``state.0.exp_avg``). Files are unpickled with
    ``weights_only=True``.

    ``flat_lengths`` are the numbers of elements of FSDP1's flat parameters, by their number in the
    optimizer. The state of each was saved as plain tensors of ``ceil(length / W)`` elements,
    padded.

    Raises:
        CommitError: the file of rank 0 is missing, or ``weights_only`` cannot read it.
        ConfigError: it has tensors with a placement that cannot be resharded.
    """

    def __init__(
        self,
        folder: Path,
        component: str,
        world_size: int,
        *,
        flat_lengths: Mapping[int, int] | None = None,
    ) -> None:
        self.folder, self.component, self.world_size = folder, component, world_size
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.keys: dict[str, Keys] = {}
        """Path of each tensor in the state."""
        self.values: dict[Keys, Any] = {}
        """All values that are not tensors, as rank 0 saved them."""
        self.sharded: set[str] = set()
        """Names of the sharded tensors; each rank saved the others completely."""
        self.nbytes = 0
        """Bytes of tensors read so far."""
        self._locations: dict[MetadataIndex, tuple[int, tuple[int, ...]]] = {}
        for keys, leaf in iter_leaves(self.open_shard(0)):
            if isinstance(leaf, torch.Tensor):
                self._add_tensor(keys, leaf, flat_lengths or {})
            else:
                self.values[keys] = leaf

    def open_shard(self, rank: int) -> Mapping[Any, Any]:
        """As `saved_component.open_shard`."""
        return open_shard(self.folder, self.component, self.world_size, rank)

    def get_chunk(self, state: Mapping[Any, Any], index: MetadataIndex) -> torch.Tensor:
        """Return a chunk of an opened file, that of the rank that `find_rank` returns.

        Raises:
            CommitError: the file has another shape in its place.
        """
        rank, sizes = self._locations[index]
        leaf = get_leaf(state, self.keys[index.fqn])
        local = get_shard(leaf)
        fits = isinstance(local, torch.Tensor) and local.ndim == len(sizes)
        if not fits or any(have < want for have, want in zip(local.shape, sizes, strict=True)):
            raise CommitError(
                f"{self.folder} is inconsistent: rank {rank} should have saved {list(sizes)} of "
                f"{self.component} {index.fqn}, and did not; choose another step"
            )
        return narrow(local, [0] * local.ndim, sizes)

    def find_rank(self, index: MetadataIndex) -> int:
        """Return the rank whose file contains a chunk."""
        return self._locations[index][0]

    def require_equal_replicas(self, ranks: Iterable[int] | None = None) -> None:
        """Require that tensors of which one rank's are read are equal in the files of other ranks.

        These are tensors without a placement, and those on one of several equal submeshes, such as
        a norm under tensor parallelism. Also, all files must contain the same tensors. ``ranks``
        are by default all.

        Raises:
            CommitError: they differ, so they are parts without a known placement.
        """
        open_once = cache(self.open_shard)
        for rank in range(1, self.world_size) if ranks is None else ranks:
            leaves = dict(iter_leaves(open_once(rank)))
            names = {
                keys: ".".join(map(str, keys))
                for keys, leaf in leaves.items()
                if isinstance(leaf, torch.Tensor)
            }
            differing = {*names.values()} ^ self.tensors.keys()
            for keys, name in names.items():
                if name not in differing and not self._is_copy(open_once, name, leaves[keys], rank):
                    differing.add(name)
            if differing:
                raise CommitError(
                    f"{self.component} {min(differing)} in {self.folder} differs between rank 0 "
                    f"and rank {rank}, and has no placement that says how; load it with "
                    f"{self.world_size} ranks on the mesh that saved it, or leave out "
                    f"{self.component}"
                )

    def _is_copy(
        self,
        open_once: Callable[[int], Mapping[Any, Any]],
        name: str,
        leaf: torch.Tensor,
        rank: int,
    ) -> bool:
        """Return False for a tensor that should be a copy and is not; True if it is a part."""
        first = get_leaf(open_once(0), self.keys[name])
        if name not in self.sharded:
            return have_equal_bits(first, leaf)
        if not isinstance(first, DTensor) or not is_outside_mesh(first, 0, rank):
            return True
        if not isinstance(leaf, DTensor) or leaf.shape != first.shape:
            return False
        box = compute_own_box(leaf)
        if box is None or 0 in box.sizes:
            return True
        index = MetadataIndex(name, box.offsets)
        if self._locations.get(index, (0, ()))[1] != box.sizes:
            return False
        saved = self.get_chunk(open_once(self.find_rank(index)), index)
        return have_equal_bits(saved, get_shard(leaf))

    # ---------------------------------------------------------------- DCP's StorageReader

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return all tensors and their saved chunks; DCP's arguments are ignored."""
        return Metadata(dict(self.tensors))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the requested chunks into their target tensors, one file after the other."""
        wanted = defaultdict(list)
        for item in plan.items:
            wanted[self._locations[item.storage_index][0]].append(item)
        for rank, items in sorted(wanted.items()):
            state = self.open_shard(rank)
            parts = [(self.get_chunk(state, item.storage_index), item) for item in items]
            for part, item in sorted(parts, key=lambda pair: pair[0].data_ptr()):
                saved = narrow(part, item.storage_offsets, item.lengths)
                target = planner.resolve_tensor(item).detach()
                target.copy_(saved)
                planner.commit_tensor(item, target)
                self.nbytes += saved.numel() * saved.element_size()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a reader is for one component."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Do nothing: all metadata is known from the start."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: DCP must not choose this reader by itself."""
        return False

    # ---------------------------------------------------------------- details

    def _add_tensor(self, keys: Keys, leaf: torch.Tensor, flat_lengths: Mapping[int, int]) -> None:
        name, size = ".".join(map(str, keys)), leaf.shape
        if isinstance(leaf, DTensor):
            self.sharded.add(name)
            parts = self._compute_parts(name, leaf)
        elif keys[0] == "state" and leaf.ndim == 1 and keys[1] in flat_lengths:
            self.sharded.add(name)
            size = torch.Size([flat_lengths[keys[1]]])
            parts = self._compute_flat_parts(name, leaf, size[0])
        else:
            parts = {0: ShardBox((0,) * leaf.ndim, tuple(leaf.shape))}
        chunks = []
        for rank, (offsets, sizes) in parts.items():
            if 0 not in sizes:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self._locations[MetadataIndex(name, offsets)] = rank, sizes
        self.keys[name] = keys
        self.tensors[name] = TensorStorageMetadata(TensorProperties(leaf.dtype), size, chunks)

    def _compute_parts(self, name: str, leaf: DTensor) -> dict[int, ShardBox]:
        """Return the parts of a tensor by the rank that saved them; of replicas, one."""
        try:
            return compute_shard_boxes(leaf, rank=0)
        except ValueError as error:
            raise ConfigError(
                f"{self.component} {name} in {self.folder} {error}; load it with "
                f"{self.world_size} ranks"
            ) from error

    def _compute_flat_parts(
        self, name: str, leaf: torch.Tensor, length: int
    ) -> dict[int, ShardBox]:
        """Return the parts of a tensor of FSDP1's flat optimizer state."""
        each = -(-length // self.world_size)
        if leaf.numel() != each:
            raise ConfigError(
                f"{self.component} {name} in {self.folder} has {leaf.numel():,} elements a rank, "
                f"where {length:,} over {self.world_size} ranks make {each:,}: flat state of FSDP1 "
                "is resharded only where all ranks shard, and use_orig_params is off. Load it with "
                f"{self.world_size} ranks, or take optimizer out of checkpoint.load_contents."
            )
        chunks = (compute_chunk(length, self.world_size, rank) for rank in range(self.world_size))
        return {rank: ShardBox((start,), (size,)) for rank, (start, size) in enumerate(chunks)}
