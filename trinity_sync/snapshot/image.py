"""Lay out the exact bytes of a ``.pt`` file: small headers, and holes for tensor data.

``torch.save`` under ``skip_data`` writes everything but the tensor data and seeks over it. A sink
that records both yields a `Layout`: the written extents, and a hole for each storage. One copy per
storage fills the holes, and gives a file that ``torch.load``, veRL's checkpoint manager and veRL's
merger read. ``skip_data`` begins when the pickle is complete: under it torch refuses to pickle
quantized and nested tensors, and an object that pickles itself with ``torch.save`` would lose its
data.

Holes start at multiples of 4,096 bytes, so a filled image can be written with direct I/O. A layout
is reused for a state of equal structure and plain values (`_walk_state`); if only floats differ, as
with a learning rate schedule, the floats and their checksum are replaced in copies of the first and
last extent. A state with a value that cannot be compared cheaply and reliably (a large NumPy array,
an object of a user's class, a tensor with attributes) is laid out again at each save.

The pickler records the storages, and the offsets of floats. Besides tensors, floats change from
save to save, such as a scheduled learning rate. In a pickle a float is an opcode and eight bytes,
whatever its value, and nothing refers to it, so states of equal structure have their floats at
equal offsets. Picklers do not report offsets. So each float is written as a persistent reference to
a random marker, which is replaced afterwards.
"""

import gc
import hashlib
import io
import pickle
import secrets
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import IO, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config as serialization_config

from trinity_sync.errors import ImageError
from trinity_sync.tensors.memcpy import copy_into, exceeds_storage, view_bytes
from trinity_sync.tensors.torch_private import (
    HASHED,
    disable_subclasses,
    get_new_dtypes,
    get_spec_and_shard,
    get_storage_id,
    get_untyped_storage,
    reduce_plain_tensor,
    reduce_without_hash,
    replace_shard,
)

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, DTensor))
_BUILT_IN = (str, int, bool, type(None), tuple, list, dict, OrderedDict, torch.Size)
_NAMED = map(type, (torch.Tensor, torch.FloatStorage, torch.float32, torch.manual_seed))
_NO_STORAGE = _TENSORS.union(_BUILT_IN, _NAMED)
"""Types of most pickled objects; torch checks for each object whether it is a storage."""

_MARK = struct.unpack(">d", b"\x3f" + secrets.token_bytes(7))[0]
_MARKED = pickle.BINFLOAT + struct.pack(">d", _MARK) + pickle.BINPERSID


class RecordingPickle:
    """A pickle module for one ``torch.save``, and what it records.

    It reduces plain tensors and DTensors itself, since torch's own reduction costs as much as the
    rest of a layout. ``pickled`` is called when the pickle is complete, before ``torch.save``
    writes the storages.
    """

    __name__ = "pickle"

    def __init__(self, pickled: Callable[[], object]) -> None:
        self.pickled = pickled
        self.storages: dict[str, torch.UntypedStorage] = {}
        """Storages by the key that torch gives them, in order."""
        self.content = b""
        self.floats = b""
        """Floats of the pickle in order, from `_pack_floats`."""
        self.places: list[int] = []
        """Offset of each float in the pickle, in bytes."""
        self.Pickler = _pickler(self)

    def replace_markers(self, marked: bytes, floats: Sequence[float]) -> bytes:
        """Return a pickle with the floats in the place of their markers, and record their offsets.

        Raises:
            ImageError: the state has the bytes of a marker by chance.
        """
        first, *rest = marked.split(_MARKED)
        if len(rest) != len(floats):
            raise ImageError("the state happens to hold bytes that mark floats; save it again")
        self.floats = _pack_floats(floats)
        content = bytearray(first)
        for number, after in enumerate(rest):
            self.places.append(len(content) + 1)
            content += pickle.BINFLOAT + self.floats[8 * number : 8 * number + 8] + after
        self.content = bytes(content)
        return self.content

    def clear(self) -> None:
        """Drop references to the state: the pickler class lives until a garbage collection."""
        vars(self).clear()


