"""The exact bytes of a ``.pt`` file, told apart into small headers and tensor data.

``torch.save`` under ``skip_data`` writes everything but the tensor data and seeks over the rest.
Given a sink that notes what is written where, it yields a `Layout`: the written extents, and for
each storage the hole that it belongs into. Filling the holes with one copy per storage gives a file
that ``torch.load``, veRL's checkpoint manager and veRL's merger read like any other; storages that
were shared stay shared, because holes belong to storages, not to tensors. ``skip_data`` begins when
the pickle is complete: under it torch refuses to pickle quantized and nested tensors, and what an
object's own ``torch.save`` writes would lack its data.

Holes start at multiples of 4,096 bytes, so that a filled image can be written with direct I/O.
Laying out costs tens of microseconds a tensor; where the structure and the plain values are those
of an earlier layout, that layout is used again. Where only floats differ, as under a schedule of
the learning rate, they and the checksum that covers them are put into a copy of its first and last
headers. What stays is the archive's ``serialization_id``, which torch logs and nobody compares.
"""

import gc
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch.utils.serialization import config as serialization_config

from trinity_sync.errors import ImageError
from trinity_sync.snapshot.layout_key import LayoutKey, StateWalk, UndetachedStateDict, walk_state
from trinity_sync.snapshot.memcpy import ComputedEvents, copy_into, view_bytes
from trinity_sync.snapshot.recording_pickler import RecordingPickle, find_unpicklable

ALIGNMENT = 4096

Storages = Sequence[torch.UntypedStorage]


@dataclass(frozen=True)
class _Floats:
    """Where the plain floats of a layout are."""

    places: Sequence[int]
    """In the first extent."""
    pickle: slice
    """Of the first extent: what the checksum, which lies 4 bytes behind it, is of."""
    listed: int
    """Where the last extent, the archive's directory, has that checksum once more."""


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
    structure: LayoutKey | None = None
    floats: bytes = b""
    """Values of the plain floats, as `StateWalk` has them."""
    places: _Floats | None = None
    """None where they are not known."""

    def equals(self, other: "Layout") -> bool:
        """Whether images of both differ in the data of tensors only."""
        return self is other or (
            (self.nbytes, self.holes, self.extents) == (other.nbytes, other.holes, other.extents)
        )

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
            DTensors included; other values are copied now. Of an `UndetachedStateDict`, what it
            gives detached.
        known: a layout to use again if it is that of ``state``.

    Returns:
        The layout (``known`` itself where it fits) and the non-empty storages that fill its holes.

    Raises:
        ImageError: the state cannot be pickled, and the message names the key; or this version of
            torch lays files out in a way that is not understood.
    """
    read = walk_state(state)
    if read and known and read.structure == known.structure:
        if read.floats == known.floats:
            return known, read.storages
        if known.places:
            return _with_floats(known, known.places, read.floats), read.storages
    saved = state.detached() if type(state) is UndetachedStateDict else state
    with _aligned(), ExitStack() as writing:
        sink = _Sink()
        noting = RecordingPickle(lambda: writing.enter_context(torch.serialization.skip_data()))
        try:
            torch.save(saved, sink, pickle_module=noting)  # type: ignore[arg-type]
            return _planned(sink, noting, read)
        except ImageError:
            raise
        except Exception as error:  # whatever the state's own objects raise
            raise ImageError(
                f"{find_unpicklable(saved) or 'it'} cannot be pickled, {type(error).__name__}: "
                f"{error}. Leave it out of the state, or put its own state there."
            ) from error
        finally:
            noting.forget()


def _planned(
    sink: "_Sink", noting: RecordingPickle, read: StateWalk | None
) -> tuple[Layout, Storages]:
    """What was written, with what was noted and read meanwhile."""
    storages = [storage for storage in noting.storages.values() if storage.nbytes()]
    if [storage.nbytes() for storage in storages] != [length for _, length in sink.holes]:
        raise ImageError(
            f"torch {torch.__version__} saves storages in an order that trinity_sync does not "
            "know; install a torch version that trinity_sync supports"
        )
    extents = sink.extents()
    if read is None:
        return Layout(sink.size, extents, sink.holes), storages
    # no more floats than those that the walk met, so each is where the pickler met it
    places = _places(extents, noting) if read.floats == noting.floats else None
    holes, own = [], []
    known_to_walk = {storage.data_ptr() for storage in read.storages}
    for hole, storage in zip(sink.holes, storages, strict=True):
        if storage.data_ptr() in known_to_walk:
            holes.append(hole)
            own.append(storage)
        else:  # a tensor inside of a device mesh, which is part of the structure
            content = view_bytes(storage).cpu().numpy().tobytes()
            extents.insert(-1, (hole[0], content))
    same_order = [s.data_ptr() for s in own] == [s.data_ptr() for s in read.storages]
    structure = read.structure if same_order else None
    return Layout(sink.size, extents, holes, structure, read.floats, places), own


def _places(extents: Sequence[tuple[int, bytes]], noting: RecordingPickle) -> _Floats | None:
    """Where the floats and the checksums of the pickle are; None if that is not understood."""
    first, last = extents[0][1], extents[-1][1]
    start = first.find(noting.content)
    stop, listed = start + len(noting.content), last.find(b"PK\x01\x02") + 16
    checksum = zlib.crc32(noting.content).to_bytes(4, "little")
    if len(extents) < 2 or first[stop : stop + 8] != b"PK\x07\x08" + checksum:
        return None
    if last[listed : listed + 4] != checksum:
        return None
    return _Floats([start + place for place in noting.places], slice(start, stop), listed)


def _with_floats(known: Layout, places: _Floats, floats: bytes) -> Layout:
    """The layout of a state that differs in plain floats only; it shares most extents."""
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
    computed: ComputedEvents | None = None,
    threads: int = 0,
    file: int | None = None,
) -> None:
    """Copy the state's data, and those headers that are not there already, into ``image``.

    Args:
        image: ``uint8`` tensor in shared memory, at least ``layout.nbytes`` long.
        layout: as planned by `lay_out`.
        storages: as returned by `lay_out`, on any device.
        there: the layout that ``image`` holds from an earlier call; what both share stays.
        computed, threads, file: as in `copy_into`.
    """
    if len(image) < layout.nbytes:
        raise ImageError(f"an image of {layout.nbytes:,} bytes does not fit into {len(image):,}")
    if there is not layout:
        memory, written = image.numpy().data, set(map(id, there.extents if there else ()))
        for extent in layout.extents:
            if id(extent) not in written:
                offset, content = extent
                memory[offset : offset + len(content)] = content
    parts = [(*hole, storage) for hole, storage in zip(layout.holes, storages, strict=True)]
    copy_into(image, parts, computed=computed, threads=threads, file=file)


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
