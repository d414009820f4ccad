"""What overlapped staging may copy later, and whether it kept still until then.

Parameters and optimizer states change when the optimizer steps, so they may be copied while the
next forward and backward pass runs. All else is copied at the call: small tensors, which may be
buffers that a forward pass changes, and whatever cannot be watched. PyTorch counts the in-place
changes of a tensor, but not those of a DTensor's shard, so some bytes of each storage are kept,
too. A count that moved, or bytes that differ when the copy is done, tell of a torn image, which is
then not saved.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trinity_sync.errors import ImageError
from trinity_sync.snapshot.copying import bytes_of
from trinity_sync.snapshot.image import Layout, Storages

SMALL = 64 << 10
"""Bytes up to which a storage is copied at the call."""
SAMPLE = 256
"""Bytes of a larger one that are kept to compare with: a step of an optimizer changes them all."""


class Watch:
    """The tensors of a state between the call and the end of the copy.

    Args:
        state: what is staged.
        storages: its storages, as laid out.
        layout: where they go.
        check: keep a copy of everything to compare with at the end. It costs the time and the
            memory that overlapping saves, and finds all changes: also of few elements, through
            ``.data``, NumPy, a DTensor or a kernel of one's own.
    """

    def __init__(self, state: Any, storages: Storages, layout: Layout, *, check: bool) -> None:
        large = {storage._cdata for storage in storages if storage.nbytes() > SMALL}
        self._tensors = [
            (name, tensor, tensor._version)
            for name, tensor in named_tensors(state)
            if tensor.untyped_storage()._cdata in large and not tensor.is_inference()
        ]
        watched = {tensor.untyped_storage()._cdata for _, tensor, _ in self._tensors}
        self.storages = [
            storage if storage._cdata in watched else storage.clone() for storage in storages
        ]
        """What to copy from: the live storages that keep still, and copies of the others."""
        self._samples = [
            (storage, _sample(storage)) for storage in storages if storage._cdata in watched
        ]
        self._live, self._layout = storages, layout
        self._at_the_call = [storage.cpu().clone() for storage in storages] if check else None

    def require_unchanged(self, image: torch.Tensor, what: str) -> None:
        """See that ``image`` holds the state at the call.

        Raises:
            ImageError: something changed before it was copied; the message names it.
        """
        changed = [name for name, tensor, version in self._tensors if tensor._version != version]
        changed += [
            self._name_of(storage)
            for storage, before in self._samples
            if not _same(before, _sample(storage))
        ]
        if self._at_the_call is not None:
            changed += self._differing(image, self._at_the_call)
        if changed:
            names = ", ".join(dict.fromkeys(changed[:5])) + (", ..." if changed[5:] else "")
            raise ImageError(
                f"{what} is not saved: {names} changed while overlapped staging copied it. Call "
                "wait_staged() before anything but the optimizer's step changes the state, and "
                "wait_staged_before(optimizer) once; or save without overlap."
            )

    def _differing(
        self, image: torch.Tensor, kept: Sequence[torch.UntypedStorage]
    ) -> Iterator[str]:
        for live, before, (offset, length) in zip(
            self._live, kept, self._layout.holes, strict=True
        ):
            if not torch.equal(image[offset : offset + length], bytes_of(before)):
                yield self._name_of(live)

    def _name_of(self, storage: torch.UntypedStorage) -> str:
        same = (n for n, t, _ in self._tensors if t.untyped_storage()._cdata == storage._cdata)
        return next(same, "a tensor")


def _sample(storage: torch.UntypedStorage) -> bytes | torch.Tensor:
    """Bytes from the middle of a large storage, on its device."""
    start = storage.nbytes() // 2
    if storage.device.type == "cpu":
        return ctypes.string_at(storage.data_ptr() + start, SAMPLE)
    return bytes_of(storage)[start : start + SAMPLE].clone()


def _same(before: bytes | torch.Tensor, now: bytes | torch.Tensor) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        return torch.equal(before, now)
    return before == now


def named_tensors(state: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested dicts, lists and tuples, with their paths; of a DTensor, its shard."""
    found: list[tuple[str, torch.Tensor]] = []

    def visit(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append((name, getattr(value, "_local_tensor", value)))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(f"{name}.{key}" if name else str(key), item)
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                visit(f"{name}[{number}]", item)

    visit("", state)
    return found
