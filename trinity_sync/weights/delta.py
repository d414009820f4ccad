"""Deltas: the bitwise difference between two images of a rank's weights, in one buffer.

A step of reinforcement learning changes few of the ``bfloat16`` weights: most updates are smaller
than half of the last bit. A delta holds the changed elements of an image, compared as 16-bit
integers whatever the dtypes are, so NaN payloads and ``-0.0`` count. It is exact, except that a
reader may ask for rounded elements.

Each piece of 4 MiB is encoded by itself, so it stays in the cache and threads share the work. Each
takes the smallest encoding (``docs/benchmarks/weights.md`` compares others): *unchanged*; *gaps*,
the distance of each changed element from the one before in 1, 2 or 4 bytes, followed by the
elements; *full*, also where gaps would take half of it, because they cost more time. A distance too
large for its width is bridged by elements that did not change, so applying gaps is a cumulative sum
and one scatter, without special cases.

A buffer consists of: magic, XXH3-128 of all that follows, length of the header, header (JSON),
blocks. The header names both images, and has the digest of each piece of the new one, so a base
with the wrong bytes is detected before the result is used.

A reader may ask for ``float32`` weights in ``bfloat16`` precision. A trainer with ``float32``
master weights changes nearly all of their bits at every step, but few of those that remain after
rounding. So a ``bfloat16`` reader keeps, and its deltas compare, each ``float32`` element rounded
to the nearest ``bfloat16`` value, in ``float32`` format: every byte stays in place, and rounding
again changes nothing.

The module does not import torch, which saves the processes that encode deltas seconds of import.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from trinity_sync.errors import DeltaError

Array = np.ndarray[Any, np.dtype[Any]]
"""In one dimension: ``uint8``, or a piece as ``uint16``."""
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


MAGIC = b"TSDELTA2"
HEADER_OFFSET = len(MAGIC) + 16
PIECE = 4 << 20
ALIGNMENT = 8
UNCHANGED, FULL = 0, 8
MAX_GAP = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}
"""Encodings of a piece by gaps: bytes of one gap -> the largest gap."""

MapPieces = Callable[..., Iterable[Any]]
"""``map``, or that of an executor, whose threads then share the pieces."""


def encode_delta(
    old: Array,
    new: Array,
    *,
    base: str,
    version: str,
    spans: Spans = (),
    map_pieces: MapPieces = map,
) -> Array:
    """Return the delta, in bytes, from one image to another, both ``uint8`` of shape ``[nbytes]``.

    ``base`` and ``version`` are the names of the two, which `apply_delta` compares. ``float32``
    elements in ``spans`` are compared and sent rounded. If an image is overwritten meanwhile, the
    delta is meaningless: the caller has to check for that.
    """

    def encode_piece(start: int) -> tuple[int, list[Array], str]:
        """Return a piece's encoding, its blocks, and the digest of its new bytes."""
        before, after = (
            _as_words(read_rounded(image, start, start + PIECE, spans)) for image in (old, new)
        )
        return *_encode_piece(before, after), xxhash.xxh3_128_hexdigest(after.data)

    found = list(map_pieces(encode_piece, range(0, len(new), PIECE)))
    header = {
        "base": base,
        "version": version,
        "nbytes": len(new),
        "pieces": [
            (encoding, len(blocks[0]) if blocks else 0, digest)
            for encoding, blocks, digest in found
        ],
    }
    return _serialize(json.dumps(header).encode(), [b for _, blocks, _ in found for b in blocks])


def apply_delta(
    delta: Array, into: Array, *, base: str, version: str, map_pieces: MapPieces = map
) -> None:
    """Turn the image ``base`` into the image ``version``, in place.

    ``into`` has the bytes of ``base``, ``uint8`` of shape ``[nbytes]``. Nothing else may read it
    meanwhile.

    Raises:
        DeltaError: the delta is torn or altered, or is between other images, and nothing was
            written; or ``into`` did not hold ``base``, and now holds neither image.
    """
    header, at = _read_header(delta)
    expected = {"base": base, "version": version, "nbytes": len(into)}
    if found := {name: header[name] for name in expected if header[name] != expected[name]}:
        raise DeltaError(
            f"the delta is not from {base} to {version}, {len(into):,} bytes: it says {found}; "
            "load the full version"
        )
    starts = []
    pieces = [_as_words(into[start : start + PIECE]) for start in range(0, len(into), PIECE)]
    for piece, (encoding, count, _) in zip(pieces, header["pieces"], strict=True):
        starts.append(at)
        at += sum(_align(count * size) for size in _item_sizes(encoding, piece))

    def apply_piece(piece: Array, start: int, described: tuple[int, int, str]) -> None:
        encoding, count, digest = described
        _apply_piece(piece, encoding, count, delta[start:])
        if xxhash.xxh3_128_hexdigest(piece.data) != digest:
            raise DeltaError(
                f"the delta from {base} does not give {version}: the bytes that it was applied to "
                "had been altered; load the full version"
            )

    for _ in map_pieces(apply_piece, pieces, starts, header["pieces"]):
        pass


