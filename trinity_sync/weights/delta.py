"""What changed between two versions of a rank's weights, bit for bit, in one buffer.

A step of reinforcement learning changes few of the ``bfloat16`` weights: most updates are smaller
than half of the last bit. A delta holds the elements whose bits changed, compared as integers, so
NaN payloads and ``-0.0`` count. It says nothing about closeness and rounds nothing.

Tensors are worked on in pieces of 4 MiB, so the memory beside the delta itself is some tens of MiB
and a piece stays in the cache. Each piece takes the smallest of: *unchanged*; *gaps*, the distance
of each changed element from the one before in 1, 2 or 4 bytes, then the elements; *whole*. A
distance that is too large for its width is bridged by elements that did not change, so applying is
a running sum and one scatter, without a case to tell apart.

``benchmarks/delta.py`` decided. With 1 % of a bf16 tensor changed, gaps take 1.6 % of its bytes,
plain indices 3.0 %, a bit mask 7.3 %, xor with zlib 2.3 % at twenty times the time to apply. A mask
is smaller above 12.5 %, by 9 % of the whole at most, and applied four times more slowly.

A buffer is: magic, XXH3-128 of all that follows, length of the header, header (JSON), blocks. The
header lists every tensor of the new version, and a digest of the resulting bytes of each one that
changed: weights that were not the base are noticed by whoever applies the delta, before use.
"""

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from trinity_sync.errors import ConfigError, DeltaError

MAGIC = b"TSDELTA1"
PIECE = 4 << 20
ALIGNED = 8
UNCHANGED, WHOLE = 0, 8
WIDEST = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}
"""Kinds of pieces that are gaps, by the bytes of one, and the widest gap of each."""

Bits = np.ndarray[Any, np.dtype[Any]]
"""A tensor's elements as unsigned integers, in one dimension."""


@dataclass(frozen=True)
class Delta:
    """What turns the weights of ``base_version`` into those of ``version``."""

    base_version: int
    version: int
    data: torch.Tensor
    """All of it, versions included: ``uint8``, one dimension, on the CPU."""


def encode(
    base: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    *,
    base_version: int,
    version: int,
) -> Delta:
    """Compare two versions of the same rank's weights.

    Args:
        base: what the reader has: dense tensors on the CPU, of any dtype. Not changed meanwhile.
        new: what the reader shall have. A tensor that ``base`` lacks, or has with another shape or
            dtype, is taken whole; one that only ``base`` has is removed by :func:`apply`.
        base_version: step of ``base``.
        version: step of ``new``.

    Raises:
        ConfigError: a tensor is not dense or not on the CPU.
    """
    _require_dense(base)
    _require_dense(new)
    records, blocks = [], []
    for name, tensor in new.items():
        old, bits = base.get(name), _bits(tensor)
        if old is not None and _form(old) != _form(tensor):
            old = None
        pieces = _compared(None if old is None else _bits(old), bits)
        record: dict[str, Any] = {"name": name, "form": _form(tensor), "replaces": old is None}
        if old is None or any(kind != UNCHANGED for kind, _ in pieces):
            record["digest"] = xxhash.xxh3_128_hexdigest(bits.data)
            record["pieces"] = [(kind, sum(map(len, parts[:1]))) for kind, parts in pieces]
            blocks += [part for _, parts in pieces for part in parts]
        records.append(record)
    header = {
        "base_version": base_version,
        "version": version,
        "tensors": records,
        "removed": [name for name in base if name not in new],
    }
    return Delta(base_version, version, _buffer(json.dumps(header).encode(), blocks))


