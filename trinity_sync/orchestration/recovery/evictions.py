"""Report evictions of this node at once: a log line and an event for each save that was lost."""

import logging
import time
from pathlib import Path

from trinity_sync.orchestration.step_events import emit_step_event
from trinity_sync.snapshot.evictions import read_evictions
from trinity_sync.snapshot.spool import list_job_spools

logger = logging.getLogger(__name__)


class EvictionReporter:
    """Reports each save whose images are evicted on this node from now on, once."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._since = time.time()
        self._reported: set[tuple[str, int, int, str]] = set()

    def report(self) -> None:
        """Report the evictions since the last call."""
        found: set[tuple[str, int, int, str]] = set()
        for job in list_job_spools(self._spool):
            evictions = [e for e in read_evictions(job.folder) if e.evicted_at >= self._since]
            root = job.root if evictions else None
            for each in evictions if root else ():
                save = (job.folder.name, each.run, each.step, each.kind)
                found.add(save)
                if save in self._reported:
                    continue
                self._reported.add(save)
                level = logging.WARNING if each.kind == "checkpoint" else logging.INFO
                logger.log(
                    level,
                    "the %s of step %d of %s is lost: %s of role %s rank %d was evicted from the "
                    "spool of this node for step %d (%s)",
                    each.kind,
                    each.step,
                    root,
                    each.component,
                    each.role,
                    each.rank,
                    each.for_step,
                    each.why,
                )
                emit_step_event(
                    "evicted",
                    root or "",
                    each.step,
                    job=job.folder.name,
                    run=each.run,
                    kind=each.kind,
                    for_step=each.for_step,
                    why=each.why,
                )
        self._reported = found  # the others are no longer in the file
