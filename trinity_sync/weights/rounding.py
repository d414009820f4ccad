"""Round ``float32`` weights to ``bfloat16`` precision in the bytes of their image.

A trainer with ``float32`` master weights changes nearly all of their bits at every step, but few of
those that remain after rounding. So a ``bfloat16`` reader keeps, and its deltas compare, each
``float32`` element rounded to the nearest ``bfloat16`` value, in ``float32`` format: every byte
stays in place, and rounding again changes nothing.

The module does not import torch, which saves the processes that encode deltas seconds of import.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Spans = tuple[tuple[int, int], ...]
"""Byte ranges of ``float32`` elements in an image, [first, last), in order."""
BLOCK = 1 << 17
"""Elements that are rounded at a time: they stay in the cache."""


def read_rounded(image: Array, start: int, stop: int, spans: Spans) -> Array:
    """Return bytes ``[start, stop)`` of an image with the elements in ``spans`` rounded.

    They are a copy if anything is rounded, otherwise a view.
    """
    found = image[start:stop]
    within = [(max(a, start), min(b, stop)) for a, b in spans if a < stop and b > start]
    if within:
        found = found.copy()
        for first, last in within:
            _round(found[first - start : last - start].view(np.uint32))
    return found


def round_in_place(
    image: Array, spans: Spans, map_pieces: Callable[..., Iterable[Any]] = map
) -> None:
    """Round the elements in ``spans`` of an image, ``uint8`` of shape ``[nbytes]``."""
    pieces = [
        image[at : min(at + 4 * BLOCK, stop)]
        for start, stop in spans
        for at in range(start, stop, 4 * BLOCK)
    ]
    for _ in map_pieces(lambda piece: _round(piece.view(np.uint32)), pieces):
        pass


def merge_spans(spans: Sequence[tuple[int, int]]) -> Spans:
    """Return spans in order, with those that overlap or touch merged."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)


def _round(bits: Array) -> None:
    """Round to nearest, ties to even, as torch does; a NaN becomes the quiet NaN."""
    for start in range(0, len(bits), BLOCK):
        block = bits[start : start + BLOCK]
        nan = np.isnan(block.view(np.float32))
        block += ((block >> 16) & 1) + np.uint32(0x7FFF)
        block &= np.uint32(0xFFFF0000)
        if nan.any():
            block[nan] = 0x7FC00000
