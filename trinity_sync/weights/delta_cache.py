"""A reader's own copy of the images that it read last, and the deltas that make the next of them.

Nobody else sees it, so it is changed in place: what lies in it is a version, or not looked at. It
costs as much memory as the weights have, and one copy more than reading an image where it lies: it
is for readers to whom the bytes have a long way, and for weights of which few change.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from trinity_sync.errors import DeltaError
from trinity_sync.snapshot.memcpy import copy_pieces
from trinity_sync.weights.delta import Array, apply
from trinity_sync.weights.object_store import names_of
from trinity_sync.weights.rounding import Spans, merged, round_in_place
from trinity_sync.weights.unshard import Whole
from trinity_sync.weights.version import Gone, Version
from trinity_sync.weights.version_view import VersionView

logger = logging.getLogger(__name__)


Deltas = Callable[[Version, Version, Sequence[Spans]], Sequence[Array]]
"""Gives what turns the images of the first version into those of the second, for each image."""


class Base:
    """Of one reader.

    Args:
        rounding: keep ``float32`` elements rounded to ``bfloat16``, and get deltas of such.
    """

    def __init__(self, *, rounding: bool = False) -> None:
        self._rounding = rounding
        self._spans: Sequence[Spans] = ()
        """For each image, what of it is rounded."""
        self._held: VersionView | None = None
        """What is in the memory; None while that is no version."""
        self._memory: Sequence[torch.Tensor] = ()
        self._lent = False
        self.delta_bytes: int | None = None
        """Bytes of the deltas that made what was held last; None where it came whole."""

    @contextmanager
    def images(
        self,
        version: Version,
        whole: AbstractContextManager[VersionView],
        deltas: Deltas,
    ) -> Iterator[VersionView]:
        """Hold a version, made by deltas, or whole where there are none that fit.

        While one is held, another one is held without this memory: it must not change then.

        Args:
            version: that is wanted.
            whole: holds it at another place.
            deltas: where they come from.

        Raises:
            Gone, WeightSyncError: as ``whole``, if that is needed.
        """
        self.delta_bytes = None
        if self._lent:
            with whole as held:
                yield held
            return
        held = self._patched(version, deltas) or self._copied(whole)
        self._lent = True
        try:
            yield held
        finally:
            self._lent = False

    def _patched(self, version: Version, deltas: Deltas) -> VersionView | None:
        held = self._held
        if held is None:
            return None
        if held.version == version:
            self.delta_bytes = 0
            return held
        try:
            found = deltas(held.version, version, self._spans)
            self._held = None
            with ThreadPoolExecutor(torch.get_num_threads(), "delta") as pool:
                for rank, (spans, memory, delta) in enumerate(
                    zip(self._spans, self._memory, found, strict=True)
                ):
                    names = names_of(held.version, version, rank, spans)
                    apply(delta, memory.numpy(), **names, each=pool.map)
        except (Gone, DeltaError) as error:
            logger.warning("version %d is loaded whole: %s", version.step, error)
            return None
        self.delta_bytes = sum(len(delta) for delta in found)
        self._held = replace(held, version=version)
        return self._held

    def _copied(self, whole: AbstractContextManager[VersionView]) -> VersionView:
        with whole as held:
            self._held = None
            sizes = [len(image) for image in held.images]
            if sizes != [len(memory) for memory in self._memory]:
                self._memory = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            copy_pieces(
                (memory.data_ptr(), image.data_ptr(), len(image))
                for memory, image in zip(self._memory, held.images, strict=True)
            )
            self._spans = [
                _float32_in(held.plan, image) if self._rounding else ()
                for image in range(len(sizes))
            ]
            with ThreadPoolExecutor(torch.get_num_threads(), "rounding") as pool:
                for memory, spans in zip(self._memory, self._spans, strict=True):
                    round_in_place(memory.numpy(), spans, pool.map)
            self._held = replace(held, images=self._memory)
        return self._held


def _float32_in(plan: Sequence[Whole], image: int) -> Spans:
    """Where the ``float32`` elements of an image lie; those in the gaps of strides are as good."""
    return merged(
        [
            (part.place, part.place + 4 * (1 + last))
            for whole in plan
            if whole.dtype is torch.float32
            for part in whole.parts
            if part.image == image
            for last in [sum((n - 1) * by for n, by in zip(part.shape, part.stride, strict=True))]
        ]
    )
