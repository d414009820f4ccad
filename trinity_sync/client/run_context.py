"""The run of the job that this process is part of, and the step at which that run begins.

All processes of a run share a key, and the first of them opens the run: at the step that it loads,
or at step 0 if its role has nothing to load. A user's key has a random part of the start
(`find_start_key`). A second start among processes that live is an error where it is noticed.

A run begins with the first save, upload, save function or resume of a process, and with nothing
else. It supersedes saves of the run before it, so it waits for the processes of that run to end,
and is refused if they live on. If it takes over all the same, the run before it notices that in the
thread that follows its saves, and its next save is an error.
"""

import errno
import hashlib
import logging
import os
import re
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

from trinity_sync.errors import ConfigError, FormatError, ManifestError, RootError
from trinity_sync.fs.atomic import UNWRITABLE
from trinity_sync.fs.locks import open_lock_file
from trinity_sync.layout import PRIVATE_FOLDER, Kind, step_folder, steps_on_disk
from trinity_sync.snapshot.identity import Parent, explain_away, job_id, read_identity, require_root
from trinity_sync.storage.discovery import find_newest, is_foreign, read_latest_pointer
from trinity_sync.storage.manifest import Manifest, read_manifest, read_run_head, read_run_number
from trinity_sync.storage.metrics import find_run_of_step
from trinity_sync.storage.replace import quarantine_folder
from trinity_sync.storage.runs import (
    Run,
    explain_superseded,
    find_living_run,
    find_newest_run,
    find_superseding_run,
    hold_run,
    join_run,
    list_left_out,
    list_runs,
    record_left_out,
    record_resume,
    wait_for_living_run,
)

logger = logging.getLogger(__name__)


