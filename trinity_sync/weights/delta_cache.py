"""A reader's private copy of the images of other nodes that it read last, updated by deltas.

It costs as much memory as the weights, and one copy more than reading an image from its slot. That
pays off for weights of which few change, where they come from other nodes.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch

from trinity_sync.errors import DeltaError
from trinity_sync.tensors.memcpy import copy_pieces
from trinity_sync.tensors.unshard import FullTensor
from trinity_sync.weights.delta import ImageDelta, Spans, apply_delta, merge_spans, round_in_place
from trinity_sync.weights.version_view import VersionView
from trinity_sync.weights.versions import Version, VersionUnavailableError

logger = logging.getLogger(__name__)


FetchDeltas = Callable[[Version, Sequence[Spans]], Sequence[ImageDelta]]
"""Returns the delta of each image from a version that the reader has."""


@dataclass(frozen=True)
class _Copy:
    view: VersionView
    """A version in private memory, with the elements in ``spans`` rounded."""
    spans: Sequence[Spans]
    """For each image, the byte ranges that are rounded."""
    keep_float32: frozenset[str]
    """Names of the tensors that are not rounded."""


class DeltaCache:
    """The images of one version in private memory.

    ``float32`` elements that are read as ``bfloat16`` are rounded there, and deltas are of the
    rounded elements.
    """

    def __init__(self) -> None:
        self._copy: _Copy | None = None
        """None also while it is open, since the memory must not change then."""
        self.delta_bytes: int | None = None
        """Bytes of the deltas that made the version opened last; the reader sets None before."""

    @contextmanager
    def open(
        self,
        version: Version,
        full: AbstractContextManager[VersionView],
        fetch_deltas: FetchDeltas,
        keep_float32: Collection[str],
    ) -> Iterator[VersionView]:
        """Yield a version, made by deltas from the cached version, or read in full if none fit.

        ``full`` opens the version without the cache, and does not round ``keep_float32``.

        Raises:
            VersionUnavailableError, WeightSyncError: as ``full``, if it is needed.
        """
        kept = frozenset(keep_float32)
        copy, self._copy = self._copy, None
        if copy and copy.keep_float32 == kept:
            copy = self._apply_deltas(copy, version, fetch_deltas)
        else:
            copy = None
        if copy is None:
            copy = _copy_full(full, kept)
        try:
            yield copy.view
        finally:
            self._copy = copy

    def _apply_deltas(
        self, copy: _Copy, version: Version, fetch_deltas: FetchDeltas
    ) -> _Copy | None:
        """Update the copy in place; None if that is not possible, and its memory is invalid."""
        if copy.view.version == version:
            self.delta_bytes = 0
            return copy
        try:
            deltas = fetch_deltas(copy.view.version, copy.spans)
            with ThreadPoolExecutor(torch.get_num_threads(), "delta") as pool:
                for rank, (image, delta) in enumerate(zip(copy.view.images, deltas, strict=True)):
                    what = f"rank {rank} of version {version.step}"
                    apply_delta(delta, image.numpy(), what, pool.map)
        except (VersionUnavailableError, DeltaError) as error:
            logger.warning("reading version %d in full: %s", version.step, error)
            return None
        self.delta_bytes = sum(len(change.content) for delta in deltas for change in delta)
        return replace(copy, view=replace(copy.view, version=version))


def _copy_full(full: AbstractContextManager[VersionView], keep_float32: frozenset[str]) -> _Copy:
    with full as view:
        images = [torch.empty_like(image) for image in view.images]
        copy_pieces(
            (copy.data_ptr(), image.data_ptr(), len(image))
            for copy, image in zip(images, view.images, strict=True)
        )
        spans = [_find_rounded_spans(view.plan, image) for image in range(len(images))]
        with ThreadPoolExecutor(torch.get_num_threads(), "rounding") as pool:
            for image, each in zip(images, spans, strict=True):
                round_in_place(image.numpy(), each, pool.map)
        return _Copy(replace(view, images=images), spans, keep_float32)


def _find_rounded_spans(plan: Sequence[FullTensor], image: int) -> Spans:
    """Return the byte ranges of an image's elements to round, gaps of strides included."""
    return merge_spans(
        [
            (chunk.byte_offset, chunk.byte_offset + 4 * (1 + last))
            for full in plan
            if (full.dtype, full.read_dtype) == (torch.float32, torch.bfloat16)
            for chunk in full.chunks
            if chunk.image == image
            for last in [sum((n - 1) * by for n, by in zip(chunk.sizes, chunk.stride, strict=True))]
        ]
    )
