"""``float32`` weights as a ``bfloat16`` reader sees them, in the bytes of their image.

A trainer with ``float32`` masters changes nearly all of their bits at every step, and few of those
that are left after rounding. So what a ``bfloat16`` reader keeps, and what its deltas are made of,
has each ``float32`` element rounded to the nearest value that ``bfloat16`` has, in ``float32``'s
format: every byte stays at its place, and what the reader rounds again does not change.

It does not need torch, and so spares the processes that encode the seconds of its import.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Spans = tuple[tuple[int, int], ...]
"""Where ``float32`` elements lie in an image: first byte and the one after the last, in order."""
BLOCK = 1 << 17
"""Elements that are rounded at a time: they stay in the cache."""


def rounded(image: Array, start: int, stop: int, spans: Spans) -> Array:
    """Bytes ``start`` to ``stop`` of an image, elements rounded; a copy if there are any."""
    found = image[start:stop]
    within = [(max(a, start), min(b, stop)) for a, b in spans if a < stop and b > start]
    if within:
        found = found.copy()
        for first, last in within:
            _round(found[first - start : last - start].view(np.uint32))
    return found


def round_in_place(image: Array, spans: Spans, each: Callable[..., Iterable[Any]] = map) -> None:
    """Round the elements of an image where they lie; ``each`` goes over parts of them."""
    parts = [
        image[at : min(at + 4 * BLOCK, stop)]
        for start, stop in spans
        for at in range(start, stop, 4 * BLOCK)
    ]
    for _ in each(lambda part: _round(part.view(np.uint32)), parts):
        pass


def merged(spans: Sequence[tuple[int, int]]) -> Spans:
    """Spans in order, those that overlap or touch as one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)


def _round(bits: Array) -> None:
    """To nearest, ties to even, as torch does; a NaN becomes the quiet one."""
    for start in range(0, len(bits), BLOCK):
        block = bits[start : start + BLOCK]
        nan = np.isnan(block.view(np.float32))
        block += ((block >> 16) & 1) + np.uint32(0x7FFF)
        block &= np.uint32(0xFFFF0000)
        if nan.any():
            block[nan] = 0x7FC00000
