"""The files of one version in a folder, and the names of its tensors there.

A version is a complete Hugging Face model, or an adapter of PEFT.

Tensors are named and formed as the engines that read the folder expect. They are compared with the
model, or with the adapter, before anything is written.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import torch

from trinity_sync.errors import ConfigError, ExportError, from_extra
from trinity_sync.formats.hf_files import ADAPTER_CONFIG, ADAPTER_FILE, set_dtype, split_adapter
from trinity_sync.formats.hf_naming import Architecture, Naming, Tensors, find_kept
from trinity_sync.formats.safetensors import INDEX, PROGRESS, save_tensors
from trinity_sync.fs.atomic import sync_folder
from trinity_sync.tensors.dtensors import have_equal_bits
from trinity_sync.weights.folder.published import VERSION_FILE, describe_tensor
from trinity_sync.weights.folder.reader import PublishedView
from trinity_sync.weights.version_view import VersionView

View = VersionView | PublishedView

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


class ViewNaming:
    """Names and forms of the tensors of all versions of the model or adapter that engines serve.

    ``trust_remote_code`` lets source files of the model be imported.
    """

    def __init__(self, model: Path, *, trust_remote_code: bool) -> None:
        self._model, self._trust_remote_code = model, trust_remote_code
        self._is_adapter = is_adapter(model)

    @cached_property
    def _architecture(self) -> Architecture:
        with from_extra("hf"):
            return Architecture(self._model, trust_remote_code=self._trust_remote_code)

    def name_tensors(self, view: View) -> tuple[Iterator[tuple[str, torch.Tensor]], bytes | None]:
        """Return the tensors of a view as the model's published files have them, and their config.

        They are compared with the model before. The config is the content of ``config.json`` if it
        differs from the model's, otherwise None.
        """
        metas = {
            name: (torch.Size(shape), dtype)
            for names, shape, dtype in view.list_named()
            for name in names
        }
        if self._is_adapter:
            split = split_adapter(None, self._model / ADAPTER_CONFIG, metas)
            if split.base:
                raise ExportError(
                    f"{min(split.base.values())} is no tensor of an adapter's file; upload "
                    "peft.get_peft_model_state_dict(model), without the base model"
                )
            names = {saved: name for name, saved in split.adapter.items()}
            return ((names[name], tensor) for name, tensor in view.iter_tensors()), None
        architecture = self._architecture
        rounded = view.rounded if isinstance(view, VersionView) else set[str]()
        for dtype in {metas[name][1] for name in rounded}:
            if lost := find_kept(rounded, architecture.shell, dtype):
                raise ConfigError(
                    f"{min(lost)} is rounded to {dtype}, and transformers keeps it in float32; "
                    "pass the reader to publish, or open the view with keep_float32"
                )
        tied = {name: names for names, *_ in view.list_named() for name in names}
        naming = architecture.find_naming(
            metas,
            lambda one, other: (
                tied[one] is tied[other] or have_equal_bits(view.read(one), view.read(other))
            ),
            published=view.config if isinstance(view, PublishedView) else None,
        )
        config = naming.config if naming.config != architecture.config else None
        return _iter_model(view, naming), config

    def list_kept(self, dtype: torch.dtype | None) -> list[str]:
        """Return the names of the tensors that a reader with this dtype must not round."""
        if dtype is None or self._is_adapter:
            return []
        shell = self._architecture.shell
        return find_kept(shell.state_dict(), shell, dtype)


def _iter_model(view: View, naming: Naming) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is written of a model, each group once all of its tensors are there."""
    written = [
        [name for name in names if name not in naming.dropped] for names, *_ in view.list_named()
    ]
    left = Counter(naming.find_group(name) for names in written for name in names)
    groups: dict[str, Tensors] = {}
    for names, (_, tensor) in zip(written, view.iter_tensors(), strict=True):
        for number, name in enumerate(names):  # tensors in a file do not share memory
            group = naming.find_group(name)
            groups.setdefault(group, {})[name] = tensor.clone() if number else tensor
            left[group] -= 1
            if not left[group]:
                yield from naming.revert_fusion(groups.pop(group)).items()
