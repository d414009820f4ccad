"""What a coordinator is made of: each object, and which others it has."""

import os
import weakref
from pathlib import Path

from trinity_sync.client.attachments import Attachments
from trinity_sync.client.commit_watcher import CommitWatcher
from trinity_sync.client.function_runner import FunctionRunner
from trinity_sync.client.preemption import Preemption
from trinity_sync.client.run_context import RunContext
from trinity_sync.client.save_submitter import SaveSubmitter
from trinity_sync.client.saver_control import SaveTrigger
from trinity_sync.client.state_saver import StateSaver, UploadCheck
from trinity_sync.client.step_loader import StepLoader
from trinity_sync.layout import WriteConcurrency
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.stager import Stager
from trinity_sync.storage.metrics import MetricsLog
from trinity_sync.storage.placement import NodeRanks


class Collaborators:
    """The objects of one process that saves to a job."""

    root: Path
    spool: JobSpool
    rank: int
    world_size: int
    roles: tuple[str, ...]
    settings: Settings
    _places: tuple[NodeRanks, ...]
    _run: RunContext

    def _make_collaborators(
        self, requests: SaveTrigger, identity: str, write_concurrency: WriteConcurrency
    ) -> None:
        """Make them for a job that is open."""
        root, settings, rank = self.root, self.settings, self.rank
        here = (root, self.spool, self._run, rank, self.world_size, self._places)
        self._watcher = CommitWatcher(requests, self.spool, rank=rank, run=self._run)
        self._watcher.node_ranks = next(each.ranks for each in self._places if rank in each.ranks)
        self._submitter = SaveSubmitter(
            *here, self._watcher, identity, self.roles, write_concurrency
        )
        self._stager = Stager(
            self.spool,
            slots=settings.slots,
            ranks=sum(len(each.ranks) for each in self._places if each.node == settings.node),
            slot_wait_s=settings.slot_wait_s,
            on_long_wait=self._watcher.hurry,
        )
        self._loader = StepLoader(*here, self._watcher, self._stager)
        self._states = StateSaver(
            self._stager,
            self._submitter.submit_states,
            self._watcher.has_failed,
            check_overlap=settings.overlap == "check",
        )
        self._attachments = Attachments(root, rank, self._states)
        self._functions = FunctionRunner(root, self.spool)
        self._uploads = UploadCheck(root, self.spool)
        self._metrics = MetricsLog(root, self._run.find_run_of_metrics)
        self._preemption = Preemption(settings.save_by)
        dropped = weakref.finalize(self, _end_watcher, self._watcher, os.getpid())
        dropped.atexit = False


def _end_watcher(watcher: CommitWatcher, process: int) -> None:
    """End the thread of a coordinator that was dropped without `close`, as a notebook's cell does.

    Not in a forked child, which has the locks of its parent's threads.
    """
    if os.getpid() == process:
        watcher.end_at_most(10.0)
