"""Transport through Ray's object store: images for readers on other nodes, and deltas.

A task on the node of an image reads it from its slot, or computes its delta from the image that a
reader has, if that is still in another slot. Ray transfers the result to another node once, and all
readers there map it. The Synchronizer creates the references when the first reader asks, and keeps
them until there is a newer version; the bytes never enter its process.

The module does not import torch, which saves the tasks' processes seconds of import. Deltas between
images of one node are computed without Ray as well.
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
from trinity_sync.weights.delta import Array, Spans, encode_delta
from trinity_sync.weights.versions import ImageRef, Version, VersionUnavailableError

THREADS = 4
"""Threads that compare two images; as many as persist an image."""
NICE = 10
"""Niceness of the threads that compare two versions, as in nice(1)."""


class ObjectRefs:
    """Object references to the image copies and deltas of one version, created on demand."""

    def __init__(self) -> None:
        self._version: Version | None = None
        self._images: dict[int, list[Any]] = {}
        self._deltas: dict[tuple[str, Spans], list[Any]] = {}

    def get_image_refs(self, version: Version, ranks: Sequence[int]) -> list[list[Any]]:
        """Return the references of an `ImageCopy` for each rank, the same for all callers.

        ``version`` is the newest in memory.
        """
        self.keep_only(version)
        images = {ref.rank: ref for ref in version.images}
        for rank in ranks:
            if rank not in self._images:
                self._images[rank] = _start_on_node(
                    _copy_image, images[rank], images[rank], returns=2
                )
        return [self._images[rank] for rank in ranks]

    def get_delta_refs(
        self, base: Version, version: Version, spans: Sequence[Spans]
    ) -> list[list[Any]]:
        """Return the reference of each rank's delta from ``base``, the same for all callers.

        ``version`` is the newest in memory; ``spans`` are as in `Registry.fetch_deltas`.

        Raises:
            VersionUnavailableError: the images of the two versions are on different nodes, or of a
                different number of ranks.
        """
        self.keep_only(version)
        if [ref.node for ref in base.images] != [ref.node for ref in version.images]:
            raise VersionUnavailableError(
                f"version {version.step} has other nodes or ranks than {base.step}"
            )
        keys = [(old.image, each) for old, each in zip(base.images, spans, strict=True)]
        for new, key in zip(version.images, keys, strict=True):
            if key not in self._deltas:
                self._deltas[key] = [
                    _start_on_node(compute_delta, new, base, version, new.rank, key[1], returns=1)
                ]
        return [self._deltas[key] for key in keys]

    def keep_only(self, version: Version | None) -> None:
        """Drop the references of other versions; Ray keeps the objects that are still read."""
        if version != self._version:
            self._version, self._images, self._deltas = version, {}, {}


def compute_delta(base: Version, version: Version, rank: int, spans: Spans = ()) -> Array:
    """Return the delta between a rank's images of two versions, both in slots of this node.

    No lock is acquired, so a trainer can fill the slots meanwhile and needs no additional ones. A
    slot's version tag is removed before its bytes change: tags that are unchanged after the last
    read prove that the bytes were those of the two images.

    Raises:
        VersionUnavailableError: an image was overwritten or removed, or the two images have
            different layouts.
    """
    old, new = base.images[rank], version.images[rank]

    def require_both() -> None:
        if _require_tag(old).layout != _require_tag(new).layout:
            raise VersionUnavailableError(
                f"versions {base.step} and {version.step} have different layouts"
            )

    def map_pieces(*arguments: Any) -> Iterator[Any]:
        for found in pool.map(*arguments):
            require_both()  # stops the comparison as soon as it is useless
            yield found

    require_both()
    try:
        before, after = _map_image(old), _map_image(new)
    except (FileNotFoundError, ValueError) as error:
        raise VersionUnavailableError(f"an image was removed with its trainer: {error}") from error
    names = name_delta_images(base, version, rank, spans)
    with ThreadPoolExecutor(THREADS, "delta", partial(lower_thread_priority, NICE)) as pool:
        delta = encode_delta(before, after, **names, spans=spans, map_pieces=map_pieces)
    require_both()
    return delta


def name_delta_images(base: Version, version: Version, rank: int, spans: Spans) -> dict[str, str]:
    """Return the names of a delta's two images, as keyword arguments of ``encode_delta``."""
    rounds = ", rounded" if spans else ""
    return {
        "base": base.name_image(base.images[rank]) + rounds,
        "version": version.name_image(version.images[rank]) + rounds,
    }


def _start_on_node(task: Any, image: ImageRef, *arguments: Any, returns: int) -> Any:
    """Start a task on the node of an image; return its object references."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = NodeAffinitySchedulingStrategy(image.node, soft=False)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": node}
    return _as_remote(task).options(**options, num_returns=returns).remote(*arguments)


@cache
def _as_remote(task: Any) -> Any:
    import ray

    return ray.remote(task)


def _copy_image(ref: ImageRef) -> Iterator[Any]:
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