def _pickler(record: RecordingPickle) -> type[pickle.Pickler]:
    newer = get_new_dtypes()  # float8 and the like have another form

    class RecordingPickler(pickle.Pickler):
        def __init__(self, file: IO[bytes], protocol: int) -> None:
            self._file, self._marked = file, io.BytesIO()
            self._floats: list[float] = []
            self._alike: dict[tuple[Any, ...], Any] = {}
            super().__init__(self._marked, protocol)

        def __init_subclass__(cls) -> None:
            name_storage = cls.persistent_id

            def persistent_id(self: RecordingPickler, obj: Any) -> Any:
                kind = type(obj)
                if kind in _NO_STORAGE:
                    return None
                if kind is float:
                    self._floats.append(obj)
                    return _MARK
                name = name_storage(self, obj)
                if name is not None:
                    record.storages.setdefault(name[2], get_untyped_storage(obj))
                return name

            cls.persistent_id = persistent_id  # type: ignore[assignment,method-assign]

        def dump(self, obj: Any) -> None:
            super().dump(obj)
            self._file.write(record.replace_markers(self._marked.getvalue(), self._floats))
            record.pickled()

        def reducer_override(self, obj: Any) -> Any:
            require_data(obj)
            if type(obj) is torch.Tensor and obj.dtype not in newer and _is_plain_tensor(obj):
                return reduce_plain_tensor(obj)
            if type(obj) is OrderedDict and not obj and not obj.__dict__:
                return OrderedDict, ()
            if type(obj) in HASHED:
                return reduce_without_hash(obj)
            if type(obj) is not DTensor or obj.__dict__:
                return NotImplemented
            # DTensors of one spec, which lives as long as this pickler, differ in shards only
            spec, shard = get_spec_and_shard(obj)
            like = id(spec), obj.requires_grad, obj.dtype, obj.device
            if like not in self._alike:
                self._alike[like] = obj.__reduce_ex__(2)
            rebuild, (*same, (attributes, slots)) = self._alike[like]
            return rebuild, (*same, (attributes, replace_shard(slots, shard)))

    return RecordingPickler


def require_data(value: Any) -> None:
    """Require that a tensor has data, without which `torch.save` writes it as well.

    Raises:
        ValueError: it is on the device ``meta``, or its storage was freed.
    """
    if not isinstance(value, torch.Tensor):
        return
    if value.is_meta:
        raise ValueError(
            "a tensor on the device meta has no data; load it onto a device before the save (what "
            "Accelerate has offloaded: accelerator.get_state_dict(model))"
        )
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        return  # has no storage, or parts that are pickled by themselves
    with disable_subclasses():
        if type(value) is not DTensor and exceeds_storage(value):
            raise ValueError(
                "a tensor is larger than its storage, which was freed or resized; save it while it "
                "has its data"
            )


def find_unpicklable(state: Any) -> str:
    """Return the path of the innermost value in a nested state that cannot be pickled.

    Empty if that is ``state`` itself, or if no single item fails.
    """
    path = ""
    for _ in range(_DEPTH):  # each level pickles all below it, and a state may contain itself
        for key, item in list_items(state):
            try:
                with _save(item):
                    continue
            except Exception:
                path, state = path + key, item
                break
        else:
            break
    return path.removeprefix(".")


_DEPTH = 16


