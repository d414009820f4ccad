"""Plan a rank's file of a DCP folder with all ranks, and lay it out by the same plan from then on.

The ranks plan together the first time, and when the structure of the state or the length of a
pickled value has changed on any of them.

The structure of a state is what DCP's default planner reads of it. DCP computes the offsets of each
DTensor in each plan. For 323 items, of which 225 are DTensors, a plan took 12 ms and its comparison
with the last one 1 ms, and this 0.6 ms (on one core).

The file is that of DCP's ``FileSystemWriter``, laid out without tensor data. Each tensor of a
rank's plan is an archive of ``torch.save``, each other value the bytes that the planner makes of
it. DCP finds them by offset and length, so archives start at multiples of 64 bytes, where a mapped
file is aligned for any dtype. Other values come last: their lengths may change from save to save,
and the offsets of tensors stay. The headers of an archive depend on dtype, shape and strides only,
and are kept from file to file.
"""

import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from trinity_sync.client.coordinator import CheckpointCoordinator
from trinity_sync.errors import ConfigError, ImageError
from trinity_sync.snapshot.image import LaidOut, Layout, Storages, lay_out, require_data
from trinity_sync.tensors.archive import ITEM_ALIGNMENT
from trinity_sync.tensors.torch_private import get_spec_and_shard
from trinity_sync.tensors.torch_private_dcp import disable_plan_cache, make_dcp_place

_Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class NoStorage(StorageWriter):
    """A storage of DCP that writes nothing."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to reset."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: DCP cannot choose it by a checkpoint id."""
        return False