class RunContext:
    """The run that this process is part of.

    A context that ``leads``, as rank 0's does, shows that the run lives. One that ``takes_over``
    begins the run even while an earlier one lives.
    """

    def __init__(
        self, root: Path, key: str, *, leads: bool = True, takes_over: bool = False
    ) -> None:
        self._root = root
        self._job = job_id(root)
        self._key = key
        self._leads = leads
        self._takes_over = takes_over
        _contexts[str(root)] = self
        _living.add(self)
        self._run: Run | None = None
        self._later: list[Run] = []
        """Runs that have begun after this one, as of the last `notice_later_runs`."""
        self._is_superseded = False
        self._opening = threading.RLock()  # a signal's handler may save while it is held
        self._begins: tuple[int, int, Sequence[Parent]] | None = None
        """Step, its run and parents, while `begin_at` waits: a handler's save is of that run."""
        self._lock = ExitStack()
        self._loaded: dict[Parent, None] = {}
        """The steps that this process has loaded with `Checkpoints` since, in order."""
        self._saved: dict[tuple[str, Kind], int] = {}
        """Newest step that this process has saved, by role and kind."""
        self._unwritable: BaseException | None = None

    def get(self) -> Run:
        """Return the run; open it at step 0 if none of its processes has opened it yet.

        Raises:
            RootInUseError: an earlier run lives.
            RootError: the root cannot be written.
        """
        with self._opening:  # threads that stage call it as well
            if self._run is None:
                with self._require_writable():
                    self._run, began = self._join(*(self._begins or (0, 0, [*self._loaded])))
                if began and not self._begins:
                    self._warn_of_earlier_steps(self._run)
            return self._run

    def begin_at(self, step: int, left_out: Mapping[str, Collection[str]] = {}) -> Run | None:
        """Begin the run at a step that was loaded, and return the run.

        ``left_out`` has the components of it that no call has loaded, of each role that was loaded.

        A root that cannot be written is only loaded from: it gets no run, and the first save fails.

        Raises:
            ConfigError, RootInUseError: as in `require_can_begin_at`.
        """
        self.require_can_begin_at(step)
        with self._opening:
            if self._run is None:
                try:
                    with self._require_writable():
                        loaded = read_run_number(self._root, step)
                        self._begins = step, loaded, self._describe(step)
                        run, began = self._join(*self._begins)
                        if began and loaded:
                            self._warn_of_later_foreign_step(run)
                        if run.resumed_from != step:  # its process had nothing to load
                            run = record_resume(self._root, run, *self._begins)
                        self._run = run
                except RootError as error:
                    self._unwritable = error.__cause__
                finally:
                    self._begins = None
            names = {f"{role}/{name}" for role in left_out for name in left_out[role]}
            if self._run and names != {*list_left_out(self._run, left_out)}:
                with suppress(OSError):  # the disk is full: what was loaded is good
                    self._run = record_left_out(self._root, self._run, left_out, names)
            return self._run

    def join(self, run: Run | None) -> None:
        """Be part of a run that another process with the same key has begun at a step."""
        self._run = run
        if run is None and self._unwritable is None:
            self._unwritable = OSError(errno.EROFS, "rank 0 could not begin the run")

    def close(self) -> None:
        """Show no longer that the run lives."""
        self._lock.close()

    @property
    def parents(self) -> tuple[Parent, ...]:
        """What the run has begun from, as in `Run`; empty before it has begun."""
        return self._run.parents if self._run else ()

    @property
    def number(self) -> int:
        """Number of the run; 0 before it has begun."""
        return self._run.number if self._run else 0

    def has_begun(self) -> bool:
        """Return whether this process has begun the run, or joined it."""
        return self._run is not None

    def require_can_begin_at(self, step: int) -> None:
        """Require that the run can begin at a step, before the step is loaded.

        Raises:
            ConfigError: the run has already begun at another step, or its key was used by an
                earlier run.
            RootInUseError: an earlier run lives.
        """
        if self.has_begun_at(step):
            return
        joined = find_newest_run(self._root)
        if joined is None or joined.key != self._key:
            with suppress(RootError), self._require_writable():  # such a root gets no run
                self._wait_for_earlier_run()
            return
        if joined.resumed_from == step:
            return
        if joined.resumed_from or joined.number in self._list_committing_runs():
            raise ConfigError(
                f"run key {self._key!r} is that of run {joined.number} of {self._root}, which "
                f"began at step {joined.resumed_from} and cannot begin again at {step}; give "
                "TRINITY_SYNC_RUN_KEY a new value at each start"
            )

    def has_begun_at(self, step: int) -> bool:
        """Return whether this process has begun the run, at this step; the root is not read.

        Raises:
            ConfigError: it has begun the run at another step.
        """
        if self._run and self._run.resumed_from != step:
            raise ConfigError(
                f"this run of {self._root} began at step {self._run.resumed_from} and cannot "
                f"begin again at step {step}; load before the first save; "
                "to only read a step: Checkpoints(root).load"
            )
        return self._run is not None

    @property
    def resumed_from(self) -> int:
        """Step that the run resumed from; 0 if it has not begun, or has loaded no step."""
        return self._run.resumed_from if self._run else 0

    def require_next_step(self, step: int, role: str, kind: Kind) -> bool:
        """Require that a step is not before the newest that this process has saved.

        Return whether this process has begun to save the step before, also without success.
        A resume would not find such a step, and a policy would remove it first. Before a role's
        first checkpoint, the newest step that the run has committed counts; the step that it
        resumed from does not.

        Raises:
            ConfigError: the step is before it, or the run's key was used by an earlier start.
        """
        newest = self._saved.get((role, kind))
        if newest is None and kind == "checkpoint":
            self._require_not_committed(step)
        if newest is not None and step < newest:
            raise ConfigError(
                f"step {step}, role {role}, of {self._root} cannot be saved after step {newest}: "
                "the newest step of a run is the one with the highest number, so a resume would "
                "not find it and retention would remove it first. Number the steps of a run in the "
                "order of their saves; to repeat steps, load an earlier one in a new run"
            )
        self._saved[role, kind] = step
        return step == newest

    def note_saved(self, step: int, roles: Iterable[str], kind: Kind) -> None:
        """Have a step count as saved, as `require_next_step` does, whose states others write."""
        for role in roles:
            self._saved[role, kind] = max(step, self._saved.get((role, kind), 0))

    def _require_not_committed(self, step: int) -> None:
        run = self.get()
        latest = read_latest_pointer(self._root, "checkpoint") or step
        for each in (step, latest):
            if each < step or each == run.resumed_from:
                continue
            manifest = read_run_head(self._root, run.number, each)
            if manifest and manifest.has_kind("checkpoint"):
                raise ConfigError(
                    f"step {step} of {self._root} cannot be saved: run {run.number}, which has the "
                    f"same key {run.key!r}, has committed step {each}; give TRINITY_SYNC_RUN_KEY a "
                    "new value at each start"
                )

    @contextmanager
    def _require_writable(self) -> Iterator[None]:
        """Require that the root can be written in the block, and that it could be before.

        A root that is writable only after a step was loaded has no run that began at the step.
        """
        try:
            if self._unwritable is not None:
                raise self._unwritable
            yield
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            raise RootError(
                f"{self._root} cannot be written ({error.strerror}): its steps can be loaded, and "
                "none can be saved. Free space there, change its owner or mode, or mount it for "
                "writing, and start again; or choose another root."
            ) from error

    def find_run_of_metrics(self, step: int) -> int | None:
        """Return the number of the run whose step metrics are of.

        None before this run has begun, and while the job is not at its root. It is this run if it
        makes the step, otherwise as `find_run_of_step` says.

        Raises:
            CommitError, FormatError: as `list_runs`.
        """
        run = self._run or find_newest_run(self._root)
        if run is None or run.key != self._key or explain_away(self._root, self._job):
            return None
        if step > run.resumed_from or not run.resumed_from:
            return run.number
        found = find_run_of_step(self._root, step)
        return found if found <= run.number else run.resumed_run

    def notice_later_runs(self) -> None:
        """Look for runs that have begun after this one, and log the first that supersedes it.

        Raises:
            OSError, CommitError, FormatError: as `list_runs`.
        """
        run = self._run
        if run is None or not (found := list_runs(self._root, after=run.number)):
            return
        self._later = found
        beyond_all = max(each.resumed_from for each in found) + 1
        later = find_superseding_run(found, run.number, beyond_all)
        if later and not self._is_superseded:
            living = find_living_run(self._root, self._key)
            self._is_superseded = True
            logger.error(
                "Run %d of %s, which this process is part of, is superseded: run %d has begun at "
                "step %d%s. Saves beyond that step are refused. End this training; if the other "
                "was a mistake, end that and start this one again",
                run.number,
                self._root,
                later.number,
                later.resumed_from,
                f" ({living[1]})" if living else "",
            )

    def require_not_superseded(self, step: int) -> None:
        """Require that no later run that was noticed supersedes a step; the root is not read.

        Raises:
            SupersededError: a later run does.
        """
        if self._later and (later := find_superseding_run(self._later, self.number, step)):
            raise explain_superseded(self._root, self.number, step, later)

    def _describe(self, step: int) -> list[Parent]:
        """Return a step that the run begins at, unless no run has committed it."""
        with suppress(ManifestError, FormatError):
            manifest = read_manifest(self._root, step)
            return [manifest.as_parent(self._root)] if manifest else []
        return []

    def _join(
        self, step: int, resumed_run: int = 0, parents: Sequence[Parent] = ()
    ) -> tuple[Run, bool]:
        """Join the run or begin it at a step, and show that it lives, from before it begins on.

        Return also whether this call has begun it; nothing is created where the job is not.
        """

        def hold(number: int) -> None:
            self._lock.close()
            require_root(self._root, self._job)
            if self._leads:
                self._lock.enter_context(hold_run(self._root, number))

        def prepare(number: int) -> None:
            self._lock.close()  # of an attempt in which another process was faster
            self._wait_for_earlier_run()
            hold(number)

        try:
            run, began = join_run(
                self._root,
                self._key,
                step,
                resumed_run,
                parents=parents,
                find_last=lambda: max(self._list_committing_runs(), default=0),
                before_begin=prepare,
            )
            if not began:
                hold(run.number)
        except BaseException:
            self._lock.close()
            raise
        return run, began

    def _list_committing_runs(self) -> list[int]:
        return [read_run_number(self._root, step) for step in steps_on_disk(self._root)]

    def _wait_for_earlier_run(self) -> None:
        """Wait until no process of an earlier run lives.

        Coordinators that this process made before are no obstacle: it knows of them.

        Raises:
            RootInUseError: a process lives on.
        """
        for other in [*_living]:
            if other._root == self._root and other._key != self._key:
                other.close()
        wait_for_living_run(self._root, self._key, take_over=self._takes_over)

    def _warn_of_earlier_steps(self, run: Run) -> None:
        found = find_newest(self._root)
        if found and found.run < run.number:
            logger.warning(
                "Run %d begins at step 0 in %s, which has steps of earlier runs; the newest is %d. "
                "After this run's first commit, a resume finds that commit; steps that it replaces "
                "are kept in %s. To continue the earlier training, stop and load step %d first "
                "(coordinator.latest_step and load); for another training, use another root.",
                *(run.number, self._root, found.step, quarantine_folder(self._root), found.step),
            )
        elif foreign := [
            step for step in steps_on_disk(self._root) if is_foreign(step_folder(self._root, step))
        ]:
            logger.warning(
                "Run %d begins at step 0 in %s, which has steps of another system; the newest is "
                "%d. Those that this run saves as well are kept in %s. To continue that training, "
                "stop and load that step with its own system first; for another one, use another "
                "root.",
                *(run.number, self._root, max(foreign), quarantine_folder(self._root)),
            )

    def _warn_of_later_foreign_step(self, run: Run) -> None:
        named = read_latest_pointer(self._root, "checkpoint") or 0
        if named > run.resumed_from and is_foreign(step_folder(self._root, named)):
            logger.warning(
                "Run %d begins at step %d in %s, whose latest pointer names step %d of another "
                "system. It names this run's steps after their commit. To continue from step %d, "
                "stop and load it with its own system first.",
                *(run.number, run.resumed_from, self._root, named, named),
            )


