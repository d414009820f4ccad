"""The version registry of a reader that has a Synchronizer: it asks the Ray actor."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from trinity_sync.errors import WeightSyncError
from trinity_sync.weights.delta import Array
from trinity_sync.weights.object_store import Copy, fetch, fetch_deltas
from trinity_sync.weights.rounding import Spans
from trinity_sync.weights.state_files import read_address
from trinity_sync.weights.version import Version

ANSWER_S = 60.0
"""Seconds for which the Synchronizer's answer is waited for; Ray may be starting it again."""


class ActorRegistry:
    """The Synchronizer, a Ray actor; where it was stopped, the one that has taken its place.

    Args:
        actor: the job's.
        root: of the job; without it, what the first version says.
    """

    def __init__(self, actor: Any, root: str | Path | None = None) -> None:
        self._actor, self._root = actor, root
        self.node: str | None = ray.get_runtime_context().get_node_id()

    def latest(self) -> Version | None:
        """The newest version that can be read.

        Raises:
            WeightSyncError: the Synchronizer does not answer.
        """
        while True:
            asked = self._actor.latest.remote(readable=True)
            try:
                return self._noted(ray.get(asked, timeout=ANSWER_S))
            except ray.exceptions.RayError as error:
                self._turn_to_another(error)

    async def wait_newer(
        self, than: int, timeout_s: float | None, run: int | None
    ) -> Version | None:
        """The same once it is beyond step ``than`` of ``run``; None at the time-out.

        Raises:
            WeightSyncError: the Synchronizer was stopped, or lost.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            asked = self._actor.wait_newer.remote(than, left_s, run, readable=True)
            try:
                return self._noted(await asked)
            except ray.exceptions.RayError as error:
                self._turn_to_another(error)

    def serving(self, reader: str, step: int, run: int) -> None:
        """The reader serves this version now; nothing is waited for."""
        self._actor.serving.remote(reader, step, run)

    def copies(self, version: Version, ranks: Sequence[int], timeout_s: float) -> Sequence[Copy]:
        """The images of these ranks, which are on other nodes; see `copies.fetch`."""
        return fetch(self._actor, version, ranks, timeout_s)

    def deltas(
        self, base: Version, version: Version, spans: Sequence[Spans], timeout_s: float
    ) -> Sequence[Array]:
        """What turns the images of ``base`` into the version's; see `copies.fetch_deltas`."""
        return fetch_deltas(self._actor, base, version, spans, timeout_s)

    def _noted(self, found: Version | None) -> Version | None:
        self._root = found.root if found else self._root
        return found

    def _turn_to_another(self, error: ray.exceptions.RayError) -> None:
        with suppress(ValueError, OSError):  # it does not live, or the root is not seen from here
            if self._root and (there := read_address(self._root)):
                actor = ray.get_actor(there.name, there.namespace)
                if actor != self._actor:
                    self._actor = actor
                    return
        raise WeightSyncError(
            f"the Synchronizer does not answer ({type(error).__name__}); was it stopped, or its "
            "node lost?"
        ) from error
