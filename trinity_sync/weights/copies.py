"""Images for readers on other nodes than the trainer's: one copy of each in Ray's object store.

A task on the node of an image takes it from its slot. Ray brings that copy to another node once,
and all readers there map it. The Synchronizer makes the references, when the first reader asks,
and keeps them until there is a newer version; the bytes never enter its process.

It does not need torch, and so spares the task's process the seconds of its import.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_sync.snapshot.published import Published, published_in
from trinity_sync.snapshot.reading import locked
from trinity_sync.weights.version import Gone, ImageRef, Version

Copy = tuple[Published, Any]
"""What an image's note says, and its bytes: an array of ``uint8`` that nobody may write to."""


class Copies:
    """References to the copies of one version, made as they are asked for."""

    def __init__(self) -> None:
        self._version: Version | None = None
        self._made: dict[int, list[Any]] = {}

    def of(self, version: Version, ranks: Sequence[int]) -> list[list[Any]]:
        """For each rank, the references of a `Copy`; the same ones whoever asks."""
        self.keep_only(version)
        images = {ref.rank: ref for ref in version.images}
        for rank in ranks:
            if rank not in self._made:
                self._made[rank] = _begin_copy(images[rank])
        return [self._made[rank] for rank in ranks]

    def keep_only(self, version: Version | None) -> None:
        """Let go of the copies of other versions; who reads them keeps them as long as it does."""
        if version != self._version:
            self._version, self._made = version, {}


def fetch(
    synchronizer: Any, version: Version, ranks: Sequence[int], timeout_s: float
) -> list[Copy]:
    """The images of these ranks, in the object store of this node.

    Raises:
        Gone: an image is overwritten, its node is dead, the version is not the newest in memory
            any more, or the time is over.
    """
    deadline = time.monotonic() + timeout_s
    try:
        asked = synchronizer.copies.remote(version.run, version.step, list(ranks))
        references = ray.get(asked, timeout=timeout_s)
        left_s = max(0.0, deadline - time.monotonic())
        found = ray.get([each for pair in references for each in pair], timeout=left_s)
    except RayError as error:
        reason = error.cause if isinstance(error, RayTaskError) else error
        said = str(reason).strip().partition("\n")[0]
        raise Gone(f"no copy of version {version.step} from its node: {said}") from error
    return list(zip(found[::2], found[1::2], strict=True))


def _begin_copy(ref: ImageRef) -> list[Any]:
    there = NodeAffinitySchedulingStrategy(ref.node, soft=False)
    options = {"num_cpus": 0, "num_returns": 2, "max_retries": 0, "scheduling_strategy": there}
    references: list[Any] = _copy.options(**options).remote(ref)
    return references


@ray.remote
def _copy(ref: ImageRef) -> Iterator[Any]:
    """A generator, so that Ray has put the bytes into its store before the lock is given back."""
    slot = Path(ref.slot)
    try:
        with locked(slot) as content:
            said = published_in(slot)
            if said is None or said.image != ref.image:
                raise Gone(f"the image in {slot} was overwritten")
            yield said
            yield np.frombuffer(content, np.uint8, ref.nbytes)
    except FileNotFoundError as error:
        raise Gone(f"the image in {slot} was removed with its trainer") from error
