"""Where the tensors lie in the bytes of a ``.pt`` file, found out without torch.

The processes that persist images do not import torch, which takes seconds. Nothing is unpickled in
full: of all that the pickle names, only tensors and plain containers are made, any other object is
a stub that keeps what it was made from.
"""

import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from trinity_sync.errors import ImageError


class ImageFile(io.RawIOBase):
    """The bytes of a file as a file, without a copy."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, into: Any) -> int:
        """Copy the next bytes into a buffer; return their number."""
        part = self._content[self._at : self._at + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, distance: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte, and return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}
        self._at = max(0, start[whence] + distance)
        return self._at

    def tell(self) -> int:
        """Return the next byte."""
        return self._at


def list_storages(image: memoryview) -> dict[str, int]:
    """Return the offset of each storage's data, by the storage's key in the pickle."""
    with zipfile.ZipFile(ImageFile(image)) as archive:
        return _list_storages(image, archive)


def _list_storages(image: memoryview, archive: zipfile.ZipFile) -> dict[str, int]:
    records = {}
    for entry in archive.infolist():
        folder, _, key = entry.filename.rpartition("/data/")
        if not folder or "/" in folder:
            continue
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ImageError(f"record {entry.filename} is compressed; torch.save writes none so")
        # the local header may be longer than the directory's: it holds the padding
        name, extra = struct.unpack_from("<HH", image, entry.header_offset + 26)
        records[key] = entry.header_offset + 30 + name + extra
    return records


@dataclass(frozen=True)
class ArchivedTensor:
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
        ImageError, ValueError, ...: the bytes are no file of ``torch.save``.
    """
    with zipfile.ZipFile(ImageFile(image)) as archive:
        storages = _list_storages(image, archive)
        (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl") and n.count("/") == 1)
        content = archive.read(name)
    found: dict[tuple[Any, ...], ArchivedTensor] = {}
    for path, tensor in _iter_tensors(_Outliner(io.BytesIO(content)).load(), "", set()):
        kind, key, numel = tensor.storage
        each = ArchivedTensor(
            path, kind, storages[key], tensor.offset, tuple(tensor.shape), tuple(tensor.stride)
        )
        if min(each.offset, *each.shape, *each.stride, 0) < 0 or each.offset + each.spanned > numel:
            raise ImageError(f"tensor {path} ends beyond its storage")
        found.setdefault((key, each.offset, each.shape, each.stride), each)
    return sorted(found.values(), key=lambda each: (each.storage_start, each.offset))


@dataclass(frozen=True, eq=False)
class _View:
    storage: tuple[str, str, int]
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]


class _Stub:
    """An object of any class: it keeps what it was made from, and runs nothing."""

    def __new__(cls, *arguments: Any, **named: Any) -> "_Stub":
        made = super().__new__(cls)
        made.parts = [arguments, named]
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.parts: list[Any]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append(value)

    def _add(self, part: Any) -> None:
        self.parts.append(part)

    __setstate__ = append = extend = add = update = _add


def _make_view(storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> _View:
    return _View(storage, offset, shape, stride)


_MADE: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _make_view,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Outliner(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._stubs: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        made = _MADE.get((module, name))
        return made or self._stubs.setdefault(name, type(name, (_Stub,), {}))

    def persistent_load(self, named: Any) -> tuple[str, str, int]:
        _, kind, key, _, numel = named
        return kind.__name__, key, numel


def _iter_tensors(
    value: Any, name: str, seen: set[int], *, numbered: bool = True
) -> Iterator[tuple[str, _View]]:
    """Yield the tensors in nested containers and stubs, each once, with the path to it."""
    if isinstance(value, _View):
        yield name.removesuffix("._local_tensor"), value  # the shard of a DTensor
    if not isinstance(value, dict | list | tuple | set | _Stub) or id(value) in seen:
        return
    seen.add(id(value))
    is_stub = isinstance(value, _Stub)
    is_named = isinstance(value, dict) or (numbered and not is_stub)
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value.parts if isinstance(value, _Stub) else value)
    )
    for key, each in items:
        path = f"{name}.{key}" if name else str(key)
        yield from _iter_tensors(each, path if is_named else name, seen, numbered=is_named)
