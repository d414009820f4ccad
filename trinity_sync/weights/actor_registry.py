"""The version registry of a reader that has a Synchronizer: calls to the Ray actor."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from trinity_sync.errors import WeightSyncError
from trinity_sync.weights.delta import Array
from trinity_sync.weights.object_store import fetch_deltas, fetch_images
from trinity_sync.weights.rounding import Spans
from trinity_sync.weights.state_files import read_address
from trinity_sync.weights.version import ImageCopy, Version

ANSWER_S = 60.0
"""Seconds to wait for an answer of the Synchronizer, which Ray may be restarting."""


class ActorRegistry:
    """Registry of the versions that a Synchronizer keeps; implements `registry.protocol.Registry`.

    Where the Synchronizer was stopped and another one started, calls go to the new one.

    Args:
        actor: the job's Synchronizer, a Ray actor.
        root: the job's root; by default that of the first version.
    """

    def __init__(self, actor: Any, root: str | Path | None = None) -> None:
        self._actor, self._root = actor, root
        self.node: str | None = ray.get_runtime_context().get_node_id()

    def latest(self) -> Version | None:
        """Return the newest version that can be read.

        Raises:
            WeightSyncError: the Synchronizer does not answer.
        """
        while True:
            answer = self._actor.latest.remote(readable=True)
            try:
                return self._note_root(ray.get(answer, timeout=ANSWER_S))
            except ray.exceptions.RayError as error:
                self._switch_actor(error)

    async def wait_newer(
        self, than: int, timeout_s: float | None, run: int | None, identity: str = ""
    ) -> Version | None:
        """Wait for a newer version that can be read; return None at the time-out.

        Args:
            than: step that the version has to be beyond.
            timeout_s: seconds to wait; None waits without limit.
            run: number of the run that made step ``than``.
            identity: identity of the job that made it, if it is known.

        Raises:
            WeightSyncError: the Synchronizer was stopped, or lost.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            answer = self._actor.wait_newer.remote(
                than, left_s, run, readable=True, identity=identity
            )
            try:
                return self._note_root(await answer)
            except ray.exceptions.RayError as error:
                self._switch_actor(error)

    def set_serving(self, reader: str, step: int, run: int) -> None:
        """Record the version that a reader serves, without waiting for the answer.

        Args:
            reader: its name.
            step: the version's step.
            run: the version's run.
        """
        self._actor.set_serving.remote(reader, step, run)

    def fetch_images(
        self, version: Version, ranks: Sequence[int], timeout_s: float
    ) -> Sequence[ImageCopy]:
        """Fetch images from other nodes; errors are those of `object_store.fetch_images`.

        Args:
            version: the newest version in memory.
            ranks: whose images.
            timeout_s: seconds to wait for all of them.
        """
        return fetch_images(self._actor, version, ranks, timeout_s)

    def fetch_deltas(
        self, base: Version, version: Version, spans: Sequence[Spans], timeout_s: float
    ) -> Sequence[Array]:
        """Fetch the deltas from ``base``; errors are those of `object_store.fetch_deltas`.

        Args:
            base: version that the reader has.
            version: the newest version in memory.
            spans: for each rank, byte ranges of its image that the reader rounds.
            timeout_s: seconds to wait for all of them.
        """
        return fetch_deltas(self._actor, base, version, spans, timeout_s)

    def _note_root(self, version: Version | None) -> Version | None:
        self._root = version.root if version else self._root
        return version

    def _switch_actor(self, error: ray.exceptions.RayError) -> None:
        """Switch to the actor that the root names now.

        Raises:
            WeightSyncError: there is no other one.
        """
        with suppress(ValueError, OSError):  # it is dead, or the root is not visible here
            if self._root and (address := read_address(self._root)):
                actor = ray.get_actor(address.name, address.namespace)
                if actor != self._actor:
                    self._actor = actor
                    return
        raise WeightSyncError(
            f"the Synchronizer does not answer ({type(error).__name__}); was it stopped, or its "
            "node lost?"
        ) from error