def note_loaded(root: Path, manifest: Manifest) -> None:
    """Have the runs of this process that have not begun record a step, if they begin at step 0."""
    parent = manifest.as_parent(root)
    for context in [*_living]:
        if not context.has_begun():
            context._loaded[parent] = None


def make_run_key() -> str:
    """Return a random key for a run."""
    return uuid.uuid4().hex


_RANDOM = re.compile("[0-9a-f]{32}$")
_naming = threading.Lock()
_starts: dict[tuple[str, ...], tuple[ExitStack, str]] = {}
"""What holds the locks of this process's starts until it ends, and their keys."""


def find_start_key(root: Path, key: str) -> str:
    """Return a user's key with the random part of this start, which ``runs/start-*.lock`` has.

    Processes with the key that live at one time get the same part, and a process always does. A key
    with a random part stays as it is, as does any in a root that cannot be written.
    """
    name = f"{PRIVATE_FOLDER}/runs/start-{hashlib.sha256(key.encode()).hexdigest()[:16]}.lock"
    start = str(root), read_identity(root), key
    with _naming, ExitStack() as held:
        if start not in _starts and not _RANDOM.search(key):
            try:
                lock = held.enter_context(open_lock_file(root / name))
                if lock.try_acquire():  # no other process lives
                    os.pwrite(lock.fd, make_run_key().encode(), 0)
                # what is read under the shared lock stays
                lock.acquire(shared=True, limit_s=60.0)
                _starts[start] = held.pop_all(), f"{key}.{os.pread(lock.fd, 32, 0).decode()}"
            except OSError as error:
                if error.errno not in UNWRITABLE:
                    raise
        return _starts[start][1] if start in _starts else key


_contexts: "WeakValueDictionary[str, RunContext]" = WeakValueDictionary()
"""By root, as text, which can be compared while Python ends: the context that this process made
last."""
_living: "WeakSet[RunContext]" = WeakSet()
"""All contexts of this process."""


def find_run_key(root: Path) -> str | None:
    """Return the key of the run of a root that this process is part of; None if there is none.

    The root is a path that `init_root.resolve_root` has returned.
    """
    context = _contexts.get(str(root))
    return context._key if context else None
