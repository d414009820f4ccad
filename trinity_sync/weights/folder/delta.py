"""Deltas of weights between two versions, in the files that slime, miles and vime exchange.

A delta is a folder with ``model.safetensors.index.json``, whose metadata names the version, the
version that it builds on, and the encoding; and with safetensors files that hold, for each tensor
with a change, the zstd-compressed XOR of its old and new bytes, and in their metadata the checksum
of its new bytes. An encoding as changed positions and values ("overwrite") is read as well. XOR is
slime's default: it is the smallest, and a checksum tells if the base was another one.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from trinity_sync.errors import DeltaError, from_extra
from trinity_sync.formats.safetensors import INDEX

Tensors = Mapping[str, torch.Tensor]
Array = np.ndarray[Any, np.dtype[Any]]

CHECKSUM = "xxh3-128"
DELTA_FILE = "model-00000-of-00001.safetensors"
_CHECKSUMS: dict[str, Callable[[Any], str]] = {
    CHECKSUM: xxhash.xxh3_128_hexdigest,
    "adler32": lambda content: f"{zlib.adler32(content):08x}",
}


@dataclass(frozen=True)
class EncodedTensor:
    """The change of one tensor."""

    content: Array
    """Compressed XOR of the old and the new bytes."""
    checksum: str
    """Of the new bytes."""


def view_bytes(tensor: torch.Tensor) -> Array:
    """Return the bytes of a CPU tensor, shared if it is contiguous; ``uint8`` of one dimension."""
    found: Array = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def compute_checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor's bytes, in the form of a delta's."""
    return xxhash.xxh3_128_hexdigest(view_bytes(tensor).data)


def encode_tensor(old: torch.Tensor, new: torch.Tensor) -> EncodedTensor | None:
    """Return the change between two tensors of the same dtype and shape; None if there is none.

    Raises:
        MissingPackageError: zstandard is not installed.
    """
    difference = view_bytes(old) ^ view_bytes(new)
    if not difference.any():
        return None
    compressed = import_zstandard().ZstdCompressor(level=1).compress(difference.data)
    return EncodedTensor(np.frombuffer(compressed, np.uint8), compute_checksum(new))


def write_delta(
    folder: Path, version: int, base: int, changes: Mapping[str, EncodedTensor]
) -> None:
    """Write the files of a delta, from version ``base`` to ``version``, into an existing folder.

    Tensors that are not in ``changes``, which may be empty, are those of the base.
    """
    with from_extra("hf"):
        from safetensors.numpy import save_file
    index = {
        "metadata": {
            "version": f"{version:06d}",
            "base_version": f"{base:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": CHECKSUM,
        },
        "weight_map": dict.fromkeys(changes, DELTA_FILE),
    }
    if changes:
        save_file(
            {name: change.content for name, change in changes.items()},
            folder / DELTA_FILE,
            metadata={name: change.checksum for name, change in changes.items()},
        )
    (folder / INDEX).write_text(json.dumps(index))


def _read_metadata(folder: Path) -> dict[str, str]:
    if not folder.is_dir():
        raise DeltaError(
            f"{folder} is missing, and a later version builds on it; read the newest version again"
        )
    try:
        metadata: dict[str, str] = json.loads((folder / INDEX).read_bytes())["metadata"]
    except FileNotFoundError:
        metadata = {}
    except (ValueError, KeyError) as error:
        raise DeltaError(
            f"{folder / INDEX} is torn or altered; publish a complete version"
        ) from error
    if "delta_encoding" not in metadata:
        raise DeltaError(f"{folder} is a complete model, not a delta; read it without a base")
    return metadata


def apply_delta(tensors: Tensors, folder: Path, version: int) -> dict[str, torch.Tensor]:
    """Return the tensors after a delta, given those of ``version``, which are not changed.

    Tensors without a change are the same objects.

    Raises:
        DeltaError: the folder is missing or no delta; it builds on another version; or the result
            has another checksum.
        MissingPackageError: zstandard is not installed.
    """
    metadata = _read_metadata(folder)
    if int(metadata["base_version"]) != version:
        raise DeltaError(
            f"{folder} builds on version {int(metadata['base_version'])}, and these are the "
            f"weights of version {version}; apply deltas in their order, without a gap"
        )
    known = (
        metadata["delta_encoding"] in ("xor", "overwrite"),
        metadata["compression_format"] == "zstd",
        metadata["checksum_format"] in _CHECKSUMS,
    )
    if not all(known):
        raise DeltaError(
            f"{folder} has an encoding that is not supported here ({metadata}); publish it as xor, "
            f"with zstd and {CHECKSUM}"
        )
    with from_extra("hf"):
        from safetensors import SafetensorError, safe_open
    found = dict(tensors)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                checksums = file.metadata() or {}
                for name in file.keys():  # noqa: SIM118
                    found[name] = _apply_tensor(
                        found, name, file.get_tensor(name), metadata, checksums.get(name), path
                    )
        except SafetensorError as error:
            raise DeltaError(
                f"{path} is torn or altered ({error}); publish a complete version"
            ) from error
    return found


def _apply_tensor(
    tensors: Tensors,
    name: str,
    content: Array,
    metadata: Mapping[str, str],
    checksum: str | None,
    path: Path,
) -> torch.Tensor:
    zstandard = import_zstandard()
    if name not in tensors:
        raise DeltaError(f"{path} changes {name}, which the weights do not have; read in full")
    new = tensors[name].contiguous().clone()
    into = view_bytes(new)
    try:
        change = np.frombuffer(zstandard.ZstdDecompressor().decompress(content.data), np.uint8)
        if metadata["delta_encoding"] == "xor":
            into ^= change
        else:
            count = int(change[:4].view("<u4")[0])
            into[change[4 : 4 + 4 * count].view("<u4")] = change[4 + 4 * count :]
    except (zstandard.ZstdError, ValueError, IndexError) as error:
        raise DeltaError(
            f"{path} is torn or altered at {name} ({error}); publish a complete version"
        ) from error
    if _CHECKSUMS[metadata["checksum_format"]](into.data) != checksum:
        raise DeltaError(
            f"{path} does not give {name} as published: its checksum differs. The delta, or the "
            "weights that it was applied to, were altered; read a complete version"
        )
    return new


def import_zstandard() -> Any:
    """Import and return zstandard.

    Raises:
        MissingPackageError: it is not installed.
    """
    with from_extra("deltas"):
        import zstandard
    return zstandard