def list_items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is in a dict, list or tuple, with how its path ends."""
    if isinstance(value, Mapping):
        return ((f".{key}", item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return ((f"[{number}]", item) for number, item in enumerate(value))
    return iter(())


ALIGNMENT = 4096

Storages = Sequence[torch.UntypedStorage]


@dataclass(frozen=True)
class _Floats:
    """Offsets of the plain floats of a layout and of their checksums, in bytes."""

    places: Sequence[int]
    """Offsets of the floats in the first extent."""
    pickle: slice
    """Part of the first extent that the checksum 4 bytes after it covers."""
    listed: int
    """Offset of the same checksum in the last extent, the archive's directory."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A file of ``nbytes`` bytes without its tensor data.

    ``extents`` are the (offset, content) pairs of the headers; ``holes`` are the (offset, length)
    pairs, in bytes, that the storages of the state fill, in order. The tensors of a device mesh,
    which every DTensor contains, belong to the extents.
    """

    nbytes: int
    extents: list[tuple[int, bytes]]
    holes: list[tuple[int, int]]
    structure: list[Any] | None = None
    floats: bytes = b""
    """Values of the plain floats, as in `_StateWalk`."""
    places: _Floats | None = None
    """None if the offsets are not known."""

    def equals(self, other: "Layout") -> bool:
        """Return whether images of both layouts differ in tensor data only."""
        return self is other or (
            (self.nbytes, self.holes, self.extents) == (other.nbytes, other.holes, other.extents)
        )

    @cached_property
    def digest(self) -> str:
        """Digest of holes and extents: images with equal digests differ in tensor data only."""
        found = hashlib.sha256(repr((self.nbytes, self.holes)).encode())
        for offset, content in self.extents:
            found.update(b"%d %d " % (offset, len(content)))
            found.update(content)
        return found.hexdigest()


@dataclass(frozen=True, eq=False)
class LaidOut:
    """A file that other code than `lay_out` has laid out, to be staged as a component."""

    name: str
    """Path of the file below the folder of the role."""
    layout: Layout
    storages: Storages


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: a walk makes many objects but no garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_garbage_collection()
def lay_out(
    state: Any, known: Layout | None = None, *, alignment: int = ALIGNMENT
) -> tuple[Layout, Storages]:
    """Plan the file that ``torch.save(state, ...)`` would write, without copying tensor data.

    ``state`` is anything that ``torch.save`` accepts. Tensors may have any shape, dtype, device and
    layout and may be DTensors; other values are copied now. An `UndetachedStateDict` is laid out as
    its ``detached()``, and a `LaidOut` is returned as it is. Holes start at multiples of
    ``alignment`` bytes.

    Return the layout, ``known`` itself if it fits, and the non-empty storages that fill its holes.

    Raises:
        ImageError: the state cannot be pickled, and the message names the key; or this version of
            torch writes files in an unknown way.
    """
    if isinstance(state, LaidOut):
        return state.layout, state.storages
    read = _walk_state(state)
    if read and known and read.structure == known.structure:
        if read.floats == known.floats:
            return known, read.storages
        if known.places:
            return _with_floats(known, known.places, read.floats), read.storages
    if read:
        with suppress(Exception):  # another thread changes it: the walk is of what is pickled
            read = None
            read = _walk_state(state := _isolate(state, {}))
    saved = state.detached() if type(state) is UndetachedStateDict else state
    with _aligned(alignment):
        try:
            with _save(saved) as (sink, recorder):
                return _make_layout(sink, recorder, read)
        except ImageError:
            raise
        except Exception as error:  # any error of a user's objects
            raise ImageError(
                f"{find_unpicklable(saved) or 'it'} cannot be pickled, {type(error).__name__}: "
                f"{error}. Leave it out of the state, or save its state_dict instead."
            ) from error


@contextmanager
def _save(state: Any) -> Iterator[tuple["_Sink", RecordingPickle]]:
    """Save a state without its tensor data; yield what was written, and what was recorded."""
    with ExitStack() as writing:
        sink = _Sink()
        recorder = RecordingPickle(lambda: writing.enter_context(torch.serialization.skip_data()))
        writing.callback(recorder.clear)
        torch.save(state, sink, pickle_module=recorder)  # type: ignore[arg-type]
        yield sink, recorder


def _make_layout(
    sink: "_Sink", recorder: RecordingPickle, read: "_StateWalk | None"
) -> tuple[Layout, Storages]:
    storages = [storage for storage in recorder.storages.values() if storage.nbytes()]
    if [storage.nbytes() for storage in storages] != [length for _, length in sink.holes]:
        raise ImageError(
            f"torch {torch.__version__} saves storages in an unknown order; install a torch "
            "version that trinity_sync supports"
        )
    extents = sink.extents()
    if read is None:
        return Layout(sink.size, extents, sink.holes), storages
    # the pickler has found the same floats as the walk, so their offsets are known
    places = _find_floats(extents, recorder) if read.floats == recorder.floats else None
    holes, own = [], []
    known_to_walk = {storage.data_ptr() for storage in read.storages}
    for hole, storage in zip(sink.holes, storages, strict=True):
        if storage.data_ptr() in known_to_walk:
            holes.append(hole)
            own.append(storage)
        else:  # a tensor of a device mesh, which is part of the structure
            content = view_bytes(storage).cpu().numpy().tobytes()
            extents.insert(-1, (hole[0], content))
    same_order = [s.data_ptr() for s in own] == [s.data_ptr() for s in read.storages]
    structure = read.structure if same_order else None
    return Layout(sink.size, extents, holes, structure, read.floats, places), own


def _find_floats(extents: Sequence[tuple[int, bytes]], recorder: RecordingPickle) -> _Floats | None:
    """Return the offsets of the pickle's floats and checksums; None in an unknown archive."""
    first, last = extents[0][1], extents[-1][1]
    start = first.find(recorder.content)
    stop, listed = start + len(recorder.content), last.find(b"PK\x01\x02") + 16
    checksum = zlib.crc32(recorder.content).to_bytes(4, "little")
    if len(extents) < 2 or first[stop : stop + 8] != b"PK\x07\x08" + checksum:
        return None
    if last[listed : listed + 4] != checksum:
        return None
    return _Floats([start + place for place in recorder.places], slice(start, stop), listed)


