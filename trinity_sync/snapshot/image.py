"""The exact bytes of a ``.pt`` file, told apart into small headers and tensor data.

``torch.save`` under ``skip_data`` writes everything but the tensor data and seeks over the rest.
Given a sink that notes what is written where, it yields a `Layout`: the written extents, and for
each storage the hole that it belongs into. Filling the holes with one copy per storage gives a file
that ``torch.load``, veRL's checkpoint manager and veRL's merger read like any other; storages that
were shared stay shared, because holes belong to storages, not to tensors.

Holes start at multiples of 4,096 bytes, so that a filled image can be written with direct I/O.
Laying out costs tens of microseconds a tensor; where the structure and the plain values are those
of an earlier layout, that layout is used again.
"""

import gc
import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config as serialization_config

from trinity_sync.errors import ImageError
from trinity_sync.snapshot.copying import Computed, bytes_of, copy_into
from trinity_sync.snapshot.structure import Structure, is_plain, structure_of

ALIGNMENT = 4096

Storages = Sequence[torch.UntypedStorage]


@dataclass(frozen=True, eq=False)
class Layout:
    """A file of ``nbytes`` bytes without its tensor data.

    ``extents`` are the (offset, content) pairs that are known; ``holes`` the (offset, length)
    pairs, in bytes, that the storages of the state fill in their order. The tensors of a device
    mesh, which every DTensor carries, belong to the extents.
    """

    nbytes: int
    extents: list[tuple[int, bytes]]
    holes: list[tuple[int, int]]
    structure: Structure | None

    @cached_property
    def digest(self) -> str:
        """Of all that is known: images of the same digest differ in the data of tensors only."""
        found = hashlib.sha256(repr((self.nbytes, self.holes)).encode())
        for offset, content in self.extents:
            found.update(b"%d %d " % (offset, len(content)))
            found.update(content)
        return found.hexdigest()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A walk makes tens of thousands of objects and no garbage; a collection would double it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_garbage_collection()
def lay_out(state: Any, known: Layout | None = None) -> tuple[Layout, Storages]:
    """Plan the file that ``torch.save(state, ...)`` would write, without copying tensor data.

    Args:
        state: anything ``torch.save`` accepts. Tensors may be of any dtype, device and layout,
            DTensors included; other values are taken here and now, by value.
        known: a layout to use again if it is that of ``state``.

    Returns:
        The layout (``known`` itself where it fits) and the non-empty storages that fill its holes.

    Raises:
        ImageError: this version of torch lays files out in a way that is not understood.
    """
    read = structure_of(state)
    if read and known and read[0] == known.structure:
        return known, read[1]
    sink = _Sink()
    found: dict[str, torch.UntypedStorage] = {}
    recorder = SimpleNamespace(__name__="pickle", Pickler=_recording_pickler(found))
    with _aligned(), torch.serialization.skip_data():
        torch.save(state, sink, pickle_module=recorder)  # type: ignore[arg-type]
    storages = [storage for storage in found.values() if storage.nbytes()]
    if [storage.nbytes() for storage in storages] != [length for _, length in sink.holes]:
        raise ImageError(
            f"torch {torch.__version__} saves storages in an order that trinity_sync does not "
            "know; install a torch version that trinity_sync supports"
        )
    if read is None:
        return Layout(sink.size, sink.extents(), sink.holes, None), storages
    structure, live = read
    extents, holes, own = sink.extents(), [], []
    known_to_walk = {storage.data_ptr() for storage in live}
    for hole, storage in zip(sink.holes, storages, strict=True):
        if storage.data_ptr() in known_to_walk:
            holes.append(hole)
            own.append(storage)
        else:  # a tensor inside of a device mesh, which is part of the structure
            extents.append((hole[0], bytes_of(storage).cpu().numpy().tobytes()))
    same_order = [s.data_ptr() for s in own] == [s.data_ptr() for s in live]
    return Layout(sink.size, extents, holes, structure if same_order else None), own


