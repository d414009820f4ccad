"""Where the tensors lie in the bytes of a ``.pt`` file, found out without torch.

The processes that persist images do not import torch, which takes seconds. Nothing that the pickle
names is run: of all objects only tensors and plain containers are made, the others are stubs that
keep what they were made from.
"""

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from trinity_sync.errors import ImageError

ITEM_ALIGNMENT = 64
"""Multiple of which the archives in a file of DCP start."""
_ENTRY, _END, _END_BYTES = b"PK\3\4", b"PK\5\6", 22
_HEADERS = 4096
"""Bytes within which the next record that matters starts, in an archive of one tensor."""
_LONGEST_PICKLE = 1 << 20
_ITEM_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Untyped", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Bytes of an element, by the class of its storage in torch."""


def open_image(image: memoryview) -> io.RawIOBase:
    """Return the bytes of a file as a file, without a copy."""
    return _File(image)


def list_storages(image: memoryview, archive: zipfile.ZipFile) -> dict[str, int]:
    """Return the offset of each storage's data, by the storage's key in the pickle."""
    records = {}
    for entry in archive.infolist():
        folder, _, key = entry.filename.rpartition("/data/")
        if not folder or "/" in folder:
            continue
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ImageError(f"record {entry.filename} is compressed; torch.save writes none so")
        # the local header may be longer than the directory's: it holds the padding
        records[key] = _skip_header(image, entry.header_offset)
    return records


def locate_storages(archive: zipfile.ZipFile) -> dict[str, int]:
    """Return what `list_storages` does, without a read of the headers between the storages.

    A storage lies before the next header, with at most a descriptor of 16 or 24 bytes between, and
    starts at a multiple of the alignment that the archive names: one place alone fits.

    Raises:
        ImageError: the archive names no alignment, or is not laid out so.
    """
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    named = [entry for entry in entries if entry.filename.endswith("/.storage_alignment")]
    alignment = int(archive.read(named[0])) if named else 0
    if alignment < 64:
        raise ImageError("this file of torch.save does not say how its storages are aligned")
    records = {}
    for entry, following in pairwise(entries):
        folder, _, key = entry.filename.rpartition("/data/")
        if not folder or "/" in folder or not entry.file_size:
            continue
        end = following.header_offset - entry.file_size
        starts = [end - descriptor for descriptor in (0, 16, 24)]
        fitting = [start for start in starts if start % alignment == 0]
        if len(fitting) != 1 or entry.compress_type != zipfile.ZIP_STORED:
            raise ImageError(f"record {entry.filename} does not start where torch.save puts it")
        (records[key],) = fitting
    return records


