"""Report evictions of this node at once: a log line and an event for each save that was lost."""

import logging
from pathlib import Path

from trinity_sync.orchestration.step_events import emit_step_event
from trinity_sync.snapshot.evictions import read_evictions
from trinity_sync.snapshot.spool import list_job_spools

logger = logging.getLogger(__name__)


class EvictionReporter:
    """Reports each save whose images were evicted on this node, once.

    Args:
        spool: The node's spool.
    """

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._reported: set[tuple[str, int, int, str]] = set()

    def report(self) -> None:
        """Report the evictions since the last call."""
        for job in list_job_spools(self._spool):
            root = job.root
            for each in read_evictions(job.folder) if root else ():
                save = (job.folder.name, each.run, each.step, each.kind)
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
                    run=each.run,
                    kind=each.kind,
                    for_step=each.for_step,
                    why=each.why,
                )
