"""Transport through Ray's object store: images for readers on other nodes, and deltas.

A task on the node of an image reads it from its slot, or computes its delta from the image that a
reader has, if that is still in another slot. Ray transfers the result to another node once, and all
readers there map it. The Synchronizer creates the references when the first reader asks, and keeps
them until there is a newer version; the bytes never enter its process.

The module does not import torch, which saves the tasks' processes seconds of import.
"""

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from trinity_sync.snapshot.ticket import VersionTag, lock_slot, read_version_tag
from trinity_sync.storage.persist import lower_thread_priority
from trinity_sync.weights.delta import Array, ImageDelta, Spans, encode_delta
from trinity_sync.weights.versions import ImageRef, Version, VersionUnavailableError

THREADS = 4
"""Threads that compare two images; as many as persist an image."""
NICE = 10
"""Niceness of the threads that compare two versions, as in nice(1)."""


class ObjectRefs:
    """Object references to the images and deltas of one version, created on demand."""

    def __init__(self) -> None:
        self._version: Version | None = None
        self._refs: dict[tuple[Any, ...], list[Any]] = {}

    def get_refs(
        self, version: Version, ranks: Sequence[int], base: Version | None, spans: Sequence[Spans]
    ) -> list[list[Any]]:
        """Return references for each rank, the same for all callers; see `Registry.fetch_images`.

        ``version`` is the newest in memory. They are those of an `ImageCopy`, or with ``base`` that
        of an `ImageDelta`.

        Raises:
            VersionUnavailableError: the images of the two versions are on different nodes, or of a
                different number of ranks.
        """
        self.keep_only(version)
        if base and [ref.node for ref in base.images] != [ref.node for ref in version.images]:
            raise VersionUnavailableError(
                f"version {version.step} has other nodes or ranks than {base.step}"
            )
        images = {ref.rank: ref for ref in version.images}
        bases = {ref.rank: ref for ref in base.images} if base else {}
        found = []
        for rank, rounded in zip(ranks, spans or [()] * len(ranks), strict=True):
            arguments = (bases[rank], images[rank], rounded) if base else (images[rank],)
            if arguments not in self._refs:
                task, returns = (compute_delta, 1) if base else (copy_image, 2)
                self._refs[arguments] = _start_on_node(images[rank].node, task, arguments, returns)
            found.append(self._refs[arguments])
        return found

    def keep_only(self, version: Version | None) -> None:
        """Drop the references of other versions; Ray keeps the objects that are still read."""
        if version != self._version:
            self._version, self._refs = version, {}


def compute_delta(base: ImageRef, image: ImageRef, spans: Spans = ()) -> ImageDelta:
    """Return the delta between two images of a rank, both in slots of this node.

    No lock is acquired, so a trainer can fill the slots meanwhile and needs no additional ones. A
    slot's version tag is removed before its bytes change: tags that are unchanged after the last
    read prove that the bytes were those of the two images.

    Raises:
        VersionUnavailableError: an image was overwritten or removed, or the two images have
            different layouts.
    """

    def require_both() -> None:
        old, new = _require_tag(base), _require_tag(image)
        if old.layout != new.layout:
            raise VersionUnavailableError(
                f"versions {old.step} and {new.step} have different layouts"
            )

    def map_pieces(*arguments: Any) -> Iterator[Any]:
        for found in pool.map(*arguments):
            require_both()  # stops the comparison as soon as it is useless
            yield found

    require_both()
    try:
        before, after = _map_image(base), _map_image(image)
    except (FileNotFoundError, ValueError) as error:
        raise VersionUnavailableError(f"an image was removed with its trainer: {error}") from error
    with ThreadPoolExecutor(THREADS, "delta", partial(lower_thread_priority, NICE)) as pool:
        delta = encode_delta(before, after, spans, map_pieces)
    require_both()
    return delta


def _start_on_node(node: str, task: Any, arguments: tuple[Any, ...], returns: int) -> list[Any]:
    """Start a task on a node; return its object references."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": here}
    found = _as_remote(task).options(**options, num_returns=returns).remote(*arguments)
    return found if returns > 1 else [found]


@cache
def _as_remote(task: Any) -> Any:
    import ray

    return ray.remote(task)


def copy_image(ref: ImageRef) -> Iterator[Any]:
    """Yield version tag and bytes; Ray has stored both before the generator releases the lock."""
    try:
        with lock_slot(Path(ref.slot)) as content:
            yield _require_tag(ref)
            yield np.frombuffer(content, np.uint8, ref.nbytes)
    except FileNotFoundError as error:
        raise VersionUnavailableError(
            f"the image in {ref.slot} was removed with its trainer"
        ) from error


def _require_tag(ref: ImageRef) -> VersionTag:
    tag = read_version_tag(Path(ref.slot))
    if tag is None or tag.image != ref.image:
        raise VersionUnavailableError(f"the image in {ref.slot} was overwritten")
    return tag


def _map_image(ref: ImageRef) -> Array:
    with Path(ref.slot).open("rb") as file:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return np.frombuffer(mmap.mmap(file.fileno(), ref.nbytes, flags, mmap.PROT_READ), np.uint8)
