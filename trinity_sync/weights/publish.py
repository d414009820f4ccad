"""The trainer's side: tell the Synchronizer of a version, once the images of all ranks are there.

Each rank leaves its note beside its slot and trains on. A thread of rank 0 sees when the notes of
all ranks are there, and tells the Synchronizer: no collective is needed, and no training thread
waits for an actor.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

from trinity_sync.errors import WeightSyncError
from trinity_sync.snapshot.published import Published
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.weights.version import ImageRef, Version

logger = logging.getLogger(__name__)


class Publisher:
    """Publishes the versions of one job; rank 0 has one.

    Args:
        synchronizer: the job's, a Ray actor.
        root: of the job.
        spool: of the job on this node, which all ranks share.
        gather_s: seconds that a version waits for the notes of all ranks.
    """

    def __init__(
        self, synchronizer: Any, root: str | Path, spool: JobSpool, *, gather_s: float = 60.0
    ) -> None:
        self._synchronizer = synchronizer
        self._root = str(root)
        self._spool = spool
        self._gather_s = gather_s
        self._newest = (0, 0)
        self._thread = ThreadPoolExecutor(1, "publish")
        self._pending: list[Future[None]] = []

    def publish(self, published: Published) -> None:
        """Have the version of this rank's note published; returns at once."""
        self._newest = (published.run, published.step)
        self._pending = [each for each in self._pending if not each.done() or each.exception()]
        self._pending.append(self._thread.submit(self._publish, published))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the Synchronizer knows of all versions.

        Raises:
            WeightSyncError: it could not be told of one; each is raised once.
            TimeoutError: the time is over.
        """
        pending, failures = self._pending, []
        for each in pending:
            if error := each.exception(timeout_s):
                failures.append(str(error))
        self._pending = []
        if failures:
            raise WeightSyncError("; ".join(failures))

    def close(self) -> None:
        """Wait for what is under way, and end the thread."""
        self._thread.shutdown()

    def _publish(self, mine: Published) -> None:
        try:
            images = self._gather(mine)
            if images:
                version = Version(mine.step, mine.run, "memory", self._root, mine.role, images)
                ray.get(self._synchronizer.publish.remote(version))
        except Exception as error:
            message = f"version {mine.step} (run {mine.run}) of {self._root} is not published"
            logger.exception("%s; training goes on", message)
            raise WeightSyncError(f"{message}: {error}") from error

    def _gather(self, mine: Published) -> tuple[ImageRef, ...]:
        """The images of all ranks; none where the trainer has gone on meanwhile."""
        deadline = time.monotonic() + self._gather_s
        node = ray.get_runtime_context().get_node_id()
        while True:
            found = self._spool.published(mine.role, mine.run, mine.step)
            images = {
                said.rank: ImageRef(node, str(slot), said.image, said.rank, said.nbytes)
                for slot, said in found.items()
            }
            if len(images) == mine.world_size:
                return tuple(images[rank] for rank in range(mine.world_size))
            if self._newest > (mine.run, mine.step):
                logger.info("version %d is left out: a newer one is at hand", mine.step)
                return ()
            if time.monotonic() >= deadline:
                absent = sorted(set(range(mine.world_size)) - set(images))
                raise WeightSyncError(
                    f"ranks {absent} did not upload step {mine.step} on this node within "
                    f"{self._gather_s:g} s; all ranks have to upload, at the same steps"
                )
            time.sleep(0.002)
