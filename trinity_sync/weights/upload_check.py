"""Look at what a trainer uploads, in a thread that training does not wait for.

What the job's ``on_nonfinite`` refuses, and so each reader does, is a failure.
"""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

from trinity_sync.errors import SaveTimeoutError
from trinity_sync.fs.process import hold_handlers
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import VersionTag, lock_slot, read_version_tag
from trinity_sync.storage.job_settings import read_job_settings
from trinity_sync.weights.versions import VersionUnavailableError, make_shard

logger = logging.getLogger(__name__)


class UploadCheck:
    """Looks at the uploads of one process, in their order."""

    def __init__(self, root: Path, spool: JobSpool) -> None:
        self._root, self._spool = root, spool
        self._thread: threading.Thread | None = None
        self._failures: list[str] = []

    def start(self, tag: VersionTag) -> None:
        """Look at the version with this tag; returns at once."""
        thread = threading.Thread(
            target=self._run, args=(tag, self._thread), name="uploads", daemon=True
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

    def _run(self, tag: VersionTag, previous: threading.Thread | None) -> None:
        if previous:
            previous.join()
        try:
            if read_job_settings(self._root).on_nonfinite == "refuse":
                self._require_finite(tag)
        except VersionUnavailableError as error:
            self._failures.append(str(error))
            logger.error("Readers refuse what is published: %s", error)
        except Exception as error:  # the root or the spool is gone
            logger.warning("step %d of %s is not looked at: %s", tag.step, self._root, error)

    def _require_finite(self, tag: VersionTag) -> None:
        from trinity_sync.weights.version_view import require_finite  # of readers, for this alone

        found = self._spool.list_versions(tag.role)
        for slot in [slot for slot, each in found if each == tag]:
            with lock_slot(slot) as content:
                if read_version_tag(slot) == tag:
                    require_finite(make_shard(tag, slot, self._root, ""), [content[: tag.nbytes]])