def fill(
    image: torch.Tensor,
    layout: Layout,
    storages: Storages,
    *,
    headers: bool,
    computed: Computed | None = None,
    threads: int = 0,
) -> None:
    """Copy the state's data, and its headers unless they are there already, into ``image``.

    Args:
        image: ``uint8`` tensor in shared memory, at least ``layout.nbytes`` long.
        layout: as planned by `lay_out`.
        storages: as returned by `lay_out`, on any device.
        headers: False if ``image`` holds this very layout from an earlier call.
        computed, threads: as in `copy_into`.
    """
    if len(image) < layout.nbytes:
        raise ImageError(f"an image of {layout.nbytes:,} bytes does not fit into {len(image):,}")
    if headers:
        memory = image.numpy().data
        for offset, content in layout.extents:
            memory[offset : offset + len(content)] = content
    offsets = (offset for offset, _ in layout.holes)
    parts = list(zip(offsets, storages, strict=True))
    copy_into(image, parts, computed=computed, threads=threads)


class _Sink:
    """A write-only file that keeps what is written and notes what is seeked over."""

    def __init__(self) -> None:
        self.size = 0
        self.holes: list[tuple[int, int]] = []
        self._extents: list[tuple[int, bytearray]] = [(0, bytearray())]

    def write(self, content: memoryview) -> int:
        self._extents[-1][1].extend(content)
        self.size += len(content)
        return len(content)

    def seek(self, distance: int, whence: int) -> int:
        if whence != 1 or distance < 0:
            raise ImageError(f"torch {torch.__version__} seeks in an unknown way while it saves")
        self.holes.append((self.size, distance))
        self.size += distance
        self._extents.append((self.size, bytearray()))
        return self.size

    def flush(self) -> None:
        """Nothing is buffered."""

    def extents(self) -> list[tuple[int, bytes]]:
        return [(offset, bytes(content)) for offset, content in self._extents if content]


_PLAIN = (str, int, bool, float, type(None), tuple, list, dict, OrderedDict, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter, DTensor)
_NAMED = map(type, (torch.Tensor, torch.FloatStorage, torch.float32, torch.manual_seed))
_NO_STORAGE = frozenset((*_PLAIN, *_TENSORS, *_NAMED))
"""Types of most of what is pickled; torch asks each object in turn whether it is a storage."""


def _recording_pickler(found: dict[str, torch.UntypedStorage]) -> type[pickle.Pickler]:
    """A pickler that notes every storage under the key that ``torch.save`` gives to it.

    The two kinds of tensors that trainings have by the thousand are taken apart here, since torch's
    own way to the same result costs as much as all the rest of a layout.
    """
    alike: dict[tuple[Any, ...], Any] = {}
    newer = torch.storage._new_dtypes()  # float8 and the like have another form

    class RecordingPickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            name_storage = cls.persistent_id

            def persistent_id(self: pickle.Pickler, obj: Any) -> Any:
                if type(obj) in _NO_STORAGE:
                    return None
                name = name_storage(self, obj)
                if name is not None:
                    found.setdefault(name[2], getattr(obj, "_untyped_storage", obj))
                return name

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is torch.Tensor and obj.dtype not in newer and is_plain(obj):
                return _reduced(obj)
            if type(obj) is OrderedDict and not obj and not obj.__dict__:
                return OrderedDict, ()
            if type(obj) is not DTensor or obj.__dict__:
                return NotImplemented
            # those of one spec, which is kept while this lives, differ in their shards only
            like = id(obj._spec), obj.requires_grad, obj.dtype, obj.device
            if like not in alike:
                alike[like] = obj.__reduce_ex__(2)
            rebuild, (*same, (attributes, slots)) = alike[like]
            mine = {**slots, "_local_tensor": obj._local_tensor}
            return rebuild, (*same, (attributes, mine))

    return RecordingPickler


def _reduced(tensor: torch.Tensor) -> Any:
    """What ``torch.Tensor.__reduce_ex__`` gives for a plain tensor: the form that ``.pt`` has."""
    storage = torch.TypedStorage(
        wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
    )
    shape, stride = tuple(tensor.shape), tensor.stride()
    hooks: OrderedDict[Any, Any] = OrderedDict()
    place = (storage, tensor.storage_offset(), shape, stride, tensor.requires_grad, hooks)
    return torch._utils._rebuild_tensor_v2, place


_alignment_lock = Lock()


@contextmanager
def _aligned() -> Iterator[None]:
    """Align storages in files; the setting is global to the process, so one layout at a time."""
    with _alignment_lock:
        before = serialization_config.save.storage_alignment
        serialization_config.save.storage_alignment = ALIGNMENT
        try:
            yield
        finally:
            serialization_config.save.storage_alignment = before