class PlannedFile(NoStorage):
    """A rank's file of a folder, laid out again for each save.

    It is the storage for which DCP's ``save`` plans, and which lays out the file and writes
    nothing. The ranks plan in ``group``; None for one process. The folder is below that of the
    role; empty for the role's.
    """

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup | None,
        make_planner: Callable[[], SavePlanner],
        *,
        folder: str = "",
    ) -> None:
        self._rank = rank
        self._group = group
        self._planner = make_planner
        self._name = f"__{rank}_0.distcp"
        self._path = f"{folder}/{self._name}" if folder else self._name
        self._archives: dict[_Form, Layout] = {}
        self._is_planned = False
        self._local_plan = self._plan = SavePlan([])
        """This rank's plan, before and after the ranks have agreed who writes replicas."""
        self._structure: list[Any] | None = None
        """What this rank's plan follows from; see `describe_structure`."""
        self._results: list[WriteResult] = []
        self._file: LaidOut | None = None
        self.metadata = Metadata({})
        """Index of the newest save; complete on rank 0 only."""
        self.index = b""
        """Content of the folder's ``.metadata``, on rank 0."""

    def plan(self, state: dict[str, Any], what: str) -> LaidOut:
        """Plan a save with all ranks, and lay out this rank's file; a collective call.

        Raises:
            ImageError: on all ranks: a rank cannot plan its part, or pickle a value.
        """
        self._is_planned = False  # after an error all ranks plan again
        planner = self._make_planner()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                save(
                    state,
                    storage_writer=self,
                    planner=planner,
                    process_group=self._group,
                    no_dist=self._group is None,
                )
            file = self._file
        except CheckpointException as error:
            rank, (first, _) = next(iter(error.failures.items()))
            raise ImageError(
                f"{what}: nothing was submitted, because rank {rank} cannot plan its part: {first}"
            ) from first
        finally:
            self._file = None  # it refers to the tensors of the state
        assert file, "DCP has written nothing"
        self._structure = describe_structure(planner)
        self._is_planned = True
        return file

    def lay_out_again(self, state: dict[str, Any]) -> LaidOut | None:
        """Return this rank's file by the plan of the save before; None if that no longer fits."""
        if not self._is_planned:
            return None
        try:
            planner = self._make_planner()
            planner.set_up_planner(state, self.storage_meta(), self._rank == 0)
            structure = describe_structure(planner)
            if structure is None or structure != self._structure:
                if planner.create_local_plan() != self._local_plan:
                    return None
                self._structure = structure
            file, results = self._lay_out(self._plan.items, planner)
        except Exception:  # which planning again raises on all ranks
            return None
        return file if results == self._results else None

    def _make_planner(self) -> SavePlanner:
        """Return a planner without DCP's cache of plans, which all savers of a process share."""
        planner = self._planner()
        disable_plan_cache(planner)
        return planner

    def _lay_out(
        self, items: Sequence[WriteItem], planner: SavePlanner
    ) -> tuple[LaidOut, list[WriteResult]]:
        """Return the file of the items of a plan, and where each of them is in it.

        Raises:
            ImageError: a value cannot be pickled.
        """
        extents: list[tuple[int, bytes]] = []
        holes: list[tuple[int, int]] = []
        storages: list[torch.UntypedStorage] = []
        results: list[WriteResult] = []
        start = 0
        for item in sorted(items, key=lambda item: item.type == WriteItemType.BYTE_IO):
            try:
                archive, own = self._lay_out_value(planner.resolve_data(item))
            except Exception as error:  # any error of a user's objects
                raise ImageError(
                    f"{item.index.fqn} cannot be pickled, {type(error).__name__}: {error}. Leave "
                    "it out of the state, or save its state_dict instead."
                ) from error
            extents += [(start + at, content) for at, content in archive.extents]
            holes += [(start + at, length) for at, length in archive.holes]
            storages += own
            place = make_dcp_place(self._name, start, archive.nbytes)
            results.append(WriteResult(item.index, archive.nbytes, place))
            end = start + archive.nbytes
            start = -(-end // ITEM_ALIGNMENT) * ITEM_ALIGNMENT
            extents.append((end, bytes(start - end)))  # a slot has old bytes there
        return LaidOut(self._path, Layout(start, extents, holes), storages), results

    def _lay_out_value(self, value: torch.Tensor | io.BytesIO) -> tuple[Layout, Storages]:
        """Return the archive of a tensor as one on the CPU, or what the planner made of a value."""
        if isinstance(value, io.BytesIO):
            content = value.getvalue()
            return Layout(len(content), [(0, content)], []), []
        require_data(value)
        if value.layout is not torch.strided:  # DCP would load zeros without an error
            raise ValueError(f"DCP does not load tensors of {value.layout}; save its dense parts")
        tensor = value.detach()
        plain = type(tensor) is torch.Tensor
        if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return lay_out(tensor.to("cpu", copy=True), alignment=ITEM_ALIGNMENT)
        if _count_spanned(tensor) != tensor.numel():  # a view with gaps or overlaps
            tensor = tensor.contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes:  # a view of a part
            first = tensor.storage_offset() * tensor.element_size()
            storage = storage[first : first + tensor.nbytes]
        form = (tensor.dtype, tensor.shape, tensor.stride())
        if form not in self._archives:
            like = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            self._archives[form] = lay_out(like, alignment=ITEM_ALIGNMENT)[0]
        return self._archives[form], [storage] if tensor.nbytes else []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep this rank's plan."""
        self._local_plan = plan
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Lay out this rank's file."""
        self._plan = plan
        self._file, self._results = self._lay_out(plan.items, planner)
        return make_done(self._results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the index, as ``FileSystemWriter`` does."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {item.index: item.storage_data for of in results for item in of}
        metadata.storage_meta = StorageMeta()  # the place is that of the index
        self.metadata, self.index = metadata, pickle.dumps(metadata)


def reduce_flags(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return for each flag whether it is set on any rank of a group; a collective call.

    All ranks pass equally many flags. Without a group there is one process.
    """
    if group is None:
        return list(flags)
    found = torch.tensor(flags, dtype=torch.int32, device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found]


def make_planning_group(saves: CheckpointCoordinator) -> dist.ProcessGroup | None:
    """Return a process group of all ranks, in which they plan; None for one process.

    A collective call. Others may use the default group at the same time.

    Raises:
        ConfigError: the coordinator is not one of all ranks of the default process group.
    """
    group = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    if (saves.rank, saves.world_size) != (rank, world_size):
        raise ConfigError(
            f"the coordinator of {saves.root} is that of rank {saves.rank} of "
            f"{saves.world_size}, and this is rank {rank} of {world_size} of the process "
            "group; create it by of_process_group"
        )
    return dist.new_group(backend="gloo") if group else None


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def describe_structure(planner: SavePlanner) -> list[Any] | None:
    """Return what decides this rank's plan of the state that a planner was set up for.

    The list is compared with that of another state on the same rank. None if another planner or a
    tensor of another class decides. Values besides tensors have no part in it but their names: DCP
    pickles them when it writes.
    """
    made_by = getattr(type(planner), "create_local_plan", None)
    if made_by is not DefaultSavePlanner.create_local_plan:
        return None
    assert isinstance(planner, DefaultSavePlanner)
    found: list[Any] = [planner.mappings]
    for name, value in planner.state_dict.items():
        spec, tensor = get_spec_and_shard(value) if type(value) is DTensor else (None, value)
        if type(tensor) in _PLAIN:
            form = tensor.shape, tensor.dtype, tensor.layout, tensor.is_pinned()
            found.append((name, spec, value.requires_grad, tensor.requires_grad, *form))
        elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            return None
        else:
            found.append(name)
    return found


def make_done(results: list[WriteResult]) -> Future[list[WriteResult]]:
    """Return a future that is done, as DCP takes results."""
    done: Future[list[WriteResult]] = Future()
    done.set_result(results)
    return done


def _count_spanned(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first of a tensor to its last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