def apply(
    delta: "Delta | torch.Tensor | bytes | bytearray | memoryview",
    into: MutableMapping[str, torch.Tensor],
    *,
    version: int,
) -> None:
    """Turn the weights of the delta's base into those of its version, in place.

    The buffer, the versions and the names, shapes and dtypes of all tensors are checked before the
    first byte is written. Tensors that are new or have another shape or dtype are put into the
    mapping, others are written into.

    Args:
        delta: what :func:`encode` made, or its bytes.
        into: the weights of ``version``: dense tensors on the CPU. Not read meanwhile.
        version: step of what is in ``into``.

    Raises:
        DeltaError: the bytes are torn or altered, the delta is of another base, or tensors are
            missing, unknown or of another shape: nothing was written. Or the result is not the
            version that was encoded, because ``into`` was not what it is said to be: then it is
            neither version and has to be loaded whole.
        ConfigError: a tensor is not dense or not on the CPU.
    """
    _require_dense(into)
    data = _as_bytes(delta)
    header, at = _opened(data)
    _check_fits(header, into, version)
    for record in header["tensors"]:
        if "pieces" not in record:
            continue
        name, replaces = record["name"], record["replaces"]
        tensor = _empty(record["form"]) if replaces else into[name]
        bits = _bits(tensor)
        digest = xxhash.xxh3_128()
        for piece, (kind, count) in zip(_pieces(bits), record["pieces"], strict=True):
            at = _patch(piece, kind, count, data, at)
            digest.update(piece.data)
        if digest.hexdigest() != record["digest"]:
            raise DeltaError(
                f"tensor {name!r} is not that of version {header['version']} after the delta from "
                f"version {version}: what it was applied to had been altered; load version "
                f"{header['version']} whole"
            )
        if replaces:
            into[name] = tensor
        elif not tensor.is_contiguous():
            tensor.detach().copy_(_tensor_of(bits, record["form"]))
    for name in header["removed"]:
        del into[name]


def _compared(old: Bits | None, new: Bits) -> list[tuple[int, list[Bits]]]:
    """Each piece of ``new``: its kind and its blocks."""
    pieces = _pieces(new)
    if old is None:
        return [(WHOLE, [piece]) for piece in pieces]
    return [_smallest(*pair) for pair in zip(_pieces(old), pieces, strict=True)]


def _smallest(old: Bits, new: Bits) -> tuple[int, list[Bits]]:
    differs = old != new
    changed = int(np.count_nonzero(differs))
    if not changed:
        return UNCHANGED, []
    size = new.itemsize
    if changed * (1 + size) >= new.nbytes:
        return WHOLE, [new]
    gaps = np.diff(np.flatnonzero(differs), prepend=0)
    width = 1
    if gaps.max() > WIDEST[1]:
        width = min(WIDEST, key=lambda w: (changed + _bridges(gaps, w)[1].sum()) * (w + size))
    steps = _steps(gaps, width)
    if len(steps) * (width + size) >= new.nbytes:
        return WHOLE, [new]
    return width, [steps, new[np.cumsum(steps, dtype=np.int64)]]


def _bridges(gaps: Bits, width: int) -> tuple[Bits, Bits]:
    """Which gaps are too wide, and how many unchanged elements each of them needs on its way."""
    wide = np.flatnonzero(gaps > WIDEST[width])
    return wide, (gaps[wide] - 1) // WIDEST[width]


def _steps(gaps: Bits, width: int) -> Bits:
    wide, bridges = _bridges(gaps, width)
    if not len(wide):
        return gaps.astype(f"u{width}")
    rest = gaps.copy()
    rest[wide] -= bridges * WIDEST[width]
    return np.insert(rest.astype(f"u{width}"), np.repeat(wide, bridges), WIDEST[width])


def _patch(piece: Bits, kind: int, count: int, data: Bits, at: int) -> int:
    """Write one piece; returns where the next one's blocks begin."""
    if kind == UNCHANGED:
        return at
    if kind == WHOLE:
        values, at = _block(data, at, count, piece.dtype)
        piece[:] = values
        return at
    steps, at = _block(data, at, count, np.dtype(f"u{kind}"))
    values, at = _block(data, at, count, piece.dtype)
    piece[np.cumsum(steps, dtype=np.int64)] = values
    return at


