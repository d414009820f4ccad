"""What overlapped staging may copy later, and whether it kept still until then.

Parameters and optimizer states change when the optimizer steps, so they may be copied while the
next forward and backward pass runs. All else is copied at the call: small tensors, which may be
buffers that a forward pass changes, and whatever cannot be watched. PyTorch counts the in-place
changes of a tensor, but not those of a DTensor's shard, so some bytes of each storage are kept,
too, and where its memory is. A count that moved, other bytes or another place when the copy is done
tell of a torn image, which is then not saved.

Without a digest taken at the call this does not see all: not a change of few elements that PyTorch
does not count, nor an operation that is under way when the copy ends, which counts once it is done,
nor memory that is freed, given back at the same address and filled as before.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import xxhash

from trinity_sync.errors import ImageError
from trinity_sync.snapshot.image import Layout, Storages, fill
from trinity_sync.snapshot.memcpy import bytes_of, memory_at, staging_stream
from trinity_sync.snapshot.torch_private import get_change_count, get_shard, get_storage_id

SMALL = 64 << 10
"""Bytes up to which a storage is copied at the call."""
SAMPLE = 256
"""Bytes of a larger one that are kept to compare with: a step of an optimizer changes them all."""


_WAY_OUT = (
    "Call wait_staged() before anything but the optimizer's step changes the state, and "
    "wait_staged_before(optimizer) once; or save without overlap."
)


class Watch:
    """The tensors of a state between the call and the end of the copy.

    Args:
        state: what is staged.
        storages: its storages, as laid out.
        layout: where they go.
        check: take a digest of all that is not copied now, to compare the image with. It costs
            a pass over the state at the call, and finds all changes, whoever makes them.
    """

    def __init__(self, state: Any, storages: Storages, layout: Layout, *, check: bool) -> None:
        large = {get_storage_id(storage) for storage in storages if storage.nbytes() > SMALL}
        watched = set[int]()
        self._tensors: list[tuple[str, torch.Tensor, int]] = []
        for name, tensor in named_tensors(state):
            address = _storage_of(tensor)
            if address is not None and address in large and not tensor.is_inference():
                self._tensors.append((name, tensor, get_change_count(tensor)))
                watched.add(address)
        self.storages = [
            storage if get_storage_id(storage) in watched else storage.clone()
            for storage in storages
        ]
        """What to copy from: the live storages that keep still, and copies of the others."""
        kept = [storage for storage in storages if get_storage_id(storage) in watched]
        self._memory = [(storage, storage.data_ptr(), storage.nbytes()) for storage in kept]
        devices = {storage.device for storage in kept}
        self._samples = [_Samples([s for s in kept if s.device == device]) for device in devices]
        self._layout = layout
        self._digests = [_digest(bytes_of(storage.cpu())) for storage in kept] if check else []

    def fill(self, image: torch.Tensor, file: int, what: str, **how: Any) -> None:
        """Fill ``image``, the mapping of ``file``, with the state at the call.

        Args:
            image, file: as in `copy_into`; the storages may be freed or resized meanwhile.
            what: the image in words.
            how: further arguments of `image.fill`.

        Raises:
            ImageError: something changed before it was copied; the message names it.
        """
        try:
            fill(image, self._layout, self.storages, file=file, **how)
        except (ImageError, RuntimeError) as error:  # the latter for a GPU's storage of other size
            self._require_unchanged(image, what)
            raise ImageError(f"{what} is not saved: {error}. {_WAY_OUT}") from error
        self._require_unchanged(image, what)

    def _require_unchanged(self, image: torch.Tensor, what: str) -> None:
        changed = [
            name for name, tensor, count in self._tensors if get_change_count(tensor) != count
        ]
        moved = self._moved()
        if not moved:
            for samples in self._samples:
                changed += map(self._name_of, samples.changed())
            moved = self._moved()  # what was sampled may have been the memory of something else
        changed += [*map(self._name_of, moved), *self._differing(image)]
        if changed:
            names = ", ".join(dict.fromkeys(changed[:5])) + (", ..." if changed[5:] else "")
            raise ImageError(
                f"{what} is not saved: {names} changed while overlapped staging copied it. "
                + _WAY_OUT
            )

    def _moved(self) -> list[torch.UntypedStorage]:
        """Storages that were freed, resized or given other memory."""
        return [
            storage
            for storage, address, nbytes in self._memory
            if (storage.data_ptr(), storage.nbytes()) != (address, nbytes)
        ]

    def _differing(self, image: torch.Tensor) -> Iterator[str]:
        holes = {
            get_storage_id(storage): hole
            for storage, hole in zip(self.storages, self._layout.holes, strict=True)
        }
        for (storage, *_), digest in zip(self._memory, self._digests, strict=False):
            offset, length = holes[get_storage_id(storage)]
            if _digest(image[offset : offset + length]) != digest:
                yield self._name_of(storage)

    def _name_of(self, storage: torch.UntypedStorage) -> str:
        number = get_storage_id(storage)
        same = (name for name, tensor, _ in self._tensors if _storage_of(tensor) == number)
        return next(same, "a tensor")


class _Samples:
    """Bytes from the middle of each of the large storages on a device.

    On a GPU they stay there, are taken all at once, and are compared on the staging stream, so that
    the comparison waits for the copy alone, and not for what training has given the GPU to do.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._device = storages[0].device
        self._at_the_call = self._taken(_read)

    def changed(self) -> list[torch.UntypedStorage]:
        """Storages whose bytes are others now."""
        if self._device.type == "cpu":
            with _surviving() as read:
                now = self._taken(read)
            same = [a == b for a, b in zip(self._at_the_call, now, strict=True)]
        else:
            with staging_stream(self._device):
                same = rows_equal(self._at_the_call, self._taken(_read))
        return [
            storage for storage, is_same in zip(self._storages, same, strict=True) if not is_same
        ]

    def _taken(self, read: Callable[[int], bytes]) -> Any:
        if self._device.type == "cpu":
            return [read(s.data_ptr() + s.nbytes() // 2) for s in self._storages]
        return sampled(self._storages)


def _read(address: int) -> bytes:
    return ctypes.string_at(address, SAMPLE)


@contextmanager
def _surviving() -> Iterator[Callable[[int], bytes]]:
    """As `_read`, but memory that is gone meanwhile has no bytes instead of ending the process."""
    source, sink = os.pipe()

    def read(address: int) -> bytes:
        try:
            return os.read(source, os.write(sink, memory_at(address, SAMPLE)))
        except OSError:
            return b""

    try:
        yield read
    finally:
        os.close(source)
        os.close(sink)


def sampled(storages: Storages) -> torch.Tensor:
    """``SAMPLE`` bytes of each storage, a row each, on their device."""
    middles = ((bytes_of(s), s.nbytes() // 2) for s in storages)
    return torch.cat([content[at : at + SAMPLE] for content, at in middles]).view(-1, SAMPLE)


def rows_equal(before: torch.Tensor, now: torch.Tensor) -> list[bool]:
    """Which rows are; waits for the current stream, once."""
    return (before == now).all(1).tolist()


def named_tensors(state: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested dicts, lists and tuples, with their paths; of a DTensor, its shard."""
    found: list[tuple[str, torch.Tensor]] = []
    entered = set[int]()
    left = [("", state)]
    while left:  # a state may be deeper than calls, and hold itself
        name, value = left.pop()
        if isinstance(value, torch.Tensor):
            found.append((name, get_shard(value)))
            continue
        if id(value) in entered:
            continue
        inner: list[tuple[str, Any]] = []
        if isinstance(value, Mapping):
            inner = [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            inner = [
                (f"{name}[{number}]", item)
                for number, item in enumerate(value)
                if type(item) is not int  # a random state is hundreds of them
            ]
        if inner:
            entered.add(id(value))
            left += reversed(inner)
    return found


def _storage_of(tensor: torch.Tensor) -> int | None:
    """Address of a tensor's storage; sparse tensors and uninitialized parameters have none."""
    try:
        return get_storage_id(tensor.untyped_storage())
    except (RuntimeError, ValueError):  # of which NotImplementedError is one
        return None


def _digest(content: torch.Tensor) -> bytes:
    found: bytes = xxhash.xxh3_128_digest(content.numpy().data)
    return found