def _encode_piece(old: Array, new: Array) -> tuple[int, list[Array]]:
    """Return the smallest encoding of a piece, and its blocks."""
    differs = old != new
    changed = int(np.count_nonzero(differs))
    if not changed:
        return UNCHANGED, []
    size = new.itemsize
    if 2 * changed * (1 + size) >= new.nbytes:
        return FULL, [new]
    gaps = np.diff(np.flatnonzero(differs), prepend=0)
    width = 1
    if gaps.max() > MAX_GAP[1]:
        width = min(MAX_GAP, key=lambda w: (changed + _find_bridges(gaps, w)[1].sum()) * (w + size))
    steps = _bridge_gaps(gaps, width)
    return width, [steps, new[np.cumsum(steps, dtype=np.int64)]]


def _find_bridges(gaps: Array, width: int) -> tuple[Array, Array]:
    """Return which gaps are too wide, and how many unchanged elements bridge each of them."""
    wide = np.flatnonzero(gaps > MAX_GAP[width])
    return wide, (gaps[wide] - 1) // MAX_GAP[width]


def _bridge_gaps(gaps: Array, width: int) -> Array:
    wide, bridges = _find_bridges(gaps, width)
    if not len(wide):
        return gaps.astype(f"u{width}")
    rest = gaps.copy()
    rest[wide] -= bridges * MAX_GAP[width]
    return np.insert(rest.astype(f"u{width}"), np.repeat(wide, bridges), MAX_GAP[width])


def _apply_piece(piece: Array, encoding: int, count: int, blocks: Array) -> None:
    if encoding == FULL:
        piece[:] = blocks[: piece.nbytes].view(piece.dtype)
    elif encoding != UNCHANGED:
        steps = blocks[: count * encoding].view(f"u{encoding}")
        start = _align(steps.nbytes)
        values = blocks[start : start + count * piece.itemsize].view(piece.dtype)
        piece[np.cumsum(steps, dtype=np.int64)] = values


def _item_sizes(encoding: int, piece: Array) -> list[int]:
    """Return the bytes of one element of each block of a piece."""
    return {UNCHANGED: [], FULL: [piece.itemsize]}.get(encoding, [encoding, piece.itemsize])


def _serialize(header: bytes, blocks: list[Array]) -> Array:
    parts = [np.frombuffer(part, np.uint8) for part in (len(header).to_bytes(8, "little"), header)]
    parts += [block.view(np.uint8) for block in blocks]
    delta = np.zeros(HEADER_OFFSET + sum(_align(len(part)) for part in parts), np.uint8)
    at = HEADER_OFFSET
    for part in parts:
        delta[at : at + len(part)] = part
        at += _align(len(part))
    digest = xxhash.xxh3_128_digest(delta[HEADER_OFFSET:].data)
    delta[:HEADER_OFFSET] = np.frombuffer(MAGIC + digest, np.uint8)
    return delta


def _read_header(delta: Array) -> tuple[dict[str, Any], int]:
    """Return the header of a valid delta, and the byte at which its blocks begin."""
    if delta[: len(MAGIC)].tobytes() != MAGIC:
        raise DeltaError(
            f"these {len(delta)} bytes are no delta of this version of trinity_sync; load the "
            "full version, or install the same version of trinity_sync on both sides"
        )
    expected = delta[len(MAGIC) : HEADER_OFFSET].tobytes()
    if xxhash.xxh3_128_digest(delta[HEADER_OFFSET:].data) != expected:
        raise DeltaError(
            f"the delta of {len(delta)} bytes was truncated or altered in transit; load the full "
            "version"
        )
    length = int(delta[HEADER_OFFSET : HEADER_OFFSET + 8].view(np.uint64)[0])
    header = json.loads(delta[HEADER_OFFSET + 8 : HEADER_OFFSET + 8 + length].tobytes())
    return header, HEADER_OFFSET + 8 + _align(length)


def _as_words(piece: Array) -> Array:
    """View a piece as 16-bit integers; the last piece of an odd length stays as it is."""
    return piece if len(piece) % 2 else piece.view(np.uint16)


def _align(size: int) -> int:
    return -size % ALIGNMENT + size
