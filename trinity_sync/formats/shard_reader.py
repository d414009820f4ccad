"""Assembly of the complete tensors of a component from the files of all ranks.

A file of ``torch.save`` is what an image in shared memory is, so files are put together as images
are (`unshard`). They are mapped, and only what is copied is read; only tensors and plain values are
unpickled.
"""

import mmap
import pickle
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from trinity_sync.errors import CommitError, ConfigError, ImageError, WeightSyncError
from trinity_sync.fs.atomic import open_no_follow
from trinity_sync.tensors.deserialize import allow_plain
from trinity_sync.tensors.dtensors import ShardBox, have_equal_bits
from trinity_sync.tensors.unshard import (
    FullTensor,
    Outline,
    TensorChunk,
    combine_outlines,
    combine_tensor,
    copy_box,
    outline_state,
    plan_unshard,
    view_chunk,
    view_full_tensor,
)

Meta = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a complete tensor."""


class SavedState:
    """A state that ranks saved, each in a file of its own; ``files`` are in the order of ranks.

    With the ``outlines`` of all files, tensors are named by their keys in nested dicts, and all
    files hold the same names. Otherwise the state is a model, and tensors have their names in the
    plain model. What several files hold is compared in those of the ranks in ``compared``, by
    default in all.

    Raises:
        CommitError: a file cannot be read, or the files are not the shards of one state.
    """

    def __init__(
        self,
        files: Sequence[Path],
        outlines: Sequence[Outline] = (),
        compared: Container[int] | None = None,
    ) -> None:
        with _name_in_errors(files[0], len(files)):
            self._images = [_map_file(path) for path in files]
            images = [image.numpy().data for image in self._images]
            for rank, outline in enumerate(outlines):
                if differing := outline.keys() ^ outlines[0].keys():
                    raise WeightSyncError(f"ranks 0 and {rank} do not both have {min(differing)}")
            if outlines:
                ranks = range(len(files)) if compared is None else compared
                plan = combine_outlines(outlines, images, compared=ranks, compare_replicas=True)
            else:
                plan = plan_unshard(images, compare_replicas=True)
        self.tensors: Mapping[str, FullTensor] = {n: full for full in plan for n in full.names}

    @property
    def metas(self) -> dict[str, Meta]:
        """Shape and dtype of each tensor, by its name."""
        return {name: (torch.Size(full.shape), full.dtype) for name, full in self.tensors.items()}

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two complete tensors have the same bits."""
        one, two = self.tensors[name], self.tensors[other]
        return one is two or (
            (one.shape, one.dtype) == (two.shape, two.dtype)
            and have_equal_bits(*(view_full_tensor(each, self._images) for each in (one, two)))
        )

    def read_tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a complete tensor, in memory of its own; each part is converted by itself."""
        return combine_tensor(replace(self.tensors[name], read_dtype=dtype), self._images)

    def copy_box(self, name: str, box: ShardBox, target: torch.Tensor) -> int:
        """Copy a box of a tensor into a target of its sizes; return the bytes that were read."""
        full = self.tensors[name]
        copy_box(full, self._images, box, target)
        return prod(box.sizes) * full.dtype.itemsize

    def view_chunk(self, name: str, chunk: TensorChunk) -> torch.Tensor:
        """Return a chunk of a tensor, mapped from its file."""
        return view_chunk(self.tensors[name].dtype, chunk, self._images)


def outline_files(
    files: Sequence[Path], ranks: Sequence[int], flat_lengths: Mapping[Any, int] | None = None
) -> dict[int, Outline]:
    """Return what the files of some ranks hold, by rank; ``files`` are those of all ranks.

    ``flat_lengths`` are as in `outline_state`.

    Raises:
        CommitError: a file cannot be read, or holds other shards than it should.
    """
    found = {}
    for rank in ranks:
        with _name_in_errors(files[rank], len(files)):
            image = _map_file(files[rank]).numpy().data
            found[rank] = outline_state(image, rank, len(files), flat_lengths or {})
    return found


def require_same_model(
    folder: Path, saved: Mapping[str, Any], live: Mapping[str, Any], *, partial: bool = False
) -> None:
    """Require that the tensors of a step are those of a live model, or some with ``partial``.

    Raises:
        ConfigError: names or shapes differ.
    """
    one, other = ({(n, getattr(t, "shape", None)) for n, t in s.items()} for s in (saved, live))
    if wrong := sorted({name for name, _ in (one - other if partial else one ^ other)}):
        raise ConfigError(
            f"{folder} holds another model: names or shapes of {', '.join(wrong[:5])} differ. "
            "Nothing was loaded; start from the model that was trained there"
        )


def open_shard(path: Path) -> Mapping[Any, Any]:
    """Return a rank's state; its tensors are mapped from the file.

    Raises:
        CommitError: the file is missing, or ``weights_only`` cannot read it.
        ConfigError: it does not contain a dict.
    """
    allow_plain()
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CommitError(
            f"{path} cannot be read with weights_only, so it cannot be resharded: {error}\n"
            "Load it with as many ranks as saved it, or choose another step."
        ) from error
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"{path} has a {type(state).__name__}, and only dicts can be resharded; load it with "
            "as many ranks as saved it"
        )
    return state


@contextmanager
def _name_in_errors(path: Path, world_size: int) -> Iterator[None]:
    try:
        yield
    except (ImageError, WeightSyncError, OSError, ValueError) as error:
        raise CommitError(
            f"{path} and the files of the other ranks cannot be put together ({error}). Choose "
            f"another step, leave this component out, or load it with {world_size} rank(s) on the "
            "mesh that saved it."
        ) from error


def _map_file(path: Path) -> torch.Tensor:
    with open_no_follow(path) as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(content, dtype=torch.uint8)
