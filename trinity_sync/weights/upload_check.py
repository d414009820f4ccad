"""Look at what a trainer uploads, in a thread that training does not wait for.

Weights that equal those of the upload before are named, once for each series: the rank of a node
that publishes last compares the images of two steps, up to the first bytes that differ. What the
job's ``on_nonfinite`` refuses, and so each reader does, is a failure.
"""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from trinity_sync.errors import SaveTimeoutError
from trinity_sync.fs.process import hold_handlers
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import VersionTag, lock_slot, read_version_tag
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.storage.placement import describe_ranks
from trinity_sync.weights.version_view import require_finite
from trinity_sync.weights.versions import VersionUnavailableError, make_shard

logger = logging.getLogger(__name__)

_PIECE = 1 << 20


class UploadCheck:
    """Looks at the uploads of one process, in their order."""

    def __init__(self, root: Path, spool: JobSpool) -> None:
        self._root, self._spool = root, spool
        self._last: dict[str, int] = {}
        self._unchanged: dict[str, bool] = {}
        """By role, whether the weights that were compared last equalled those before."""
        self._thread: threading.Thread | None = None
        self._failures: list[str] = []

    def start(self, tag: VersionTag) -> None:
        """Look at the version with this tag; returns at once."""
        before, self._last[tag.role] = self._last.get(tag.role, -1), tag.step
        thread = threading.Thread(
            target=self._run, args=(tag, before, self._thread), name="uploads", daemon=True
        )
        with hold_handlers(), suppress(RuntimeError):  # no thread can be started
            thread.start()
            self._thread = thread

    def wait(self, deadline: float | None) -> list[str]:
        """Wait until all is looked at, or a deadline (monotonic); return and drop the failures."""
        if self._thread:
            self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                raise SaveTimeoutError("uploads are still read; call wait_all again to wait longer")
        failures, self._failures = self._failures, []
        return failures

    def _run(self, tag: VersionTag, before: int, previous: threading.Thread | None) -> None:
        if previous:
            previous.join()
        try:
            self._look_at(tag, before)
        except VersionUnavailableError as error:
            self._failures.append(str(error))
            logger.error("Readers refuse what is published: %s", error)
        except Exception as error:  # the root or the spool is gone
            logger.warning("step %d of %s is not looked at: %s", tag.step, self._root, error)

    def _look_at(self, tag: VersionTag, before: int) -> None:
        job, role = read_job_settings(self._root), tag.role
        found = [each for each in self._spool.list_versions(role) if each[1].run == tag.run]
        now, then = ({e[1].rank: e for e in found if e[1].step == n} for n in (tag.step, before))
        is_frozen = {role, f"{role}/model"} & {*job.frozen.split(",")}
        # otherwise one is overwritten, or a rank publishes later
        if now and now.keys() == then.keys() and before != tag.step and not is_frozen:
            was_unchanged = self._unchanged.get(role)
            self._unchanged[role] = all(_are_equal(now[rank], then[rank]) for rank in now)
            if self._unchanged[role] and not was_unchanged:
                what = f"step {tag.step} of {self._root} ({describe_ranks([*now])})"
                logger.warning("%s is published, but has the weights of step %d", what, before)
        for slot in [slot for slot, each in found if each == tag and job.on_nonfinite == "refuse"]:
            with lock_slot(slot) as content:
                if read_version_tag(slot) == tag:
                    require_finite(make_shard(tag, slot, self._root, ""), [content[: tag.nbytes]])


def _are_equal(one: tuple[Path, VersionTag], other: tuple[Path, VersionTag]) -> bool:
    """Return whether two images are equal; False if one is overwritten meanwhile.

    Nothing is locked: a trainer adds a slot where a reader holds one.
    """
    size = one[1].nbytes
    if (size, one[1].layout) != (other[1].nbytes, other[1].layout):
        return False
    for at in range(0, size, _PIECE):
        count = min(_PIECE, size - at)
        here, there = (np.fromfile(slot, np.uint8, count, offset=at) for slot, _ in (one, other))
        if not np.array_equal(here, there):
            return False
    return all(read_version_tag(slot) == tag for slot, tag in (one, other))
