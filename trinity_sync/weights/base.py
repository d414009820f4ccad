"""A reader's own copy of the images that it read last, and the deltas that make the next of them.

Nobody else sees it, so it is changed in place: what lies in it is a version, or not looked at. It
costs as much memory as the weights have, and one copy more than reading an image where it lies: it
is for readers to whom the bytes have a long way, and for weights of which few change.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch

from trinity_sync.errors import DeltaError
from trinity_sync.snapshot.copying import copy_pieces
from trinity_sync.weights.delta import Array, apply
from trinity_sync.weights.held import Held
from trinity_sync.weights.version import Gone, Version

logger = logging.getLogger(__name__)


class Base:
    """Of one reader."""

    def __init__(self) -> None:
        self._held: Held | None = None
        """What is in the memory; None while that is no version."""
        self._memory: Sequence[torch.Tensor] = ()
        self._lent = False
        self.delta_bytes: int | None = None
        """Bytes of the deltas that made what was held last; None where it came whole."""

    @contextmanager
    def images(
        self,
        version: Version,
        whole: AbstractContextManager[Held],
        deltas: Callable[[Version], Sequence[Array]],
    ) -> Iterator[Held]:
        """Hold a version, made by deltas, or whole where there are none that fit.

        While one is held, another one is held without this memory: it must not change then.

        Args:
            version: that is wanted.
            whole: holds it at another place.
            deltas: gives, for each image, what turns those of a version into those that are
                wanted.

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

    def _patched(
        self, version: Version, deltas: Callable[[Version], Sequence[Array]]
    ) -> Held | None:
        held = self._held
        if held is None:
            return None
        if held.version == version:
            self.delta_bytes = 0
            return held
        try:
            found = deltas(held.version)
            self._held = None
            with ThreadPoolExecutor(torch.get_num_threads(), "delta") as pool:
                for old, new, memory, delta in zip(
                    held.version.images, version.images, self._memory, found, strict=True
                ):
                    names = {"base": held.version.name_of(old), "version": version.name_of(new)}
                    apply(delta, memory.numpy(), **names, each=pool.map)
        except (Gone, DeltaError) as error:
            logger.warning("version %d is loaded whole: %s", version.step, error)
            return None
        self.delta_bytes = sum(len(delta) for delta in found)
        self._held = Held(version, held.plan, self._memory)
        return self._held

    def _copied(self, whole: AbstractContextManager[Held]) -> Held:
        with whole as held:
            self._held = None
            sizes = [len(image) for image in held.images]
            if sizes != [len(memory) for memory in self._memory]:
                self._memory = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            copy_pieces(
                (memory.data_ptr(), image.data_ptr(), len(image))
                for memory, image in zip(self._memory, held.images, strict=True)
            )
            self._held = Held(held.version, held.plan, self._memory)
        return self._held
