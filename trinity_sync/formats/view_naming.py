"""How the tensors of a version are named and formed in a folder that engines read.

They are compared with the model, or with the adapter, before anything is written.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from trinity_sync.errors import ConfigError, ExportError, from_extra
from trinity_sync.formats.folder_reader import PublishedView
from trinity_sync.formats.hf_adapter import ADAPTER_CONFIG, split_adapter
from trinity_sync.formats.hf_naming import Architecture, Naming, Tensors, find_kept
from trinity_sync.formats.model_files import is_adapter
from trinity_sync.snapshot.dtensor_shards import have_equal_bits


class View(Protocol):
    """The tensors of one version, as `trinity_sync.weights.version_view.VersionView`."""

    @property
    def version(self) -> Any:
        """What has ``step``, ``run``, ``root`` and ``identity``."""

    def list_named(self) -> Sequence[tuple[tuple[str, ...], Sequence[int], torch.dtype]]:
        """Return names, full shape and dtype of each tensor, in the order of `iter_tensors`."""

    def read(self, name: str) -> torch.Tensor:
        """Return one full tensor to read from."""

    def iter_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and full tensors, in memory that does not change later."""


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
        rounded: set[str] = getattr(view, "rounded", set())
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
