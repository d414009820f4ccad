"""The version registry of a reader that has a Synchronizer: calls to the Ray actor.

Images of other nodes come through Ray's object store. A task on the node of an image reads it from
its slot. Ray transfers the result to another node once, and all readers there map it. The
Synchronizer starts the tasks when the first reader asks, and keeps the references until there is a
newer version; the bytes never enter its process.

The module does not import torch, which saves the tasks' processes seconds of import.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_sync.errors import WeightSyncError
from trinity_sync.snapshot.ticket import lock_slot, read_version_tag
from trinity_sync.weights.ray_cluster import find_synchronizer
from trinity_sync.weights.versions import (
    ImageCopy,
    ImageRef,
    Registry,
    Version,
    VersionUnavailableError,
)

ANSWER_S = 60.0
"""Seconds to wait for an answer of the Synchronizer, which Ray may be restarting."""


class ActorRegistry(Registry):
    """Registry of the versions that a Synchronizer keeps.

    Where the Synchronizer was stopped and another one started, calls go to that of ``root``, by
    default the root of the first version.
    """

    def __init__(self, actor: Any, root: str | Path | None = None) -> None:
        self._actor, self._root = actor, root
        self.node = ray.get_runtime_context().get_node_id()

    def latest(self) -> Version | None:
        """As `Registry.latest`.

        Raises:
            WeightSyncError: the Synchronizer does not answer.
        """
        while True:
            answer = self._actor.latest.remote(readable=True)
            try:
                return self._note_root(ray.get(answer, timeout=ANSWER_S))
            except ray.exceptions.RayError as error:
                self._switch_actor(error)

    async def wait_newer(self, than: int | Version, timeout_s: float | None) -> Version | None:
        """As `Registry.wait_newer`.

        Raises:
            WeightSyncError: the Synchronizer was stopped, or lost.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            limit_s = None if left_s is None else left_s + ANSWER_S
            answer = self._actor.wait_newer.remote(than, left_s, readable=True)
            try:
                return self._note_root(await asyncio.wait_for(answer, limit_s))
            except asyncio.CancelledError:
                ray.cancel(answer)  # it would wait on there, where only so many calls may wait
                raise
            except (TimeoutError, ray.exceptions.RayError) as error:
                self._switch_actor(error)

    def set_serving(self, reader: str, step: int, run: int) -> None:
        """As `Registry.set_serving`, without waiting for the answer."""
        self._actor.set_serving.remote(reader, step, run)

    def fetch_images(
        self, version: Version, ranks: Sequence[int], timeout_s: float
    ) -> Sequence[ImageCopy]:
        """As `Registry.fetch_images`, to the object store of this node.

        Raises:
            VersionUnavailableError: an image was overwritten, its node is dead, the version is no
                longer the newest in memory, or the time-out has passed.
        """
        deadline = time.monotonic() + timeout_s
        answer = self._actor.get_image_refs.remote(version.run, version.step, list(ranks))
        try:
            refs = ray.get(answer, timeout=timeout_s)
            left_s = max(0.0, deadline - time.monotonic())
            found = iter(ray.get([ref for of_rank in refs for ref in of_rank], timeout=left_s))
        except ray.exceptions.RayError as error:
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            reason = str(cause).strip().partition("\n")[0]
            raise VersionUnavailableError(
                f"no copy of version {version.step} from its node: {reason}"
            ) from error
        return list(zip(found, found, strict=True))

    def _note_root(self, version: Version | None) -> Version | None:
        self._root = version.root if version else self._root
        return version

    def _switch_actor(self, error: Exception) -> None:
        """Switch to the actor that the root names now.

        Raises:
            WeightSyncError: there is no other one.
        """
        with suppress(OSError):  # the root is not visible here
            actor = find_synchronizer(self._root) if self._root else None
            if actor not in (None, self._actor):
                self._actor = actor
                return
        raise WeightSyncError(
            f"the Synchronizer does not answer ({type(error).__name__}); was it stopped, or its "
            "node lost?"
        ) from error


def copy_image(ref: ImageRef) -> Iterator[Any]:
    """Yield version tag and bytes; Ray has stored both before the generator releases the lock."""
    try:
        with lock_slot(Path(ref.slot)) as content:
            tag = read_version_tag(Path(ref.slot))
            if tag is None or tag.image != ref.image:
                raise VersionUnavailableError(f"the image in {ref.slot} was overwritten")
            yield tag
            yield np.frombuffer(content, np.uint8, ref.nbytes)
    except FileNotFoundError as error:
        raise VersionUnavailableError(
            f"the image in {ref.slot} was removed with its trainer"
        ) from error


_copy_image = ray.remote(copy_image)


def start_copy(image: ImageRef) -> list[Any]:
    """Start a copy of an image on its node; return the references of an `ImageCopy`."""
    here = NodeAffinitySchedulingStrategy(image.node, soft=False)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": here, "num_returns": 2}
    refs: list[Any] = _copy_image.options(**options).remote(image)
    return refs
