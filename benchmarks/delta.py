"""What a delta of the weights costs, beside other encodings and a full copy in the same run.

::

    python -m benchmarks.delta [MIB]

Random bf16 weights of MIB (256 by default), a share of whose elements is changed at random places.
All figures are beside a copy of the whole into touched memory: *bytes* of the full bytes, *encode*
and *apply* in times of that copy, medians of seven, all in turn, in one thread and in tensors of
4 MiB. ``delta`` is what ``trinity_sync.weights.folder.delta`` does, checksum of the result
included; the alternatives have none.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from trinity_sync.tensors.memcpy import copy_pieces
from trinity_sync.weights.folder.delta import Change, apply_change, encode_change

SHARES = (0.0, 0.001, 0.01, 0.05, 0.3, 1.0)
TURNS = 7
PIECE = 4 << 20
"""Bytes of a tensor."""
Bits = np.ndarray[Any, np.dtype[Any]]


def _indices(old: Bits, new: Bits) -> tuple[Bits, ...]:
    at = np.flatnonzero(old != new)
    return at.astype(np.uint32), new[at]


def _from_indices(into: Bits, at: Bits, values: Bits) -> None:
    into[at] = values


def _mask(old: Bits, new: Bits) -> tuple[Bits, ...]:
    differs = old != new
    return np.packbits(differs), new[np.flatnonzero(differs)]


def _from_mask(into: Bits, mask: Bits, values: Bits) -> None:
    into[np.flatnonzero(np.unpackbits(mask, count=len(into)))] = values


def _change(old: Bits, new: Bits) -> tuple[Any, ...]:
    content, checksum = encode_change(old.view(np.uint8), new.view(np.uint8))
    return np.frombuffer(content, np.uint8), checksum


def _from_change(into: Bits, content: Bits, checksum: str) -> None:
    apply_change(into.view(np.uint8), Change(content.tobytes(), checksum), "it")


ENCODINGS: dict[str, tuple[Callable[..., tuple[Any, ...]], Callable[..., None]]] = {
    "delta": (_change, _from_change),
    "indices": (_indices, _from_indices),
    "mask": (_mask, _from_mask),
}


def _timed(work: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = work(*arguments, **named)
    return time.perf_counter() - begun, result


def _in_pieces(there: Callable[..., Any], old: Bits, new: Bits) -> list[Any]:
    return [there(old[p], new[p]) for p in _pieces(old)]


def _back_in_pieces(back: Callable[..., None], into: Bits, blocks: list[Any]) -> None:
    for piece, found in zip(_pieces(into), blocks, strict=True):
        back(into[piece], *found)


def _pieces(whole: Bits) -> list[slice]:
    step = PIECE // whole.itemsize
    return [slice(start, start + step) for start in range(0, len(whole), step)]


def measure(old: Bits, new: Bits) -> dict[str, tuple[float, float, float]]:
    """Return bytes, encoding and applying of each encoding, relative to a full copy."""
    into = old.copy()
    whole = [(into.ctypes.data, new.ctypes.data, new.nbytes)]
    sizes: dict[str, int] = {}
    samples: dict[str, list[tuple[float, float]]] = {}
    copies = []
    for _ in range(TURNS):
        copies.append(_timed(copy_pieces, whole, threads=1)[0])
        for name, (there, back) in ENCODINGS.items():
            np.copyto(into, old)
            encoding, blocks = _timed(_in_pieces, there, old, new)
            applying, _ = _timed(_back_in_pieces, back, into, blocks)
            assert np.array_equal(into, new)
            sizes[name] = sum(getattr(p, "nbytes", 0) for block in blocks for p in block)
            samples.setdefault(name, []).append((encoding, applying))
    copy = statistics.median(copies)
    return {
        name: (
            sizes[name] / old.nbytes,
            statistics.median(e for e, _ in taken) / copy,
            statistics.median(a for _, a in taken) / copy,
        )
        for name, taken in samples.items()
    } | {"copy": (1.0, 0.0, old.nbytes / copy / 1e9)}


def main() -> None:
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    random = np.random.default_rng(0)
    old = random.integers(0, 1 << 16, size << 19, dtype=np.uint16)
    print(
        f"{'changed':>8} {'encoding':12} {'bytes':>7} {'encode':>8} {'apply':>7}   (full copy = 1)"
    )
    for share in SHARES:
        new = old.copy()
        at = np.flatnonzero(random.random(len(old)) < share)
        new[at] ^= random.integers(1, 9, len(at), dtype=np.uint16)
        found = measure(old, new)
        *_, speed = found.pop("copy")
        for name, (nbytes, encoding, applying) in found.items():
            print(f"{share:8.1%} {name:12} {nbytes:7.4f} {encoding:8.2f} {applying:7.2f}")
        print(f"{'':8} full copy at {speed:.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
