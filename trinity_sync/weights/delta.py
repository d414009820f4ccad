"""What changed between two images of a rank's weights, bit for bit, in one buffer.

A step of reinforcement learning changes few of the ``bfloat16`` weights: most updates are smaller
than half of the last bit. A delta holds what changed of an image, compared as 16-bit integers
whatever the dtypes are, so NaN payloads and ``-0.0`` count. It says nothing about closeness, and
rounds nothing but what a reader wants rounded. Images of one layout have their tensors at the same
places, so no more need be known of them than their bytes.

Pieces of 4 MiB are worked on by themselves, so a piece stays in the cache and threads can share
the work. Each piece takes the smallest of: *unchanged*; *gaps*, the distance of each changed
element from the one before in 1, 2 or 4 bytes, then the elements; *whole*, also where gaps would
take half of it, because they cost more time. A distance that is too large for its width is bridged
by elements that did not change, so applying is a running sum and one scatter, without a case to
tell apart.

``benchmarks/delta.py`` decided. With 1 % of a bf16 tensor changed, gaps take 1.6 % of its bytes,
plain indices 3.0 %, a bit mask 7.3 %, xor with zlib 2.3 % at twenty times the time to apply.

A buffer is: magic, XXH3-128 of all that follows, length of the header, header (JSON), blocks. The
header names both images, and the digest that each piece shall have: bytes that were not the base
are noticed by whoever applies the delta, before use.

It does not need torch, and so spares the processes that encode the seconds of its import.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xxhash

from trinity_sync.errors import DeltaError
from trinity_sync.weights.rounding import Spans, rounded

MAGIC = b"TSDELTA2"
START = len(MAGIC) + 16
PIECE = 4 << 20
ALIGNED = 8
UNCHANGED, WHOLE = 0, 8
WIDEST = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}
"""Kinds of pieces that are gaps, by the bytes of one, and the widest gap of each."""

Array = np.ndarray[Any, np.dtype[Any]]
"""In one dimension: ``uint8``, or a piece as ``uint16``."""
Each = Callable[..., Iterable[Any]]
"""``map``, or that of an executor, whose threads share the pieces then."""


def encode(
    old: Array, new: Array, *, base: str, version: str, spans: Spans = (), each: Each = map
) -> Array:
    """What turns ``old`` into ``new``.

    Args:
        old: an image that the reader has, as ``uint8``.
        new: the one that it shall have, of the same length.
        base: name of ``old``, which `apply` compares.
        version: name of ``new``, likewise.
        spans: of ``float32`` elements that are compared, and sent, rounded; see ``rounding``.
        each: goes over the pieces.

    Returns:
        The delta, as ``uint8``. If ``old`` or ``new`` changed meanwhile, it is one of nothing that
        there ever was: the caller has to look.
    """

    def compared(start: int) -> tuple[int, list[Array], str]:
        """A piece's kind, its blocks, and the digest of what it shall be."""
        before, after = (
            _numbers(rounded(image, start, start + PIECE, spans)) for image in (old, new)
        )
        return *_smallest(before, after), xxhash.xxh3_128_hexdigest(after.data)

    found = list(each(compared, range(0, len(new), PIECE)))
    header = {
        "base": base,
        "version": version,
        "nbytes": len(new),
        "pieces": [(kind, len(blocks[0]) if blocks else 0, has) for kind, blocks, has in found],
    }
    return _buffer(json.dumps(header).encode(), [b for _, blocks, _ in found for b in blocks])


def apply(delta: Array, into: Array, *, base: str, version: str, each: Each = map) -> None:
    """Turn the image ``base`` into that of ``version``, in place.

    Args:
        delta: what `encode` made.
        into: the bytes of ``base``, as ``uint8``. Not read meanwhile.
        base: name of what is in ``into``.
        version: name of what shall be there.
        each: goes over the pieces.

    Raises:
        DeltaError: the delta is torn or altered, or leads elsewhere: nothing was written. Or the
            result is not what was encoded, because ``into`` was not what it is said to be: then it
            is neither image and has to be loaded whole.
    """
    header, at = _opened(delta)
    asked = {"base": base, "version": version, "nbytes": len(into)}
    if found := {name: header[name] for name in asked if header[name] != asked[name]}:
        raise DeltaError(
            f"the delta is not from {base} to {version}, {len(into):,} bytes: it says {found}; "
            "load the version whole"
        )
    starts = []
    pieces = [_numbers(into[start : start + PIECE]) for start in range(0, len(into), PIECE)]
    for piece, (kind, count, _) in zip(pieces, header["pieces"], strict=True):
        starts.append(at)
        at += sum(_room(count * size) for size in _sizes(kind, piece))

    def patch(piece: Array, start: int, said: tuple[int, int, str]) -> None:
        kind, count, digest = said
        _patch(piece, kind, count, delta[start:])
        if xxhash.xxh3_128_hexdigest(piece.data) != digest:
            raise DeltaError(
                f"the delta from {base} does not give {version}: what it was applied to had been "
                "altered; load the version whole"
            )

    for _ in each(patch, pieces, starts, header["pieces"]):
        pass


