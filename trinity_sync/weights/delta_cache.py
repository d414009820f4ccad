"""A reader's private copy of the images that it read last, updated in place by deltas.

Only one reader uses it, so it is changed in place: it holds one version, or is marked as invalid.
It costs as much memory as the weights, and one copy more than reading an image from its slot. That
pays off for readers on other nodes, and for weights of which few change.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from trinity_sync.errors import DeltaError
from trinity_sync.tensors.memcpy import copy_pieces
from trinity_sync.tensors.unshard import FullTensor
from trinity_sync.weights.delta import Array, Spans, apply_delta, merge_spans, round_in_place
from trinity_sync.weights.object_store import name_delta_images
from trinity_sync.weights.version_view import VersionView
from trinity_sync.weights.versions import Version, VersionUnavailableError

logger = logging.getLogger(__name__)


FetchDeltas = Callable[[Version, Version, Sequence[Spans]], Sequence[Array]]
"""Returns the delta of each image from the first version to the second."""


class DeltaCache:
    """The images of one version in private memory.

    ``float32`` elements that are read as ``bfloat16`` are rounded there, and deltas are of the
    rounded elements.
    """

    def __init__(self) -> None:
        self._kept: frozenset[str] = frozenset()
        """Names of the tensors that are not rounded."""
        self._spans: Sequence[Spans] = ()
        """For each image, the byte ranges that are rounded."""
        self._cached: VersionView | None = None
        """The version in memory; None while the memory holds no valid version."""
        self._memory: Sequence[torch.Tensor] = ()
        self._is_open = False
        self.delta_bytes: int | None = None
        """Bytes of the deltas that made the version opened last; None if it was read in full."""

    @contextmanager
    def open(
        self,
        version: Version,
        full: AbstractContextManager[VersionView],
        fetch_deltas: FetchDeltas,
        keep_float32: Collection[str] = (),
    ) -> Iterator[VersionView]:
        """Yield a version, made by deltas from the cached version, or read in full if none fit.

        ``full`` opens the version without the cache, and does not round ``keep_float32``. While a
        version is open the memory must not change, so another one bypasses the cache.

        Raises:
            VersionUnavailableError, WeightSyncError: as ``full``, if it is needed.
        """
        self.delta_bytes = None
        if self._is_open:
            with full as view:
                yield view
            return
        if self._kept != (kept := frozenset(keep_float32)):
            self._kept, self._cached = kept, None
        view = self._apply_deltas(version, fetch_deltas) or self._copy_full(full)
        self._is_open = True
        try:
            yield view
        finally:
            self._is_open = False

    def _apply_deltas(self, version: Version, fetch_deltas: FetchDeltas) -> VersionView | None:
        cached = self._cached
        if cached is None:
            return None
        if cached.version == version:
            self.delta_bytes = 0
            return cached
        try:
            deltas = fetch_deltas(cached.version, version, self._spans)
            self._cached = None
            with ThreadPoolExecutor(torch.get_num_threads(), "delta") as pool:
                for rank, (spans, memory, delta) in enumerate(
                    zip(self._spans, self._memory, deltas, strict=True)
                ):
                    names = name_delta_images(cached.version, version, rank, spans)
                    apply_delta(delta, memory.numpy(), **names, map_pieces=pool.map)
        except (VersionUnavailableError, DeltaError) as error:
            logger.warning("reading version %d in full: %s", version.step, error)
            return None
        self.delta_bytes = sum(len(delta) for delta in deltas)
        self._cached = replace(cached, version=version)
        return self._cached

    def _copy_full(self, full: AbstractContextManager[VersionView]) -> VersionView:
        with full as view:
            self._cached = None
            sizes = [len(image) for image in view.images]
            if sizes != [len(memory) for memory in self._memory]:
                self._memory = [
                    torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes
                ]
            copy_pieces(
                (memory.data_ptr(), image.data_ptr(), len(image))
                for memory, image in zip(self._memory, view.images, strict=True)
            )
            self._spans = [_find_rounded_spans(view.plan, image) for image in range(len(sizes))]
            with ThreadPoolExecutor(torch.get_num_threads(), "rounding") as pool:
                for memory, spans in zip(self._memory, self._spans, strict=True):
                    round_in_place(memory.numpy(), spans, pool.map)
            self._cached = replace(view, images=self._memory)
        return self._cached


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
