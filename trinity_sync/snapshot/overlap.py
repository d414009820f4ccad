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
from trinity_sync.snapshot.copying import bytes_of, staging_stream
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
        watched = set[int]()
        self._tensors: list[tuple[str, torch.Tensor, int]] = []
        for name, tensor in named_tensors(state):
            address = tensor.untyped_storage()._cdata
            if address in large and not tensor.is_inference():
                self._tensors.append((name, tensor, tensor._version))
                watched.add(address)
        self.storages = [
            storage if storage._cdata in watched else storage.clone() for storage in storages
        ]
        """What to copy from: the live storages that keep still, and copies of the others."""
        kept = [storage for storage in storages if storage._cdata in watched]
        devices = {storage.device for storage in kept}
        self._samples = [_Samples([s for s in kept if s.device == device]) for device in devices]
        self._live, self._layout = storages, layout
        self._at_the_call = [storage.cpu().clone() for storage in storages] if check else None

    def require_unchanged(self, image: torch.Tensor, what: str) -> None:
        """See that ``image`` holds the state at the call.

        Raises:
            ImageError: something changed before it was copied; the message names it.
        """
        changed = [name for name, tensor, version in self._tensors if tensor._version != version]
        for samples in self._samples:
            changed += map(self._name_of, samples.changed())
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


class _Samples:
    """Bytes from the middle of each of the large storages on a device.

    On a GPU they stay there, are taken all at once, and are compared on the staging stream, so that
    the comparison waits for the copy alone, and not for what training has given the GPU to do.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._device = storages[0].device
        self._at_the_call = self._taken()

    def changed(self) -> list[torch.UntypedStorage]:
        """Storages whose bytes are others now."""
        if self._device.type == "cpu":
            same = [a == b for a, b in zip(self._at_the_call, self._taken(), strict=True)]
        else:
            with staging_stream(self._device):
                same = rows_equal(self._at_the_call, self._taken())
        return [
            storage for storage, is_same in zip(self._storages, same, strict=True) if not is_same
        ]

    def _taken(self) -> Any:
        if self._device.type == "cpu":
            middles = ((s.data_ptr() + s.nbytes() // 2) for s in self._storages)
            return [ctypes.string_at(middle, SAMPLE) for middle in middles]
        return sampled(self._storages)


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

    def visit(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append((name, getattr(value, "_local_tensor", value)))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(f"{name}.{key}" if name else str(key), item)
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                if type(item) is not int:  # a random state is hundreds of them
                    visit(f"{name}[{number}]", item)

    visit("", state)
    return found
