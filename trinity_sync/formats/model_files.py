"""Files of one version of the weights: a complete Hugging Face model, or an adapter of PEFT."""

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from trinity_sync.formats.hf_adapter import ADAPTER_CONFIG, ADAPTER_FILE
from trinity_sync.formats.hf_files import set_dtype
from trinity_sync.formats.published import VERSION_FILE, describe_tensor
from trinity_sync.formats.safetensors import INDEX, PROGRESS, save_tensors
from trinity_sync.fs.atomic import sync_folder

_SMALL_FILES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
"""Suffixes of the files of a model that are copied: its config, tokenizer and source files."""


def is_adapter(model: Path) -> bool:
    """Return whether a folder has the config of an adapter."""
    return (model / ADAPTER_CONFIG).is_file()


def write_complete(
    folder: Path,
    items: Iterable[tuple[str, torch.Tensor]],
    model: Path,
    *,
    max_shard_bytes: int,
    config: bytes | None = None,
) -> list[str]:
    """Write a complete model or adapter into a folder; return the line of each tensor.

    The version's checksum is made of the lines. ``model`` is the folder with config and tokenizer,
    or with the adapter's config; ``config`` replaces the content of its ``config.json``. One file
    of weights is in memory at a time, of at most ``max_shard_bytes`` unless one tensor is larger;
    an adapter has one file.
    """
    whole = is_adapter(model)
    lines: list[str] = []
    dtypes: Counter[torch.dtype] = Counter()
    weight_map: dict[str, int] = {}
    parts = total = size = 0
    pending: dict[str, torch.Tensor] = {}
    for name, tensor in items:
        if not whole and pending and size + tensor.nbytes > max_shard_bytes:
            save_tensors(folder / f"{parts}.part", pending)
            parts, size, pending = parts + 1, 0, {}
        pending[name] = tensor.contiguous()
        weight_map[name] = parts
        size, total = size + tensor.nbytes, total + tensor.nbytes
        lines.append(describe_tensor(name, tensor))
        if tensor.is_floating_point():
            dtypes[tensor.dtype] += 1
    save_tensors(folder / f"{parts}.part", pending)
    names = _name_files(parts + 1, whole=whole)
    for part, name in enumerate(names):  # their number is part of their names
        (folder / f"{part}.part").rename(folder / name)
    if len(names) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[part] for name, part in weight_map.items()},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    _copy_small_files(model, folder, dtypes, config)
    return lines


def make_durable(folder: Path) -> None:
    """Sync a version, and let all who may read its small files read its weights."""
    mode = (folder / VERSION_FILE).stat().st_mode
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fchmod(file.fileno(), mode)  # safetensors makes files for their owner alone
            os.fsync(file.fileno())
    sync_folder(folder)


def _copy_small_files(
    model: Path, folder: Path, dtypes: Counter[torch.dtype], config: bytes | None
) -> None:
    for path in sorted(model.iterdir()):
        if (
            not path.is_file()
            or not path.name.endswith(_SMALL_FILES)
            or path.name.endswith((".index.json", PROGRESS))
        ):
            continue
        content = path.read_bytes()
        if path.name == "config.json" and dtypes:
            content = set_dtype(config or content, dtypes.most_common(1)[0][0])
        (folder / path.name).write_bytes(content)


def _name_files(count: int, *, whole: bool) -> list[str]:
    if whole:
        return [ADAPTER_FILE]
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{part:05d}-of-{count:05d}.safetensors" for part in range(1, count + 1)]
