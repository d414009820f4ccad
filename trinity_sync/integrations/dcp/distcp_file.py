"""Lay out the file that DCP's ``FileSystemWriter`` writes for a rank, without tensor data.

Each tensor of a rank's plan is an archive of ``torch.save``, each other value the bytes that the
planner makes of it. DCP finds them by offset and length, so archives start at multiples of 64
bytes, where a mapped file is aligned for any dtype. Other values come last: their lengths may
change from save to save, and the offsets of tensors stay. The headers of an archive depend on
dtype, shape and strides only, and are kept from file to file.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trinity_sync.errors import ImageError
from trinity_sync.snapshot.image import LaidOut, Layout, Storages, lay_out
from trinity_sync.snapshot.recording_pickler import require_data
from trinity_sync.snapshot.torch_private import make_dcp_place

ALIGNMENT = 64

_Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class DistcpLayouter:
    """Lays out the files of a rank; an empty folder is the role's."""

    def __init__(self, name: str, folder: str = "") -> None:
        self._name = name
        self._path = f"{folder}/{name}" if folder else name
        self._archives: dict[_Form, Layout] = {}

    def lay_out(
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
                archive, own = self._lay_out(planner.resolve_data(item))
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
            start = -(-end // ALIGNMENT) * ALIGNMENT
            extents.append((end, bytes(start - end)))  # a slot has old bytes there
        return LaidOut(self._path, Layout(start, extents, holes), storages), results

    def _lay_out(self, value: torch.Tensor | io.BytesIO) -> tuple[Layout, Storages]:
        """Return the archive of a tensor as one on the CPU, or what the planner made of a value."""
        if isinstance(value, io.BytesIO):
            content = value.getvalue()
            return Layout(len(content), [(0, content)], []), []
        require_data(value)
        tensor = value.detach()
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return lay_out(tensor.to("cpu", copy=True), alignment=ALIGNMENT)
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
            self._archives[form] = lay_out(like, alignment=ALIGNMENT)[0]
        return self._archives[form], [storage] if tensor.nbytes else []


class LayoutStorage(StorageWriter):
    """A storage for which DCP's ``save`` plans, and which lays out a file and writes nothing."""

    def __init__(self, layouter: DistcpLayouter) -> None:
        self._layouter = layouter
        self.local_plan = self.plan = SavePlan([])
        """This rank's plan, before and after the ranks have agreed who writes replicas."""
        self.structure: list[Any] | None = None
        """What this rank's plan follows from; see `describe_structure`."""
        self._file: LaidOut | None = None
        self.results: list[WriteResult] = []
        self.metadata = Metadata({})
        self.index = b""
        """Content of ``.metadata``, on the coordinator."""

    def take_file(self) -> LaidOut:
        """Return the file, and drop it: it refers to the tensors of the state."""
        file, self._file = self._file, None
        assert file, "DCP has written nothing"
        return file

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is nothing to reset."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep this rank's plan."""
        self.local_plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Lay out this rank's file."""
        self.plan = plan
        self._file, self.results = self._layouter.lay_out(plan.items, planner)
        return make_done(self.results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the index, as ``FileSystemWriter`` does."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {item.index: item.storage_data for of in results for item in of}
        metadata.storage_meta = StorageMeta()  # the place is that of the index
        self.metadata, self.index = metadata, pickle.dumps(metadata)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: DCP cannot choose it by a checkpoint id."""
        return False


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
