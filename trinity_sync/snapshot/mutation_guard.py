"""Detect tensors that change while overlapped staging copies them.

Parameters and optimizer states change in the optimizer's step only, so they can be copied during
the next forward and backward pass. Everything else is copied at the call: small tensors, which may
be buffers that a forward pass changes, and tensors that cannot be watched. PyTorch counts the
in-place changes of a tensor, but not those of a DTensor's shard, so a sample of the bytes of each
storage and its address are kept as well. If a count, a sample or an address differs after the copy,
the image is torn and is not saved.

Without a digest taken at the call, three changes are missed: one of a few elements that PyTorch
does not count, an operation still running when the copy ends, which is counted at its end, unless
it has changed the first bytes of a storage on the CPU, and memory that is freed, allocated again at
the same address and filled with the same bytes.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash

from trinity_sync.errors import ImageError
from trinity_sync.snapshot.image import Layout, Storages, fill, list_items
from trinity_sync.tensors.memcpy import get_staging_stream, view_bytes, view_memory
from trinity_sync.tensors.torch_private import get_change_count, get_shard, get_storage_id

SMALL = 64 << 10
"""Bytes up to which a storage is copied at the call."""
SAMPLE = 256
"""Bytes of a larger storage that are compared: an optimizer's step changes all of them."""


_WAY_OUT = (
    "Call wait_staged() before anything but the optimizer's step changes the state, and "
    "wait_staged_before(optimizer) once; or save without overlap."
)


class MutationGuard:
    """Watches the tensors of a state between the call and the end of the copy.

    ``storages`` and ``layout`` are from `lay_out`. With ``check``, the image is compared with
    digests of the storages, taken at the call in a pass over the state, which detects every change.
    """

    def __init__(self, state: Any, storages: Storages, layout: Layout, *, check: bool) -> None:
        large = {get_storage_id(storage) for storage in storages if storage.nbytes() > SMALL}
        watched = set[int]()
        self._tensors: list[tuple[str, torch.Tensor, int]] = []
        for name, tensor in list_named_tensors(state):
            address = _storage_of(tensor)
            if address is not None and address in large and not tensor.is_inference():
                self._tensors.append((name, tensor, get_change_count(tensor)))
                watched.add(address)
        self.storages = [
            storage if get_storage_id(storage) in watched else storage.clone()
            for storage in storages
        ]
        """Storages to copy from: live ones that are watched, and clones of all others."""
        kept = [storage for storage in storages if get_storage_id(storage) in watched]
        self._memory = [(storage, storage.data_ptr(), storage.nbytes()) for storage in kept]
        devices = {storage.device for storage in kept}
        self._samples = [_Samples([s for s in kept if s.device == device]) for device in devices]
        self._layout = layout
        self._digests = [_digest(view_bytes(storage.cpu())) for storage in kept] if check else []

    def fill(self, image: torch.Tensor, file: int, what: str, **how: Any) -> None:
        """Fill ``image``, a mapping of ``file``, with the state as it was at the call.

        Storages may be freed or resized during the copy. ``what`` names the image in messages;
        ``how`` goes to `image.fill`.

        Raises:
            ImageError: a tensor changed before it was copied; the message names it.
        """
        try:
            fill(image, self._layout, self.storages, file=file, **how)
        except (ImageError, RuntimeError) as error:  # torch's, if a storage on a GPU was resized
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
            moved = self._moved()  # a storage may have moved while it was sampled
        changed += [*map(self._name_of, moved), *self._differing(image)]
        if changed:
            names = ", ".join(dict.fromkeys(changed[:5])) + (", ..." if changed[5:] else "")
            raise ImageError(
                f"{what} is not saved: {names} changed while overlapped staging copied it. "
                + _WAY_OUT
            )

    def _moved(self) -> list[torch.UntypedStorage]:
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
    """Bytes from the middle of each large storage of a device.

    On the CPU also its first ones, which an operation that still runs has changed. On a GPU they
    stay on the device, are gathered in one operation, and are compared on the staging stream: the
    comparison waits for the copy, not for the work that training has submitted.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._device = storages[0].device
        self._at_the_call = self._taken(_read)

    def changed(self) -> list[torch.UntypedStorage]:
        if self._device.type == "cpu":
            with _surviving() as read:
                now = self._taken(read)
            same = [a == b for a, b in zip(self._at_the_call, now, strict=True)]
        else:
            with get_staging_stream(self._device):
                same = compare_rows(self._at_the_call, self._taken(_read))
        return [
            storage for storage, is_same in zip(self._storages, same, strict=True) if not is_same
        ]

    def _taken(self, read: Callable[[int], bytes]) -> Any:
        if self._device.type == "cpu":
            at = ((s.data_ptr(), s.nbytes() // 2) for s in self._storages)
            return [read(start) + read(start + middle) for start, middle in at]
        return sample_storages(self._storages)


def _read(address: int) -> bytes:
    return ctypes.string_at(address, SAMPLE)


@contextmanager
def _surviving() -> Iterator[Callable[[int], bytes]]:
    """Yield a function as `_read` that returns no bytes for freed memory instead of crashing."""
    source, sink = os.pipe()

    def read(address: int) -> bytes:
        try:
            return os.read(source, os.write(sink, view_memory(address, SAMPLE)))
        except OSError:
            return b""

    try:
        yield read
    finally:
        os.close(source)
        os.close(sink)


def sample_storages(storages: Storages) -> torch.Tensor:
    """Return a ``[len(storages), SAMPLE]`` tensor of bytes of the storages, on their device."""
    middles = ((view_bytes(s), s.nbytes() // 2) for s in storages)
    return torch.cat([content[at : at + SAMPLE] for content, at in middles]).view(-1, SAMPLE)


def has_samples(image: torch.Tensor, parts: Sequence[tuple[int, torch.UntypedStorage]]) -> bool:
    """Return whether ``image`` has a sample of each storage, of one device; wait for its work.

    ``parts`` are (offset in bytes, storage).
    """
    here, there = list[torch.Tensor](), list[torch.Tensor]()
    for offset, storage in parts:
        at = max(0, (storage.nbytes() - SAMPLE) // 2)
        there.append(view_bytes(storage)[at : at + SAMPLE])
        here.append(image[offset + at : offset + at + len(there[-1])])
    return torch.equal(torch.cat(there).to(image.device), torch.cat(here))


def compare_rows(before: torch.Tensor, now: torch.Tensor) -> list[bool]:
    """Return which rows of two ``[rows, bytes]`` tensors are equal; synchronize the stream once."""
    return (before == now).all(1).tolist()


def list_named_tensors(state: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in nested dicts, lists and tuples with their paths; a DTensor's shard."""
    found: list[tuple[str, torch.Tensor]] = []
    entered = set[int]()
    left = [("", state)]
    while left:  # a state may be nested deeper than the stack allows, and contain itself
        name, value = left.pop()
        if isinstance(value, torch.Tensor):
            found.append((name.removeprefix("."), get_shard(value)))
        elif id(value) not in entered and (inner := [*list_items(value)]):
            entered.add(id(value))
            # a random state is hundreds of numbers
            left += [(name + key, each) for key, each in reversed(inner) if type(each) is not int]
    return found


def _storage_of(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage; None for sparse and uninitialized tensors."""
    try:
        return get_storage_id(tensor.untyped_storage())
    except (RuntimeError, ValueError):  # of which NotImplementedError is one
        return None


def _digest(content: torch.Tensor) -> bytes:
    found: bytes = xxhash.xxh3_128_digest(content.numpy().data)
    return found
