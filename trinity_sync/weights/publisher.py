"""The trainer's side: each rank offers its image of a version to the Synchronizer.

That makes the images of all ranks, whatever nodes they are on, a version. A rank makes one call
that it does not wait for: no collective is needed, and no training thread stands still.
"""

import logging
import time
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from trinity_sync.errors import WeightSyncError
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.version_tag import VersionTag
from trinity_sync.weights.ray_cluster import require_ray
from trinity_sync.weights.version import ImageRef, Version

logger = logging.getLogger(__name__)


class Publisher:
    """Has the versions of one job published; every rank has one, in a process of the Ray cluster.

    Args:
        synchronizer: the job's, a Ray actor.
        root: of the job.
        spool: of the job on this node.
        gather_s: seconds that a version waits for the images of all ranks.
    """

    def __init__(
        self, synchronizer: Any, root: str | Path, spool: JobSpool, *, gather_s: float = 60.0
    ) -> None:
        self._synchronizer = synchronizer
        self._root = str(root)
        self._spool = spool
        self._gather_s = gather_s
        ray = require_ray("versions are published through a Ray actor")
        self._node = ray.get_runtime_context().get_node_id()
        self._pending: list[tuple[str, Future[None]]] = []

    def publish(self, mine: VersionTag) -> None:
        """Offer the image of this rank's note; returns at once."""
        what = f"version {mine.step} (run {mine.run}) of {self._root}"
        found = self._spool.published(mine.role, mine.run, mine.step)
        slot = next((str(slot) for slot, said in found.items() if said == mine), None)
        if slot is None:
            logger.info("%s is left out: a newer one is at hand", what)
            return
        image = ImageRef(self._node, slot, mine.image, mine.rank, mine.nbytes)
        version = Version(mine.step, mine.run, "memory", self._root, mine.role, (image,))
        offered = self._synchronizer.offer.remote(version, mine.world_size, self._gather_s)
        told: Future[None] = offered.future()
        told.add_done_callback(lambda done: _log(what, done))
        self._pending = [each for each in self._pending if not _succeeded(each[1])]
        self._pending.append((what, told))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the Synchronizer knows of all versions that this rank has offered.

        Raises:
            WeightSyncError: one is not published; each is raised once.
            TimeoutError: the time is over.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        failures = []
        for what, told in self._pending:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                error = told.exception(left_s)
            except futures.TimeoutError:  # Python 3.10 has one of its own
                raise TimeoutError(f"{what} is not published after {timeout_s:g} s") from None
            if error:
                failures.append(f"{what} is not published: {_reason(error)}")
        self._pending = []
        if failures:
            raise WeightSyncError("; ".join(failures))


def _succeeded(told: "Future[None]") -> bool:
    return told.done() and not told.exception()


def _reason(error: BaseException) -> BaseException:
    """What was raised in the actor, without Ray's traceback of it."""
    return getattr(error, "cause", None) or error


def _log(what: str, told: "Future[None]") -> None:
    if error := told.exception():
        logger.error("%s is not published; training goes on: %s", what, _reason(error))
