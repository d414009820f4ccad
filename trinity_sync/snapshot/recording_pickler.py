"""Record the storages and the offsets of floats in the pickle that ``torch.save`` writes.

Besides tensors, floats change from save to save, such as a scheduled learning rate. In a pickle a
float is an opcode and eight bytes, whatever its value, and nothing refers to it, so states of equal
structure have their floats at equal offsets. Picklers do not report offsets. So each float is
written as a persistent reference to a random marker, which is replaced afterwards.
"""

import io
import pickle
import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch
from torch.distributed.tensor import DTensor

from trinity_sync.errors import ImageError
from trinity_sync.snapshot.layout_key import is_plain_tensor, pack_floats
from trinity_sync.snapshot.torch_private import (
    HASHED,
    get_new_dtypes,
    get_spec_and_shard,
    get_untyped_storage,
    reduce_plain_tensor,
    reduce_without_hash,
    replace_shard,
)

_PLAIN = (str, int, bool, type(None), tuple, list, dict, OrderedDict, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter, DTensor)
_NAMED = map(type, (torch.Tensor, torch.FloatStorage, torch.float32, torch.manual_seed))
_NO_STORAGE = frozenset((*_PLAIN, *_TENSORS, *_NAMED))
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
        """The complete pickle."""
        self.floats = b""
        """Floats of the pickle in order, from `pack_floats`."""
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
        self.floats = pack_floats(floats)
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
            if type(obj) is torch.Tensor and obj.dtype not in newer and is_plain_tensor(obj):
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
    """Require that a tensor has data; `torch.save` writes one on the device ``meta`` without.

    Raises:
        ValueError: it has none.
    """
    if isinstance(value, torch.Tensor) and value.is_meta:
        raise ValueError(
            "a tensor on the device meta has no data; load it onto a device before the save (what "
            "Accelerate has offloaded: accelerator.get_state_dict(model))"
        )


def find_unpicklable(state: Any) -> str:
    """Return the path of the innermost value in a nested state that cannot be pickled.

    Empty if that is ``state`` itself, or if no single item fails.
    """
    path = ""
    for _ in range(_DEPTH):  # each level pickles all below it, and a state may contain itself
        failing = (item for item in _items(state) if not _can_be_pickled(item[1]))
        key, state = next(failing, (None, None))
        if key is None:
            break
        path += key
    return path.removeprefix(".")


_DEPTH = 16


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return ((f".{key}", item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return ((f"[{number}]", item) for number, item in enumerate(value))
    return iter(())


def _can_be_pickled(value: Any) -> bool:
    try:
        _Trying(_Nowhere(), 2).dump(value)
    except Exception:
        return False
    return True


class _Trying(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        require_data(obj)
        return NotImplemented

    def persistent_id(self, obj: Any) -> str | None:
        return "" if isinstance(obj, torch.TypedStorage) or torch.is_storage(obj) else None


class _Nowhere(io.RawIOBase):
    def write(self, content: Any) -> int:
        return len(content)
