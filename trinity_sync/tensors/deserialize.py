"""Load the bytes of a ``.pt`` file in memory without a copy; the inverse of ``image``.

``torch.load`` rebuilds the state as usual, with one difference: where it would read a storage into
new memory, the unpickler returns the part of the given memory that holds the storage. Only what is
small is copied, and tensors that shared a storage in the file (tied tensors, views) share it in the
state.

A tensor that is kept does not keep the memory of the others: the pages of a storage are returned to
the system when its last tensor is deleted.

Unpickling runs code that the bytes name, and a job must be able to load its own checkpoints with
objects of a user's classes. A file is trusted if this user or root owns it and no other user may
write it, or if it lies below a folder that ``TRINITY_SYNC_TRUSTED_PATHS`` names (several are
separated by ``:``). Other files are loaded with ``weights_only``, plus NumPy's arrays and
scalars, which veRL's random state consists of, and ``BytesIO``, a form of a module's extra state.
Other users may be able to write a folder on the path, and to give the file's name to another file
at any moment. So the open file is checked, and the bytes are read from it.
"""

import io
import logging
import mmap
import os
import pickle
import struct
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor  # which also registers it as safe
from torch.overrides import TorchFunctionMode

from trinity_sync.errors import CommitError, ImageError, describe_error
from trinity_sync.fs.atomic import TRUSTED, is_trusted, open_no_follow
from trinity_sync.tensors.archive import list_storages, locate_storages, open_image
from trinity_sync.tensors.memcpy import exceeds_storage
from trinity_sync.tensors.torch_private import (
    MAKE_UNSTRIDED,
    FakeTensor,
    FakeTensorMode,
    get_file_offset,
    get_shard,
    get_storage_id,
    make_typed_storage,
)


def is_plain_forced() -> bool:
    """Return whether the user forbids torch to unpickle more than plain values, in any file."""
    forced = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    return forced.lower() in ("1", "y", "yes", "true")


