"""Publish versions of the weights from the trainer: each rank adds its image to the Synchronizer.

The images of all ranks, on whatever nodes, make a version. A rank makes one call and does not wait
for its answer: no collective is needed, and no training thread is blocked.
"""

import logging
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from trinity_sync.errors import WeightSyncError
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import VersionTag
from trinity_sync.weights.ray_cluster import find_synchronizer, require_ray
from trinity_sync.weights.versions import make_shard

logger = logging.getLogger(__name__)


class Publisher:
    """Publishes the images of one rank, in a process of the Ray cluster.

    A version waits ``gather_s`` seconds for the images of all ranks.

    Raises:
        StackError: Ray is not installed.
    """

    def __init__(
        self, synchronizer: Any, root: str | Path, spool: JobSpool, *, gather_s: float = 60.0
    ) -> None:
        self._synchronizer = synchronizer
        self._root, self._identity = str(root), read_identity(root)
        self._spool = spool
        self._gather_s = gather_s
        ray = require_ray("versions are published through a Ray actor")
        self._node = ray.get_runtime_context().get_node_id()
        self._pending: list[tuple[str, Future[None]]] = []

    def publish(self, tag: VersionTag) -> None:
        """Add the image with this version tag to the Synchronizer; returns at once."""
        description = f"version {tag.step} (run {tag.run}) of {self._root}"
        found = self._spool.list_versions(tag.role)
        slot = next((slot for slot, each in found if each == tag), None)
        if slot is None:
            logger.info("skipping %s: a newer version is in its slot", description)
            return
        version = make_shard(tag, slot, self._root, self._identity, self._node)
        call = self._synchronizer.add_images.remote(version, tag.world_size, self._gather_s)
        answer: Future[None] = call.future()
        answer.add_done_callback(lambda done: self._note_failure(done, description))
        self._pending = [
            (other, each) for other, each in self._pending if not each.done() or each.exception()
        ]
        self._pending.append((description, answer))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all versions with this rank's image are published; by default 2 * gather_s.

        Raises:
            WeightSyncError: versions were not published, or not in time; each is raised once.
        """
        limit_s = 2 * self._gather_s if timeout_s is None else timeout_s
        _, waiting = futures.wait([answer for _, answer in self._pending], limit_s)
        failures = []
        for description, answer in self._pending:
            if answer in waiting:
                failures.append(f"{description} is not published after {limit_s:g} s")
            elif error := answer.exception():
                failures.append(f"{description} is not published: {_get_cause(error)}")
        self._pending = []
        if failures:
            raise WeightSyncError("; ".join(failures))

    def _note_failure(self, answer: "Future[None]", what: str) -> None:
        if error := answer.exception():
            logger.error("%s is not published; training continues: %s", what, _get_cause(error))
            Thread(target=self._find_synchronizer, name="publisher", daemon=True).start()

    def _find_synchronizer(self) -> None:
        """Take the Synchronizer that has replaced a stopped one."""
        with suppress(OSError):  # the root is away
            self._synchronizer = find_synchronizer(self._root) or self._synchronizer


def _get_cause(error: BaseException) -> BaseException:
    """Return the error that the actor raised, without Ray's traceback."""
    return getattr(error, "cause", None) or error