def _smallest(old: Array, new: Array) -> tuple[int, list[Array]]:
    differs = old != new
    changed = int(np.count_nonzero(differs))
    if not changed:
        return UNCHANGED, []
    size = new.itemsize
    if 2 * changed * (1 + size) >= new.nbytes:
        return WHOLE, [new]
    gaps = np.diff(np.flatnonzero(differs), prepend=0)
    width = 1
    if gaps.max() > WIDEST[1]:
        width = min(WIDEST, key=lambda w: (changed + _bridges(gaps, w)[1].sum()) * (w + size))
    steps = _steps(gaps, width)
    return width, [steps, new[np.cumsum(steps, dtype=np.int64)]]


def _bridges(gaps: Array, width: int) -> tuple[Array, Array]:
    """Which gaps are too wide, and how many unchanged elements each of them needs on its way."""
    wide = np.flatnonzero(gaps > WIDEST[width])
    return wide, (gaps[wide] - 1) // WIDEST[width]


def _steps(gaps: Array, width: int) -> Array:
    wide, bridges = _bridges(gaps, width)
    if not len(wide):
        return gaps.astype(f"u{width}")
    rest = gaps.copy()
    rest[wide] -= bridges * WIDEST[width]
    return np.insert(rest.astype(f"u{width}"), np.repeat(wide, bridges), WIDEST[width])


def _patch(piece: Array, kind: int, count: int, blocks: Array) -> None:
    if kind == WHOLE:
        piece[:] = blocks[: piece.nbytes].view(piece.dtype)
    elif kind != UNCHANGED:
        steps = blocks[: count * kind].view(f"u{kind}")
        start = _room(steps.nbytes)
        values = blocks[start : start + count * piece.itemsize].view(piece.dtype)
        piece[np.cumsum(steps, dtype=np.int64)] = values


def _sizes(kind: int, piece: Array) -> list[int]:
    """Bytes of one element of each block that a piece of this kind has."""
    return {UNCHANGED: [], WHOLE: [piece.itemsize]}.get(kind, [kind, piece.itemsize])


def _buffer(header: bytes, blocks: list[Array]) -> Array:
    spread = [np.frombuffer(part, np.uint8) for part in (len(header).to_bytes(8, "little"), header)]
    spread += [block.view(np.uint8) for block in blocks]
    delta = np.zeros(START + sum(_room(len(part)) for part in spread), np.uint8)
    at = START
    for part in spread:
        delta[at : at + len(part)] = part
        at += _room(len(part))
    digest = xxhash.xxh3_128_digest(delta[START:].data)
    delta[:START] = np.frombuffer(MAGIC + digest, np.uint8)
    return delta


def _opened(delta: Array) -> tuple[dict[str, Any], int]:
    """The header of a whole delta, and where its blocks begin."""
    if delta[: len(MAGIC)].tobytes() != MAGIC:
        raise DeltaError(
            f"these {len(delta)} bytes are no delta of this version of trinity_sync; load the "
            "version whole, or install the same version on both sides"
        )
    if xxhash.xxh3_128_digest(delta[START:].data) != delta[len(MAGIC) : START].tobytes():
        raise DeltaError(
            f"the delta of {len(delta)} bytes was cut or altered on its way; load the version whole"
        )
    length = int(delta[START : START + 8].view(np.uint64)[0])
    header = json.loads(delta[START + 8 : START + 8 + length].tobytes())
    return header, START + 8 + _room(length)


def _numbers(piece: Array) -> Array:
    """As 16-bit integers, but for the last piece of an odd length."""
    return piece if len(piece) % 2 else piece.view(np.uint16)


def _room(size: int) -> int:
    return -size % ALIGNED + size
