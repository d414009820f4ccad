"""Deltas: the zstd-compressed XOR of old and new bytes, with the checksum of the result.

A step of reinforcement learning changes few of the ``bfloat16`` weights: most updates are smaller
than half of the last bit. A delta is exact, whatever the dtypes are, so NaN payloads and ``-0.0``
count. It is that of one rank's image, in pieces of 4 MiB, which threads share (``object_store``),
or that of a tensor in a folder (``folder.delta``). ``docs/benchmarks/weights.md`` compares other
encodings.

A reader may ask for ``float32`` weights in ``bfloat16`` precision. A trainer with ``float32``
master weights changes nearly all of their bits at every step, but few of those that remain after
rounding. So a ``bfloat16`` reader keeps, and its deltas compare, each ``float32`` element rounded
to the nearest ``bfloat16`` value, in ``float32`` format: every byte stays in place, and rounding
again changes nothing.

The module does not import torch, which saves the processes that encode deltas seconds of import.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard

from trinity_sync.errors import DeltaError

Array = np.ndarray[Any, np.dtype[Any]]
"""``uint8`` of one dimension."""


class Change(NamedTuple):
    """The change of some bytes."""

    content: bytes
    """Compressed XOR of the old and the new bytes; empty if they are equal."""
    checksum: str
    """Of the new bytes."""


def compute_checksum(content: Array) -> str:
    """Return the XXH3-128 checksum of bytes."""
    return xxhash.xxh3_128_hexdigest(content.data)


def encode_change(old: Array, new: Array) -> Change:
    """Return the change between bytes of the same number."""
    difference = old ^ new
    content = b""
    if difference.any():
        content = zstandard.ZstdCompressor(level=1).compress(difference.data)
    return Change(content, compute_checksum(new))


def apply_change(into: Array, change: Change, what: str) -> None:
    """Turn old bytes into new ones, in place; ``what`` names them in errors.

    Raises:
        DeltaError: the change is torn, altered, or of other bytes, and ``into`` is neither the old
            nor the new.
    """
    try:
        if change.content:
            difference = zstandard.ZstdDecompressor().decompress(change.content)
            into ^= np.frombuffer(difference, np.uint8)
    except (zstandard.ZstdError, ValueError) as error:
        raise DeltaError(
            f"the delta of {what} is torn or altered ({error}); read the full version"
        ) from error
    if compute_checksum(into) != change.checksum:
        raise DeltaError(
            f"the delta of {what} does not give what was published: the checksum differs. The "
            "delta, or the bytes that it was applied to, were altered; read the full version"
        )


PIECE = 4 << 20
"""Bytes of an image that make one change."""
ImageDelta = list[Change]
"""The changes of all pieces of an image."""
Spans = tuple[tuple[int, int], ...]
"""Byte ranges of ``float32`` elements in an image, [first, last), in order."""
MapPieces = Callable[..., Iterable[Any]]
"""``map``, or that of an executor, whose threads then share the pieces."""


def encode_delta(
    old: Array, new: Array, spans: Spans = (), map_pieces: MapPieces = map
) -> ImageDelta:
    """Return the delta from one image to another, both ``uint8`` of shape ``[nbytes]``.

    ``float32`` elements in ``spans`` are compared and sent rounded. If an image is overwritten
    meanwhile, the delta is meaningless: the caller has to check for that.
    """

    def encode_piece(start: int) -> Change:
        before, after = (read_rounded(each, start, start + PIECE, spans) for each in (old, new))
        return encode_change(before, after)

    return list(map_pieces(encode_piece, range(0, len(new), PIECE)))


def apply_delta(delta: ImageDelta, into: Array, what: str, map_pieces: MapPieces = map) -> None:
    """Turn an image into the one that the delta leads to, in place; ``what`` names it in errors.

    ``into`` has the bytes of the old image, ``uint8`` of shape ``[nbytes]``. Nothing else may read
    it meanwhile.

    Raises:
        DeltaError: the delta is torn, altered, or of another image, and ``into`` now holds neither
            image.
    """
    pieces = [into[start : start + PIECE] for start in range(0, len(into), PIECE)]
    if len(pieces) != len(delta):
        raise DeltaError(
            f"the delta of {what} has {len(delta)} pieces, and the image {len(pieces)}; read the "
            "full version"
        )
    for _ in map_pieces(lambda piece, change: apply_change(piece, change, what), pieces, delta):
        pass


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


def round_in_place(image: Array, spans: Spans, map_pieces: MapPieces = map) -> None:
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
