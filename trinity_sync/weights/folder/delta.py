"""Deltas of weights between two versions, in the files that slime, miles and vime exchange.

A delta is a folder with ``model.safetensors.index.json``, whose metadata names the version, the
version that it builds on, and the encoding; and with safetensors files that hold, for each tensor
with a change, the zstd-compressed XOR of its old and new bytes, and in their metadata the checksum
of its new bytes. XOR is slime's default encoding; ``docs/benchmarks/weights.md`` compares others.

A step of reinforcement learning changes few of the ``bfloat16`` weights: most updates are smaller
than half of the last bit. A delta is exact, whatever the dtypes are, so NaN payloads and ``-0.0``
count.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
import zstandard

from trinity_sync.errors import DeltaError, from_extra
from trinity_sync.formats.safetensors import INDEX, translate_disk_errors
from trinity_sync.fs.atomic import list_paths

Tensors = Mapping[str, torch.Tensor]
Array = np.ndarray[Any, np.dtype[Any]]
"""``uint8`` of one dimension."""

ENCODING = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "xxh3-128"}
DELTA_FILE = "model-00000-of-00001.safetensors"


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


def view_bytes(tensor: torch.Tensor) -> Array:
    """Return the bytes of a CPU tensor, shared if it is contiguous; ``uint8`` of one dimension."""
    found: Array = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def write_delta(folder: Path, version: int, base: int, changes: Mapping[str, Change]) -> None:
    """Write the files of a delta, from version ``base`` to ``version``, into an existing folder.

    Tensors that are not in ``changes``, which may be empty, are those of the base.
    """
    with from_extra("hf"):
        from safetensors.numpy import save_file
    index = {
        "metadata": {"version": f"{version:06d}", "base_version": f"{base:06d}", **ENCODING},
        "weight_map": dict.fromkeys(changes, DELTA_FILE),
    }
    if changes:
        with translate_disk_errors(folder / DELTA_FILE):
            save_file(
                {name: np.frombuffer(change.content, np.uint8) for name, change in changes.items()},
                folder / DELTA_FILE,
                metadata={name: change.checksum for name, change in changes.items()},
            )
    (folder / INDEX).write_text(json.dumps(index))


def apply_delta(tensors: Tensors, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors after a delta, given those of the version before, which are not changed.

    Tensors without a change are the same objects.

    Raises:
        DeltaError: the delta is torn or altered, or a tensor that it changes is not that of the
            version before.
    """
    with from_extra("hf"):
        from safetensors import SafetensorError, safe_open
    found = dict(tensors)
    for path in list_paths(folder, "*.safetensors"):
        try:
            with safe_open(path, framework="np") as file:
                checksums = file.metadata() or {}
                for name in file.keys():  # noqa: SIM118
                    found[name] = found[name].contiguous().clone()
                    content = file.get_tensor(name).tobytes()
                    change = Change(content, checksums.get(name, ""))
                    apply_change(view_bytes(found[name]), change, f"{name} in {path}")
        except (SafetensorError, KeyError) as error:  # also a tensor that the weights do not have
            raise DeltaError(
                f"{path} is torn or altered ({error!r}); publish a complete version"
            ) from error
    return found
