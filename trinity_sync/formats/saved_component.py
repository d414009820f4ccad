"""One component that W ranks saved, as PyTorch's Distributed Checkpoint (DCP) sees it.

DCP's planner works out which parts of the saved tensors make up the parts that somebody wants. It
asks a storage for two things: where which part lies, and to read some of them. Where they lie
follows from the first rank's file alone: each DTensor in it says how its tensor is laid out over
the mesh. Files are mapped and only what is asked for is read, so no memory is needed beside what
it is read into.
"""

import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from trinity_sync.snapshot.dtensor_shards import ShardBox, compute_chunk, compute_shard_boxes
from trinity_sync.snapshot.torch_private import get_shard

Keys = tuple[Any, ...]
"""What leads to a leaf of a state: ``("state", 0, "exp_avg")``."""


class SavedComponent(StorageReader):
    """A component of a role at one step, in W files; ``dcp.load`` reads it.

    Tensors are named by their keys, joined by dots (``state.0.exp_avg``). Files are unpickled with
    ``weights_only=True``.

    Args:
        folder: ``<root>/global_step_<N>/<role>``.
        component: ``model`` or ``optim``.
        world_size: ranks that saved it.
        flat_lengths: lengths of FSDP1's flat parameters, by their number in the optimizer. The
            state of each was saved in plain pieces of ``ceil(length / W)`` elements, padded.

    Raises:
        CommitError: the first file is missing, or not one that ``weights_only`` reads.
        ConfigError: it holds tensors that are laid out in a way that cannot be resharded.
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
        """Where each tensor is in the state."""
        self.values: dict[Keys, Any] = {}
        """All that is not a tensor, as the first rank saved it."""
        self.sharded: set[str] = set()
        """Names of the tensors of which each rank saved a part; it saved the others whole."""
        self.nbytes = 0
        """Bytes of tensors read so far."""
        self._homes: dict[MetadataIndex, tuple[int, tuple[int, ...]]] = {}
        for keys, leaf in _leaves(self.open(0)):
            if isinstance(leaf, torch.Tensor):
                self._add(keys, leaf, flat_lengths or {})
            else:
                self.values[keys] = leaf

    def open(self, rank: int) -> Mapping[Any, Any]:
        """What a rank saved, its tensors mapped from the file and not read yet.

        Raises:
            CommitError: the file is missing, or not one that ``weights_only`` reads.
            ConfigError: it does not hold a dict.
        """
        path = self.folder / shard_file(self.component, self.world_size, rank)
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CommitError(
                f"{path} cannot be read with weights_only, so it cannot be resharded: {error}\n"
                f"Load it with {self.world_size} ranks, or take another step."
            ) from error
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"{path} holds a {type(state).__name__}, and only dicts can be resharded; load it "
                f"with {self.world_size} ranks"
            )
        return state

    def part(self, state: Mapping[Any, Any], index: MetadataIndex) -> torch.Tensor:
        """The part that lies in an opened file.

        Raises:
            CommitError: there is another one in its place.
        """
        rank, sizes = self._homes[index]
        leaf = _at(state, self.keys[index.fqn])
        local = get_shard(leaf)
        fits = isinstance(local, torch.Tensor) and local.ndim == len(sizes)
        if not fits or any(have < want for have, want in zip(local.shape, sizes, strict=True)):
            raise CommitError(
                f"{self.folder} is inconsistent: rank {rank} should have saved {list(sizes)} of "
                f"{self.component} {index.fqn}, and did not; take another step"
            )
        return _narrowed(local, [0] * local.ndim, sizes)

    def rank_of(self, index: MetadataIndex) -> int:
        """The rank whose file holds a part."""
        return self._homes[index][0]

    def require_same_whole(self) -> None:
        """See that what each rank saved whole is the same everywhere: only one rank's is used.

        Raises:
            CommitError: it is not; the ranks hold parts that nothing says the place of.
        """
        whole = [name for name in self.tensors if name not in self.sharded]
        first = self.open(0)
        for rank in range(1, self.world_size if whole else 1):
            state = self.open(rank)
            for name in whole:
                a, b = _at(first, self.keys[name]), _at(state, self.keys[name])
                if not isinstance(b, torch.Tensor) or not _same_bits(a, b):
                    raise CommitError(
                        f"{self.component} {name} in {self.folder} differs between rank 0 and rank "
                        f"{rank}, and is no DTensor that says how it is laid out; load it with "
                        f"{self.world_size} ranks"
                    )

    # ---------------------------------------------------------------- what DCP asks

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """All tensors, and the parts that they were saved in."""
        return Metadata(dict(self.tensors))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan wants into the tensors that it is for, one file after the other."""
        wanted = defaultdict(list)
        for item in plan.items:
            wanted[self._homes[item.storage_index][0]].append(item)
        for rank, items in sorted(wanted.items()):
            state = self.open(rank)
            parts = [(self.part(state, item.storage_index), item) for item in items]
            for part, item in sorted(parts, key=lambda pair: pair[0].data_ptr()):
                saved = _narrowed(part, item.storage_offsets, item.lengths)
                target = planner.resolve_tensor(item).detach()
                target.copy_(saved)
                planner.commit_tensor(item, target)
                self.nbytes += saved.numel() * saved.element_size()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: one of these is for one component."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Nothing: all is known from the start."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether DCP may choose this reader by itself: never."""
        return False

    # ---------------------------------------------------------------- details

    def _add(self, keys: Keys, leaf: torch.Tensor, flat_lengths: Mapping[int, int]) -> None:
        name, size = ".".join(map(str, keys)), leaf.shape
        if isinstance(leaf, DTensor):
            self.sharded.add(name)
            parts = self._parts(name, leaf)
        elif keys[0] == "state" and leaf.ndim == 1 and keys[1] in flat_lengths:
            self.sharded.add(name)
            size = torch.Size([flat_lengths[keys[1]]])
            parts = self._flat_parts(name, leaf, size[0])
        else:
            parts = {0: ShardBox((0,) * leaf.ndim, tuple(leaf.shape))}
        chunks = []
        for rank, (offsets, sizes) in parts.items():
            if 0 not in sizes:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self._homes[MetadataIndex(name, offsets)] = rank, sizes
        self.keys[name] = keys
        self.tensors[name] = TensorStorageMetadata(TensorProperties(leaf.dtype), size, chunks)

    def _parts(self, name: str, leaf: DTensor) -> dict[int, ShardBox]:
        """The parts of a tensor by the rank that saved them; of replicas, one."""
        try:
            return dict(compute_shard_boxes(leaf))
        except ValueError as error:
            raise ConfigError(
                f"{self.component} {name} in {self.folder} {error}; load it with "
                f"{self.world_size} ranks"
            ) from error

    def _flat_parts(self, name: str, leaf: torch.Tensor, length: int) -> dict[int, ShardBox]:
        """As `_parts`, of FSDP1's flat optimizer state."""
        each = -(-length // self.world_size)
        if leaf.numel() != each:
            raise ConfigError(
                f"{self.component} {name} in {self.folder} has {leaf.numel():,} elements a rank, "
                f"where {length:,} over {self.world_size} ranks make {each:,}: flat state of FSDP1 "
                "is resharded only where use_orig_params is off and all ranks shard. Load it with "
                f"{self.world_size} ranks, or take optimizer out of checkpoint.load_contents."
            )
        chunks = (compute_chunk(length, self.world_size, rank) for rank in range(self.world_size))
        return {rank: ShardBox((start,), (size,)) for rank, (start, size) in enumerate(chunks)}


def _leaves(state: Mapping[Any, Any], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _at(state: Any, keys: Keys) -> Any:
    for key in keys:
        state = state.get(key) if isinstance(state, Mapping) else None
    return state


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit by bit, NaN and all."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (a, b)))


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