def _buffer(header: bytes, blocks: list[Bits]) -> torch.Tensor:
    start = len(MAGIC) + 16
    spread = [np.frombuffer(part, np.uint8) for part in (len(header).to_bytes(8, "little"), header)]
    spread += [block.view(np.uint8) for block in blocks]
    total = start + sum(_room(len(part)) for part in spread)
    buffer = torch.zeros(total, dtype=torch.uint8)
    data, at = buffer.numpy(), start
    for part in spread:
        data[at : at + len(part)] = part
        at += _room(len(part))
    digest = xxhash.xxh3_128_digest(data[start:].data)
    data[:start] = np.frombuffer(MAGIC + digest, np.uint8)
    return buffer


def _opened(data: Bits) -> tuple[dict[str, Any], int]:
    """The header of a whole buffer, and where its blocks begin."""
    start = len(MAGIC) + 16
    if data[: len(MAGIC)].tobytes() != MAGIC:
        raise DeltaError(
            f"these {len(data)} bytes are no delta of this version of trinity_sync; get the "
            "weights whole, or install the same version on both sides"
        )
    if xxhash.xxh3_128_digest(data[start:].data) != data[len(MAGIC) : start].tobytes():
        raise DeltaError(
            f"the delta of {len(data)} bytes was cut or altered on its way; fetch it again, or get "
            "the weights whole"
        )
    length = int(data[start : start + 8].view(np.uint64)[0])
    header = json.loads(data[start + 8 : start + 8 + length].tobytes())
    return header, start + 8 + _room(length)


def _check_fits(header: dict[str, Any], into: Mapping[str, torch.Tensor], version: int) -> None:
    base = header["base_version"]
    if version != base:
        raise DeltaError(
            f"the delta leads from version {base} to {header['version']}, but these weights are "
            f"version {version}; get a delta from {version}, or the weights whole"
        )
    for record in header["tensors"]:
        if record["replaces"]:
            continue
        found = into.get(record["name"])
        if found is None or _form(found) != record["form"]:
            has = "missing" if found is None else f"{_form(found)}"
            raise DeltaError(
                f"tensor {record['name']!r} is {record['form']} in version {base} and {has} here; "
                "these are not the weights that the delta was made for: load them whole"
            )
    known = {record["name"] for record in header["tensors"]} | set(header["removed"])
    unknown = [name for name in into if name not in known]
    if unknown or not all(name in into for name in header["removed"]):
        raise DeltaError(
            f"version {base} has other tensors than these weights (first: "
            f"{(unknown or header['removed'])[0]!r}), so the delta was not made for them; load "
            "them whole"
        )


def _as_bytes(delta: "Delta | torch.Tensor | bytes | bytearray | memoryview") -> Bits:
    found = delta.data if isinstance(delta, Delta) else delta
    if isinstance(found, torch.Tensor):
        return found.detach().cpu().contiguous().numpy()
    return np.frombuffer(found, np.uint8)


def _form(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def _empty(form: list[Any]) -> torch.Tensor:
    return torch.empty(form[1:], dtype=getattr(torch, form[0]))


def _require_dense(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        dense = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not dense or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ConfigError(
                f"tensor {name!r} is a {type(tensor).__name__} ({tensor.layout}, {tensor.device}), "
                "and deltas are made of dense tensors on the CPU; pass tensor.to_local(), "
                "tensor.cpu() or tensor.to_dense()"
            )


def _bits(tensor: torch.Tensor) -> Bits:
    """The tensor's memory, or a copy where it is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().view(f"u{min(tensor.element_size(), 8)}")


def _tensor_of(bits: Bits, form: list[Any]) -> torch.Tensor:
    flat = torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, form[0]))
    return flat.reshape(form[1:])


def _pieces(bits: Bits) -> list[Bits]:
    step = PIECE // bits.itemsize
    return [bits[start : start + step] for start in range(0, len(bits), step)]


def _block(data: Bits, at: int, count: int, dtype: np.dtype[Any]) -> tuple[Bits, int]:
    size = count * dtype.itemsize
    return data[at : at + size].view(dtype), at + _room(size)


def _room(size: int) -> int:
    return -size % ALIGNED + size
