"""The run of the job that a process takes part in, and the step at which that run begins.

All processes of a run share a key, and the first of them opens the run: with the step that it
loads, or with none where its role has nothing to load. A key that is used again at the next start
would make that start the same run, and its steps would pass for those of the new start. That is
refused where it shows.
"""

import logging
import os
import threading
import uuid
from pathlib import Path

from trinity_sync.errors import ConfigError
from trinity_sync.layout import steps_on_disk
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.manifest import is_committed, read_run_number
from trinity_sync.storage.quarantine import quarantine_folder
from trinity_sync.storage.runs import Run, find_newest_run, open_run, record_resume

logger = logging.getLogger(__name__)


class RunContext:
    """The run that this process takes part in.

    Args:
        root: of the job.
        key: what all processes of the run have in common and no other run has.
    """

    def __init__(self, root: Path, key: str) -> None:
        self._root = root
        self._key = key
        self._run: Run | None = None
        self._opening = threading.Lock()
        self._has_saved = False

    def get(self) -> Run:
        """Return the run; it begins at step 0 if none of its processes has begun it yet."""
        with self._opening:  # by threads that stage, too
            if self._run is None:
                before = find_newest_run(self._root)
                self._run = open_run(self._root, self._key, 0)
                if before and before.number < self._run.number:
                    self._warn_of_earlier_steps(self._run)
            return self._run

    def begin_at(self, step: int) -> None:
        """Begin the run at a step that was loaded.

        Raises:
            ConfigError: as `require_can_begin_at`.
        """
        self.require_can_begin_at(step)
        if self._run is None:
            run = open_run(self._root, self._key, step)
            if run.resumed_from != step:  # the process that began it had nothing to load
                run = record_resume(self._root, run, step)
            self._run = run

    def require_can_begin_at(self, step: int) -> None:
        """See that the run can begin at ``step``, before that is loaded.

        Raises:
            ConfigError: it has begun already, at another step; or the key is that of a run that is
                not new.
        """
        if self._run:
            if self._run.resumed_from != step:
                raise ConfigError(
                    f"this run began at step {self._run.resumed_from} and cannot begin again at "
                    f"{step}; load before the first save"
                )
            return
        joined = find_newest_run(self._root)
        if joined is None or joined.key != self._key or joined.resumed_from == step:
            return
        if joined.resumed_from or self._has_committed(joined):
            raise ConfigError(
                f"run key {self._key!r} is that of run {joined.number} of {self._root}, which "
                f"began at step {joined.resumed_from} and cannot begin again at {step}; give "
                "TRINITY_SYNC_RUN a new value at each start"
            )

    @property
    def resumed_from(self) -> int:
        """Step that the run began at; 0 if it has not begun, or began without one."""
        return self._run.resumed_from if self._run else 0

    def require_new_step(self, step: int) -> None:
        """See at the first checkpoint that the run has not committed it; it would not be saved.

        But for the step that it began at, whose checkpoint a sync may have taken over.

        Raises:
            ConfigError: it has, and so the key is that of an earlier start.
        """
        if self._has_saved:
            return
        run = self.get()
        if step != run.resumed_from and is_committed(self._root, run.number, step, "checkpoint"):
            raise ConfigError(
                f"step {step} of {self._root} was committed before by run {run.number}, whose key "
                f"{run.key!r} this one has; give TRINITY_SYNC_RUN a new value at each start"
            )
        self._has_saved = True

    def _warn_of_earlier_steps(self, run: Run) -> None:
        if found := find_newest(self._root):
            logger.warning(
                "RUN %d BEGINS AT STEP 0 in %s, which has steps of earlier runs, the newest is %d. "
                "From this run's first commit on, that is what a resume finds; what it replaces is "
                "kept in %s. If you meant to go on, stop and load step %d first "
                "(coordinator.latest and load); a training of another kind wants another root.",
                run.number,
                self._root,
                found.step,
                quarantine_folder(self._root),
                found.step,
            )

    def _has_committed(self, run: Run) -> bool:
        return any(
            read_run_number(self._root, step) == run.number for step in steps_on_disk(self._root)
        )


def own_run_key() -> str:
    """Return ``TRINITY_SYNC_RUN``, or a random key where it is not set."""
    return os.environ.get("TRINITY_SYNC_RUN") or uuid.uuid4().hex