def _with_floats(known: Layout, places: _Floats, floats: bytes) -> Layout:
    """Return the layout of a state with other plain floats; it shares most extents."""
    (start, head), *others, (end, directory) = known.extents
    first, last = bytearray(head), bytearray(directory)
    for number, place in enumerate(places.places):
        first[place : place + 8] = floats[8 * number : 8 * number + 8]
    checksum = zlib.crc32(first[places.pickle]).to_bytes(4, "little")
    first[places.pickle.stop + 4 : places.pickle.stop + 8] = checksum
    last[places.listed : places.listed + 4] = checksum
    extents = [(start, bytes(first)), *others, (end, bytes(last))]
    return replace(known, extents=extents, floats=floats)


def fill(
    image: torch.Tensor,
    layout: Layout,
    storages: Storages,
    *,
    there: Layout | None = None,
    **how: Any,
) -> None:
    """Copy the state's data, and the headers that have changed, into an image.

    ``image`` is a ``uint8`` tensor in shared memory, ``layout`` and ``storages`` (on any device)
    are from `lay_out`. The image already has the headers of ``there``: shared extents are not
    copied again. ``how`` goes to `copy_into`.

    Raises:
        ImageError: the image is too small, or as in `copy_into`.
    """
    if len(image) < layout.nbytes:
        raise ImageError(f"an image of {layout.nbytes:,} bytes does not fit into {len(image):,}")
    if there is not layout:
        memory, written = image.numpy().data, set(map(id, there.extents if there else ()))
        for extent in layout.extents:
            if id(extent) not in written:
                offset, content = extent
                memory[offset : offset + len(content)] = content
    copy_into(image, layout.holes, storages, **how)


class _Sink:
    """A write-only file that keeps what is written, and records what is skipped."""

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
            raise ImageError(f"torch {torch.__version__} saves files in an unknown way")
        self.holes.append((self.size, distance))
        self.size += distance
        self._extents.append((self.size, bytearray()))
        return self.size

    def flush(self) -> None:
        """Nothing is buffered."""

    def extents(self) -> list[tuple[int, bytes]]:
        return [(offset, bytes(content)) for offset, content in self._extents if content]


_alignment_lock = Lock()


@contextmanager
def _aligned(alignment: int) -> Iterator[None]:
    """Align storages in files, under a lock: the setting of torch is global to the process."""
    with _alignment_lock:
        before = serialization_config.save.storage_alignment
        serialization_config.save.storage_alignment = alignment
        try:
            yield
        finally:
            serialization_config.save.storage_alignment = before


class UndetachedStateDict(dict[str, Any]):
    """A ``state_dict(keep_vars=True)`` that is laid out and staged as ``state_dict()`` is.

    Detaching a DTensor takes 10 µs. Only the first layout needs tensors without gradients and
    attributes, so later saves of thousands of tensors skip it.
    """

    def detached(self) -> dict[str, Any]:
        """Return the state dict that is saved."""
        return {
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in self.items()
        }


def _pack_floats(floats: Sequence[float]) -> bytes:
    """Return floats as a pickle has them, eight bytes each; nan equals nan, -0.0 is not 0.0."""
    return struct.pack(f">{len(floats)}d", *floats)


_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))
_SPECIAL = _COMPLEX | _QUANTIZED
_PLAIN = frozenset((int, str, bytes, bool, type(None)))
_CONTAINERS = frozenset((dict, OrderedDict, UndetachedStateDict, list, tuple))


_ARRAY = 16 << 10
"""Largest NumPy array in bytes that is compared; a random state has 2.5 KB."""