@contextmanager
def _restrict_to_plain(path: Path) -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` load the block's file, as `allow_plain` has it.

    Raises:
        CommitError: the file at ``path`` holds more than tensors, arrays and plain values.
    """
    allow_plain()
    try:
        yield
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        if is_plain_forced():
            raise CommitError(
                f"{path} holds more than tensors and plain values, so it is not unpickled "
                f"({reason}): TORCH_FORCE_WEIGHTS_ONLY_LOAD is set. Unset it if you trust who "
                "wrote the file"
            ) from error
        raise CommitError(
            f"{path} is not this user's alone, and holds more than tensors and plain values, "
            f"so it is not unpickled ({reason}). If you trust who wrote it, set "
            f"{TRUSTED}={path.parent}"
        ) from error


def load_file(path: Path, *, mmap: bool = False) -> Any:
    """Load a file of ``torch.save`` on the CPU: in full if it is trusted, otherwise plain values.

    Raises:
        CommitError: as `_restrict_to_plain`.
        OSError: as `open_no_follow`.
    """
    with open_no_follow(path) as file:
        opened = f"/proc/self/fd/{file.fileno()}"  # torch.load maps files by name only
        plain = is_plain_forced() or not is_trusted(file.fileno())
        with _restrict_to_plain(path) if plain else nullcontext():
            return torch.load(opened, map_location="cpu", mmap=mmap, weights_only=plain)


def allow_plain() -> None:
    """Have ``weights_only`` take NumPy's plain values and ``BytesIO`` too, in all of this process.

    Torch's ``safe_globals`` would undo at its end what the user has allowed, or another thread. A
    program's own one, such as `transformers`', undoes this, so each load allows it again.
    """
    kinds = [kind for name, kind in vars(np.dtypes).items() if name.endswith("DType")]
    plain = [kind for kind in kinds if kind is not np.dtypes.ObjectDType]
    made: list[Any] = [value.__reduce__()[0] for value in (np.empty(0), np.float64())]
    torch.serialization.add_safe_globals([*made, np.ndarray, np.dtype, *plain, io.BytesIO])


def load_image(image: memoryview, path: Path, *, trusted: bool) -> Any:
    """Load the state in the bytes of a file; tensors and plain values only unless it is trusted.

    ``trusted`` is `is_trusted` of the open file that the bytes were read from; ``path``
    is for messages.

    Raises:
        CommitError: an object cannot be made, or a file that is not trusted holds one.
        ImageError: as `deserialize`.
    """
    if trusted and not is_plain_forced():
        try:
            return deserialize(image)
        except (ImportError, AttributeError, TypeError) as error:
            raise CommitError(
                f"{path} holds an object that cannot be made here ({describe_error(error)}). Make "
                "its class importable as at the save, or load other components (only=['model'])"
            ) from error
    with _restrict_to_plain(path):
        return deserialize(image, plain=True)


def deserialize(image: memoryview, *, plain: bool = False) -> Any:
    """Load bytes as ``torch.load(..., map_location="cpu", weights_only=plain)`` would.

    ``image`` is a whole ``.pt`` file in writable memory that nothing else uses. The large tensors
    are views of it, and a page of a private mapping loses its content with the last tensor in it.
    Code that the bytes name is run, as in veRL's loading. With ``plain``, only tensors and
    plain values are loaded, by a copy; call it within `_restrict_to_plain`.

    Raises:
        ImageError: the bytes are not a ``.pt`` file, or a compressed or legacy one, or a tensor is
            larger than its storage.
    """
    try:
        with zipfile.ZipFile(open_image(image)) as archive:
            data = list_storages(image, archive)
    except (zipfile.BadZipFile, struct.error) as error:
        raise ImageError(
            f"these {len(image):,} bytes are no file of torch.save: {error}"
        ) from error
    if plain:
        return _load(open_image(image), weights_only=True)
    following = dict(pairwise([*sorted(data.values()), 0]))  # then come records that are needed

    storages: dict[str, torch.UntypedStorage] = {}

    def view(key: str, nbytes: int) -> torch.UntypedStorage:
        if key not in storages:
            start = data[key]
            if start + nbytes > len(image):
                raise ImageError(f"storage {key} ends beyond the end of the file")
            storages[key] = _view(image, start, nbytes, following[start])
        return storages[key]

    try:
        return _unpickle(open_image(image), view)
    finally:
        storages.clear()  # the unpickler's class is in a cycle of references, and would keep them


@dataclass
class UnreadStorage:
    """A storage in memory that nothing has touched, to be filled from a file."""

    storage: torch.UntypedStorage
    start: int
    """Byte of the file at which its data starts."""
    tensors: int = 0
    """Number of tensors that it was loaded for."""


def deserialize_unread(image: memoryview) -> tuple[Any, dict[int, UnreadStorage]]:
    """Load the state in these bytes without the data of its tensors; return it and its storages.

    Those that are not empty come by `get_storage_id`. ``image`` may be a mapping of a file, of
    which the pickle and the directory alone are read. Code that they name is run, as by
    `deserialize`.

    Raises:
        ImageError: the bytes are not a ``.pt`` file, or one whose layout has to be read.
    """
    try:
        with zipfile.ZipFile(open_image(image)) as archive:
            starts = locate_storages(archive)
    except (zipfile.BadZipFile, struct.error) as error:
        raise ImageError(
            f"these {len(image):,} bytes are no file of torch.save: {error}"
        ) from error
    unread: dict[str, UnreadStorage] = {}

    def allocate(key: str, nbytes: int) -> torch.UntypedStorage:
        if key not in unread:
            storage = torch.UntypedStorage(nbytes, device="cpu")
            unread[key] = UnreadStorage(storage, starts[key] if nbytes else 0)
        unread[key].tensors += 1
        return unread[key].storage

    try:
        state = _unpickle(open_image(image), allocate)
        return state, {get_storage_id(u.storage): u for u in unread.values() if u.storage.nbytes()}
    finally:
        unread.clear()  # as above


def _unpickle(file: Any, get_storage: Callable[[str, int], torch.UntypedStorage]) -> Any:
    """Load a state whose storages a function gives for their key and number of bytes.

    It is called for each tensor.

    Raises:
        ImageError: a tensor is larger than its storage.
    """
    taken: list[tuple[torch.UntypedStorage, int]] = []

    class Unpickler(pickle.Unpickler):
        @property
        def persistent_load(self) -> Any:  # torch.load sets one that reads from the file
            return take

        @persistent_load.setter
        def persistent_load(self, _: Any) -> None:
            pass

    def take(name: tuple[str, Any, str, str, int]) -> torch.TypedStorage:
        _, storage_type, key, _, numel = name
        dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
        nbytes = numel * dtype.itemsize
        taken.append((get_storage(key, nbytes), nbytes))
        return make_typed_storage(taken[-1][0], dtype)

    module = SimpleNamespace(__name__="pickle", Unpickler=Unpickler)
    try:
        state = _load(file, weights_only=False, pickle_module=module)
        if any(storage.nbytes() > nbytes for storage, nbytes in taken):  # torch makes it longer
            raise ImageError("a tensor is larger than its storage in the file")
        return state
    finally:
        taken.clear()  # as above


def deserialize_outline(image: memoryview) -> Any:
    """Return the state in these bytes with tensors that have no data, only an offset in ``image``.

    Only tensors and plain values are unpickled (``weights_only``), and DTensors need no process
    group. `get_byte_offset` gives the offsets. Tensors that are not strided are `Unread`.

    Raises:
        ImageError: as `deserialize`, or the bytes hold more than tensors and plain values.
    """
    meshes = logging.getLogger("torch.distributed.device_mesh")
    meshes.addFilter(_no_warning)  # it warns of process groups, which a reader does not need
    allow_plain()
    try:
        with FakeTensorMode(), _Outlining():
            return _load(open_image(image), weights_only=True)
    except Exception as error:  # torch may raise anything for a tensor of another class
        reason = str(error).rpartition("WeightsUnpickler error: ")[2]
        reason = reason.strip().partition("\n")[0]
        raise ImageError(
            f"these {len(image):,} bytes hold no weights that can be read: {reason}"
        ) from error
    finally:
        meshes.removeFilter(_no_warning)


class Unread:
    """Stands for a tensor of which no outline is made."""

    def set_(self, *storage: Any) -> None:
        """Keep nothing, where a quantized tensor gets its data."""


class _Outlining(TorchFunctionMode):
    """Within it, what torch cannot make without data is `Unread`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Unread() if func in MAKE_UNSTRIDED else func(*args, **(kwargs or {}))


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor, FakeTensor)


def describe_form(value: Any) -> str:
    """Return what a value is that is no plain, strided tensor; empty for one, and for a DTensor."""
    if type(value) in _PLAIN and not (value.is_nested or value.is_quantized):
        return "" if value.layout is torch.strided else f"of the layout {value.layout}"
    is_other = type(value) in (Unread, *_PLAIN)
    return "sparse, nested or quantized" if is_other else f"a {type(value).__name__}"


def find_fault(target: torch.Tensor, *, whole: bool = False) -> str:
    """Return why a tensor, or a DTensor's shard, cannot be filled, in words; empty if it can."""
    if whole and isinstance(target, DTensor):
        return "is a DTensor: load before sharding, or copy its part of iter_views() to to_local()"
    if form := describe_form(target):
        return f"is {form}, which cannot be filled in place: load the step, and load_state_dict"
    local = get_shard(target)
    if local.is_meta:
        return "is on the meta device, without memory: call model.to_empty(device=...) first"
    if any(by == 0 and n > 1 for n, by in zip(local.shape, local.stride(), strict=True)):
        return "is expanded, with one place for several elements: clone() it"
    return "has no memory: its storage was resized" if exceeds_storage(local) else ""


def get_byte_offset(tensor: torch.Tensor) -> int:
    """Return the offset in bytes of the first element of a tensor of `deserialize_outline`."""
    start = get_file_offset(tensor.untyped_storage())
    return int(start + tensor.storage_offset() * tensor.element_size())


def _load(file: Any, *, weights_only: bool, **how: Any) -> Any:
    return torch.load(file, map_location="cpu", mmap=False, weights_only=weights_only, **how)


def _no_warning(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


_SMALL = 64 << 10
"""Bytes up to which a storage is copied: the ranks of a mesh, 16,384 of them, outlive its tensors
in torch's caches, and a borrowed image may be cut then."""


def _view(image: memoryview, start: int, nbytes: int, after: int) -> torch.UntypedStorage:
    """Return a part of the image, whose pages are freed with the last tensor in it.

    ``after`` is the first byte of the next storage, up to which no byte is needed; 0 if none
    follows.
    """
    if not nbytes:
        return torch.UntypedStorage(0, device="cpu")
    part = np.frombuffer(image, np.uint8, nbytes, start)
    if nbytes <= _SMALL:
        part = part.copy()
    elif isinstance(image.obj, mmap.mmap):
        first, end = -(-start // mmap.PAGESIZE), start + nbytes
        last = -(-end // mmap.PAGESIZE)
        if last * mmap.PAGESIZE > after:
            last = end // mmap.PAGESIZE
        if first < last:
            pages = first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE
            weakref.finalize(part, image.obj.madvise, mmap.MADV_DONTNEED, *pages).atexit = False
    return torch.from_numpy(part).untyped_storage()
