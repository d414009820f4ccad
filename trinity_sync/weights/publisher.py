"""Publish versions of the weights from the trainer: each rank adds its image to the Synchronizer.

The images of all ranks, on whatever nodes, make a version. A rank makes one call and does not wait
for its answer: no collective is needed, and no training thread is blocked. Nor is one by what is
said of a version once its readers have it: that it changes nothing, or has values that the job
refuses.
"""

import logging
import os
import threading
import time
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from trinity_sync.errors import SaveTimeoutError, WeightSyncError
from trinity_sync.fs.atomic import open_no_follow
from trinity_sync.snapshot.job_identity import read_identity
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import VersionTag, read_version_tag
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.placement import describe_ranks
from trinity_sync.weights.ray_cluster import require_ray
from trinity_sync.weights.version_view import SlotReader, require_finite
from trinity_sync.weights.versions import VersionUnavailableError, make_shard

logger = logging.getLogger(__name__)

_PIECE = 1 << 20
"""Bytes of two images that are compared at a time."""


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
        answer.add_done_callback(lambda done: _log_failure(description, done))
        self._pending = [
            (other, each) for other, each in self._pending if not each.done() or each.exception()
        ]
        self._pending.append((description, answer))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all versions to which this rank added its image are published.

        Raises:
            WeightSyncError: versions were not published; each of them is raised once.
            TimeoutError: the time-out has passed.
        """
        _, waiting = futures.wait([answer for _, answer in self._pending], timeout_s)
        failures = []
        for description, answer in self._pending:
            if answer in waiting:
                raise TimeoutError(f"{description} is not published after {timeout_s:g} s")
            if error := answer.exception():
                failures.append(f"{description} is not published: {_get_cause(error)}")
        self._pending = []
        if failures:
            raise WeightSyncError("; ".join(failures))


def _get_cause(error: BaseException) -> BaseException:
    """Return the error that the actor raised, without Ray's traceback."""
    return getattr(error, "cause", None) or error


def _log_failure(description: str, answer: "Future[None]") -> None:
    if error := answer.exception():
        logger.error("%s is not published; training continues: %s", description, _get_cause(error))


class UploadCheck:
    """Looks at what a process publishes, in a thread that training does not wait for.

    Weights that equal those of the upload before are named, once for each series: the rank of a
    node that publishes last compares the images of two steps up to the first byte that differs.
    What the job's ``on_nonfinite`` refuses, and so each reader does, is a failure.
    """

    def __init__(self, root: Path, spool: JobSpool) -> None:
        self._root, self._spool = root, spool
        self._last: dict[str, VersionTag] = {}
        self._unchanged: set[str] = set()
        """Roles whose weights equalled those before when they were compared last."""
        self._thread: threading.Thread | None = None
        self._failures: list[str] = []

    def start(self, tag: VersionTag) -> None:
        """Look at the version with this tag after those before; returns at once."""
        before, self._last[tag.role] = self._last.get(tag.role), tag
        previous = self._thread

        def run() -> None:
            if previous:
                previous.join()
            try:
                self._look_at(tag, before)
            except VersionUnavailableError as error:
                self._failures.append(str(error))
                logger.error("Readers refuse what is published: %s", error)
            except Exception as error:  # the root or the spool is gone
                logger.warning("step %d of %s is not looked at: %s", tag.step, self._root, error)

        self._thread = threading.Thread(target=run, name="upload-check", daemon=True)
        self._thread.start()

    def wait(self, deadline: float | None) -> list[str]:
        """Wait until all is looked at, or a deadline (monotonic); return and drop the failures."""
        if self._thread:
            self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                raise SaveTimeoutError("uploads are still read; call wait_all again to wait longer")
        failures, self._failures = self._failures, []
        return failures

    def _look_at(self, tag: VersionTag, before: VersionTag | None) -> None:
        job, found = read_job_settings(self._root), [*self._spool.list_versions(tag.role)]
        frozen = {tag.role, f"{tag.role}/model"} & {*job.frozen.split(",")}
        if before and before.step < tag.step and not frozen:
            now, then = (
                {t.rank: (slot, t) for slot, t in found if (t.run, t.step) == (tag.run, step)}
                for step in (tag.step, before.step)
            )
            if now and now.keys() == then.keys():  # none is overwritten, or published later
                was_unchanged = tag.role in self._unchanged
                self._unchanged.discard(tag.role)
                if all(_are_equal(*now[rank], *then[rank]) for rank in now):
                    self._unchanged.add(tag.role)
                    if not was_unchanged:
                        what = f"step {tag.step} of {self._root} ({describe_ranks([*now])})"
                        logger.warning(UNCHANGED, what, before.step)
        for slot in (slot for slot, each in found if each == tag and job.on_nonfinite == "refuse"):
            if (reader := SlotReader(slot)).try_lock(tag.image):
                try:
                    version = make_shard(tag, slot, self._root, "")
                    require_finite(version, [reader.memory[: tag.nbytes]])
                finally:
                    reader.unlock()


UNCHANGED = "%s is published, but has the weights of step %d"


def _are_equal(slot: Path, tag: VersionTag, slot_before: Path, before: VersionTag) -> bool:
    """Return whether two slots hold equal images; False if one is overwritten meanwhile.

    A lock would be a slow reader's to the trainer, which adds a slot then.
    """
    if (tag.nbytes, tag.layout) != (before.nbytes, before.layout):
        return False
    pieces = np.empty((2, _PIECE), np.uint8)
    with open_no_follow(slot) as file, open_no_follow(slot_before) as other:
        for at in range(0, tag.nbytes, _PIECE):
            now, then = pieces[:, : min(_PIECE, tag.nbytes - at)]
            done = os.preadv(file.fileno(), [now], at), os.preadv(other.fileno(), [then], at)
            if done != (len(now), len(now)) or not np.array_equal(now, then):
                return False
    return [*map(read_version_tag, (slot, slot_before))] == [tag, before]