def _is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a ``torch.Tensor`` is a strided view of a storage and nothing more."""
    return (
        (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not (tensor.dtype in _SPECIAL or tensor.is_nested or tensor.is_neg())
        and not tensor.__dict__
    )


def _is_small(array: "np.ndarray[Any, Any]") -> bool:
    return array.nbytes <= _ARRAY and array.dtype.kind in "biuf" and array.flags.c_contiguous


class _NotComparable(Exception):
    """The state has a value whose equality does not imply an equal pickle."""


def _isolate(value: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
    """Return a copy of a state with the same tensors; ``copies`` has what was copied before."""
    kind, known = type(value), copies.get(id(value))
    if known or (kind not in _CONTAINERS and kind is not np.ndarray):
        return known[1] if known else value
    if kind is tuple:
        items = tuple(_isolate(item, copies) for item in value)
        return copies.setdefault(id(value), (value, items))[1]
    copied = value.copy() if kind is np.ndarray else kind()
    copies[id(value)] = value, copied
    if kind is list:
        copied += [_isolate(item, copies) for item in value]
    elif kind is not np.ndarray:
        copied |= {_isolate(key, copies): _isolate(item, copies) for key, item in value.items()}
    if kind is OrderedDict:
        copies[id(vars(value))] = vars(value), vars(copied)
        vars(copied).update((key, _isolate(each, copies)) for key, each in vars(value).items())
    return copied


def _walk_state(state: Any) -> "_StateWalk | None":
    """Walk over ``state`` and return its key; None if it has to be laid out again."""
    walk = _StateWalk(attributes_count=type(state) is not UndetachedStateDict)
    try:
        with disable_subclasses():  # attributes of DTensors are read as they are
            walk.visit(state)
    except Exception:  # whether it can be saved at all is for torch.save to say
        return None
    return walk


@dataclass
class _StateWalk:
    """What a walk over a state has found; it is the whole cost of a known state."""

    attributes_count: bool
    structure: list[Any] = field(default_factory=list)
    """Everything that determines the headers except the floats' values, flat, in pickle order."""
    values: list[float] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    """Non-empty storages, each once."""
    firsts: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    """Number of each storage, and the first tensor in it."""
    seen: dict[int, int] = field(default_factory=dict)

    @cached_property
    def floats(self) -> bytes:
        return _pack_floats(self.values)

    def visit(self, value: Any) -> None:
        kind = type(value)
        if kind in _TENSORS:
            self._add_tensor(value, kind)
            return
        add, seen, visit = self.structure.append, self.seen, self.visit
        add(kind)
        if kind is float:
            self.values.append(value)
        elif kind in _PLAIN:
            add(value)
        elif kind not in _CONTAINERS and not (kind is np.ndarray and _is_small(value)):
            raise _NotComparable
        elif (address := id(value)) in seen:
            add(~seen[address])  # a pickle also has it once
        else:
            seen[address] = len(seen)
            if kind is np.ndarray:
                self.structure += (value.dtype.str, value.shape, value.tobytes())
                return
            add(len(value))
            if kind is list or kind is tuple:
                for item in value:
                    visit(item)
                return
            for key, item in value.items():
                if type(key) is str:
                    add(key)
                else:
                    visit(key)
                visit(item)
            if kind is OrderedDict:
                visit(value.__dict__)  # a module's state has its _metadata there

    def _add_tensor(self, value: Any, kind: Any) -> None:
        given, add_all, attributes_count = value, self.structure.extend, self.attributes_count
        if kind is DTensor:
            if attributes_count and value.__dict__:
                raise _NotComparable
            # specs are shared by tensors and saves, and hold shape, strides, mesh and placements
            spec, shard = get_spec_and_shard(value)
            add_all((kind, spec, value.requires_grad))
            value, kind = shard, type(shard)
        if kind not in _TENSORS or kind is DTensor or value.layout is not torch.strided:
            raise _NotComparable
        if attributes_count and value.__dict__:
            raise _NotComparable
        dtype = value.dtype
        if dtype in _SPECIAL:
            if dtype in _QUANTIZED:
                raise _NotComparable
            self.structure.append(value.is_conj())
        storage = value.untyped_storage()
        nbytes, address = storage.nbytes(), get_storage_id(storage)
        count = len(self.firsts)
        number, first = self.firsts.setdefault(address, (count, given))
        if number == count and nbytes:
            self.storages.append(storage)
        if given is not first:  # a pickle has an object once
            self.structure.append(self.seen.setdefault(id(given), len(self.seen)))
        add_all(
            (
                kind,
                dtype,
                value.shape,
                value.stride(),
                value.storage_offset(),
                None if value.is_cpu else value.device,
                value.requires_grad,
                value.is_neg(),
                number,
                nbytes,
            )
        )