class ArchivedTensor(NamedTuple):
    """A tensor in the bytes of a file."""

    name: str
    """Path to it in the nested state, with dots."""
    storage: str
    """Name of the class of its storage in torch, such as ``FloatStorage``."""
    storage_start: int
    """Byte of the file at which its storage begins."""
    offset: int
    """Its first element in the storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return prod(self.shape)

    @property
    def spanned(self) -> int:
        """Number of elements from its first to its last in the storage."""
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((n - 1) * step for n, step in steps) if self.numel else 0


def list_tensors(image: memoryview) -> list[ArchivedTensor]:
    """Return the tensors in the bytes of a ``.pt`` file, in the order of their bytes.

    Parameters that are tied, and other tensors with the same elements, count once.

    Raises:
        Exception: the bytes are no file of ``torch.save``.
    """
    with zipfile.ZipFile(open_image(image)) as archive:
        storages = list_storages(image, archive)
        (name,) = (each for each in archive.namelist() if each.endswith("/data.pkl"))
        state = _Outliner(io.BytesIO(archive.read(name))).load()
    found: dict[Any, ArchivedTensor] = {}
    for path, view in _iter_views(state, "", set()):
        kind, key, length = view.storage
        each = ArchivedTensor(path, kind, storages[key], view.offset, view.shape, view.stride)
        if min(each.offset, *each.shape, *each.stride, 0) < 0:
            raise ImageError(f"tensor {path} has a negative size")
        if each.offset + each.spanned > length:
            raise ImageError(f"tensor {path} ends beyond its storage")
        found.setdefault((key, *each[3:]), each)
    return sorted(found.values(), key=lambda each: (each.storage_start, each.offset))


def list_tensors_of_items(image: memoryview) -> list[ArchivedTensor]:
    """Return the tensors in a rank's file of DCP, which has an archive for each, then other values.

    Such a file has no names: a tensor's is the byte at which its archive starts.

    Raises:
        Exception: the bytes are no such file, or a tensor is of an unknown dtype.
    """
    found, at = list[ArchivedTensor](), 0
    while end := _find_end_of_tensor(image, at):
        for each in list_tensors(image[at:end]):
            start = at + each.storage_start
            found.append(each._replace(name=f"at byte {at:,}", storage_start=start))
        at = -(-end // ITEM_ALIGNMENT) * ITEM_ALIGNMENT
    return found


def _find_end_of_tensor(image: memoryview, at: int) -> int:
    """Return the end of the archive of a tensor; 0 if none starts there.

    No header says how long a record is, so each is sought after the one before: a pickle ends by
    itself, it tells how long the data is, and all else is short.
    """
    if image[at : at + 4] != _ENTRY:
        return 0
    start = _skip_header(image, at)
    pickled = io.BytesIO(image[start : start + _LONGEST_PICKLE])
    outliner = _Outliner(pickled)
    if not isinstance(outliner.load(), _View | _Stub) or not outliner.storages:
        return 0
    kind, _, length = outliner.storages[0]
    after = start + pickled.tell()
    if length:
        data = after + bytes(image[after : after + _HEADERS]).index(b"/data/0")
        entry = after + bytes(image[after:data]).rindex(_ENTRY)
        after = _skip_header(image, entry) + length * _ITEM_BYTES[kind.removesuffix("Storage")]
    return after + bytes(image[after : after + _HEADERS]).index(_END) + _END_BYTES


def _skip_header(image: memoryview, at: int) -> int:
    """Return where the content of the entry starts whose header is at a byte."""
    name, extra = struct.unpack_from("<HH", image, at + 26)
    return int(at + 30 + name + extra)


class _File(io.RawIOBase):
    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        part = self._content[self._at : self._at + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, distance: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}
        self._at = max(0, start[whence] + distance)
        return self._at

    def tell(self) -> int:
        return self._at


class _View(NamedTuple):
    storage: tuple[str, str, int]
    """Class, key and number of elements."""
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Stub:
    parts: list[Any]
    """What the object was made from."""

    def __new__(cls, *arguments: Any, **named: Any) -> "_Stub":
        made = super().__new__(cls)
        made.parts = [arguments, named]
        return made

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append(value)

    def _add(self, part: Any) -> None:
        self.parts.append(part)

    __setstate__ = append = extend = add = update = _add


_MADE: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, shape, stride, *_: _View(
        storage, offset, tuple(shape), tuple(stride)
    ),
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda make, _, parts, state: _Stub(
        make(*parts), state
    ),
    ("collections", "OrderedDict"): OrderedDict,
}


class _Outliner(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _MADE.get((module, name)) or type(name, (_Stub,), {})

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: list[tuple[str, str, int]] = []
        """Class, key and number of elements, for each tensor."""

    def persistent_load(self, named: Any) -> tuple[str, str, int]:
        _, kind, key, _, length = named
        self.storages.append((kind.__name__, key, length))
        return self.storages[-1]


def _iter_views(
    value: Any, name: str, seen: set[int], *, numbered: bool = True
) -> Iterator[tuple[str, _View]]:
    """Yield the tensors in nested containers and stubs, each once, with the path to it."""
    if isinstance(value, _View):
        yield name.removesuffix("._local_tensor"), value  # the shard of a DTensor
    elif isinstance(value, dict | list | tuple | set | _Stub) and id(value) not in seen:
        seen.add(id(value))
        is_named = isinstance(value, dict) or (numbered and not isinstance(value, _Stub))
        inner = value.parts if isinstance(value, _Stub) else value
        for key, each in inner.items() if isinstance(inner, dict) else enumerate(inner):
            path = (f"{name}.{key}" if name else str(key)) if is_named else name
            yield from _iter_views(each, path, seen, numbered=is_named)
