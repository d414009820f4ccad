"""Runs of a job: each start is a run, which may supersede steps of earlier runs.

A run is a small file ``root/.trinity_sync/runs/{number}.json``. It is written once, except for the
step that it resumes from if a process that loads nothing wrote it first. A run that resumed from
step M supersedes all saves of earlier runs beyond M that are not committed yet: they are refused,
otherwise explorers would receive weights that training no longer uses. Committed steps beyond M
count until the run has a commit of their kind. A run annuls the runs between itself and the run
whose commit it resumed from, and what those had superseded. A rewind is also a run.

A run that is still running is found by its lock. Rank 0 of each process group of a run holds a
shared lock of ``runs/{number}.lock`` for as long as it lives. The kernel releases the lock when the
process dies, however it dies; a file server that has lost the node of the process does so after a
while.
"""

import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from trinity_sync.errors import CommitError, RootAwayError, RootInUseError, SupersededError
from trinity_sync.fs.atomic import (
    WRONG_KIND,
    list_uncached,
    make_folder,
    pin_folder,
    read_file,
    replace_file,
)
from trinity_sync.fs.file_system import find_mount
from trinity_sync.fs.locks import (
    acquire_file_lock,
    create_file,
    open_lock_file,
    try_acquire_file_lock,
)
from trinity_sync.fs.process import describe_holder, describe_this_process
from trinity_sync.fs.records import Count, Record, decode_record, encode_record
from trinity_sync.layout import MANIFEST, PRIVATE_FOLDER, RUN_FORMAT, Kind, parse_number
from trinity_sync.snapshot.identity import Parent, SaveId, explain_away, read_identity
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.save_timing import read_saves

logger = logging.getLogger(__name__)

FETCHED = "fetched-step-"
"""Prefix of the key with which a root records the run of a step that was fetched into it."""


@dataclass(frozen=True)
class Run(Record, format=RUN_FORMAT):
    """One run of a job."""

    number: Count
    key: str
    """Equal in all processes of the run, different in every other run of the job."""
    resumed_from: Count
    """Step that the run started from; 0 for a fresh start."""
    resumed_run: Count = 0
    """Run that committed that step; 0 for a fresh start, and for a step that no run committed."""
    left_out: tuple[str, ...] = ()
    """Components of that step that it asked not to load, such as ``actor/optim``."""
    parents: tuple[Parent, ...] = ()
    """That step, as it was then; of a fresh start, the steps that the process which began it had
    loaded with `Checkpoints`, beside a coordinator of this job."""

    @property
    def is_fresh_start(self) -> bool:
        """Whether the run began at step 0 and continues no other."""
        return not self.resumed_from and not self.resumed_run


def open_run(root: str | Path, key: str, resumed_from: int, resumed_run: int = 0) -> Run:
    """Return the newest run if it has this key, otherwise begin the next run; see `Run`."""
    return join_run(root, key, resumed_from, resumed_run)[0]


def join_run(
    root: str | Path,
    key: str,
    resumed_from: int,
    resumed_run: int = 0,
    *,
    parents: Sequence[Parent] = (),
    find_last: Callable[[], int] = lambda: 0,
    before_begin: Callable[[int], object] = lambda number: None,
) -> tuple[Run, bool]:
    """Do as `open_run`; return also whether this call has begun the run.

    ``find_last`` returns the last run that has steps here: they may have been copied from a root
    with more runs. ``before_begin`` is called with the number of the next run before each attempt
    to begin it.
    """
    folder = _folder(root)
    while True:
        newest = find_newest_run(root)
        if newest and newest.key == key:
            return newest, False
        last = max(newest.number if newest else 0, resumed_run, find_last())
        run = Run(last + 1, key, resumed_from, resumed_run, parents=tuple(parents))
        before_begin(run.number)
        make_folder(folder)
        if create_file(folder / f"{run.number}.json", encode_record(run)):
            return run, True


def record_resume(
    root: str | Path, run: Run, step: int, resumed_run: int, parents: Sequence[Parent] = ()
) -> Run:
    """Record the step that a run resumes from, if a process that loads nothing opened the run.

    Otherwise the run would count as a fresh start, and all earlier steps as superseded.
    """
    resumed = replace(run, resumed_from=step, resumed_run=resumed_run, parents=tuple(parents))
    replace_file(_folder(root) / f"{run.number}.json", encode_record(resumed))
    return resumed


def record_left_out(
    root: str | Path, run: Run, roles: Collection[str], names: Iterable[str]
) -> Run:
    """Record what a run has left out of some roles of the step that it resumed from."""
    now = _read(path := _folder(root) / f"{run.number}.json")
    others = {*now.left_out}.difference(list_left_out(now, roles))
    told = replace(now, left_out=tuple(sorted({*others, *names})))
    replace_file(path, encode_record(told))
    return told


def list_left_out(run: Run, roles: Collection[str]) -> list[str]:
    """Return what the record of a run says that it has left out of some roles."""
    return [name for name in run.left_out if name.partition("/")[0] in roles]


def list_runs(root: str | Path, *, after: int = -1) -> list[Run]:
    """Return the runs of the job with a number above ``after``, unordered.

    Raises:
        CommitError: the file of a run is torn.
        FormatError: another release has begun a run, so what it supersedes is unknown.
    """
    paths = list_uncached(_folder(root), "[0-9]*.json")
    runs = list[Run]()
    for path in paths:
        number = parse_number(path.stem)
        if number is not None and number > after:
            with suppress(FileNotFoundError):  # the root is being removed
                runs.append(_read(path))
    return runs


def add_run(root: str | Path, run: Run) -> None:
    """Record a run of another root, so that runs here get later numbers."""
    newest = find_newest_run(root)
    if newest is None or newest.number < run.number:
        make_folder(_folder(root))
        create_file(_folder(root) / f"{run.number}.json", encode_record(run))


def find_newest_run(root: str | Path) -> Run | None:
    """Return the run with the highest number, or None."""
    runs = list_runs(root)
    return max(runs, key=lambda run: run.number) if runs else None


def is_run_gone(runs: Iterable[Run], run: int, run_key: str) -> bool:
    """Return whether a root whose runs are listed has lost a run, since it was restored."""
    keys = {each.number: each.key for each in runs}
    if not (key := keys.get(run, "")):
        return run > max(keys, default=run)
    return run_key not in ("", key) and not key.startswith(FETCHED)


def read_restart_time(root: str | Path, run: int, later: int) -> float | None:
    """Return when the run ``later`` began, in seconds since the epoch, if it is another training.

    None if both go back to the same fresh start, or the run is unknown.
    """
    runs = list_runs(root)
    same = _find_first_run(runs, run) == _find_first_run(runs, later)
    return None if same else read_start_time(root, later) or None


def read_start_time(root: str | Path, number: int) -> float:
    """Return when a run began, in seconds since the epoch; 0 for an unknown run."""
    try:
        return (_folder(root) / f"{number}.json").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _find_first_run(runs: Iterable[Run], number: int) -> int:
    """Return the number of the fresh start that a run goes back to, as far as runs are known."""
    for each in _iter_line(run for run in runs if run.number <= number):
        number = each.number if each.is_fresh_start else each.resumed_run or each.number
    return number


def run_began_after(root: str | Path, number: int, path: Path) -> bool:
    """Return whether a run began after a file was written, by the clock of the file system."""
    try:
        return (_folder(root) / f"{number}.json").stat().st_mtime > path.stat().st_mtime
    except FileNotFoundError:
        return False


def refuse_superseded(root: str | Path, run: int, run_key: str, step: int) -> None:
    """Refuse to commit a step that a later run has superseded.

    ``run_key`` is empty if only the number of the run is known.

    Raises:
        SupersededError: a later run resumed from before ``step``, or the root was recreated.
        CommitError, FormatError: as `list_runs`.
    """
    runs = list_runs(root)
    if run_key and (run, run_key) not in {(each.number, each.key) for each in runs}:
        raise _explain_unknown(root, run, step)
    if later := find_superseding_run(runs, run, step):
        raise explain_superseded(root, run, step, later)


def is_superseded(root: str | Path, run: int, step: int, run_key: str = "") -> bool:
    """Return whether a later run has superseded a step; otherwise as `refuse_superseded`."""
    try:
        refuse_superseded(root, run, run_key, step)
    except SupersededError:
        return True
    return False


def explain_superseded(root: str | Path, run: int, step: int, later: Run) -> SupersededError:
    """Return the error of a step that a later run has superseded."""
    return SupersededError(
        f"step {step} of run {run} in {root} is superseded: run {later.number} resumed from "
        f"step {later.resumed_from}. If that was a mistake, end that run and start this one "
        "again; otherwise no action is needed."
    )


def _explain_unknown(root: str | Path, run: int, step: int) -> SupersededError:
    return SupersededError(
        f"step {step} of run {run} in {root} is superseded: the root was removed and recreated, or "
        f"restored from a backup, after run {run} had begun. If that run still trains, start it "
        "again, which resumes from the newest step; otherwise no action is needed."
    )


def refuse_other_job(save: SaveId, spool: JobSpool | None = None) -> None:
    """Refuse to save a step whose root is not there, or was restored since.

    A root that lacks a commit which the ``spool`` knows of was restored.

    Raises:
        SupersededError: an earlier state of the job is there now.
        RootAwayError: as `explain_away`.
        CommitError, FormatError: as `read_identity`; or the file of the run is so, or the folder of
            the runs is a link.
    """
    if why := explain_away(save.root, save.job):
        with suppress(OSError):
            read_identity(save.root)  # which refuses a root of another release
        raise RootAwayError(f"{save} waits in shared memory: {why}")
    path = _folder(save.root) / f"{save.run}.json"
    if save.run_key:
        key = ""
        try:
            with suppress(FileNotFoundError), pin_folder(path.parent):  # which is read uncached
                key = _read(path).key
        except OSError as error:
            if error.errno not in WRONG_KIND:
                raise
            raise CommitError(f"{save} cannot be committed: {error}") from error
        if key != save.run_key:
            raise _explain_unknown(save.root, save.run, save.step)
    if spool and (seen := spool.read_commit(save.run_key)) is not None:
        is_there = (replace(save, step=seen).folder / MANIFEST).exists()
        known = (save.run, seen)  # also if it was removed since
        if not is_there and all((each.run, each.step) != known for each in read_saves(save.root)):
            raise _explain_unknown(save.root, save.run, save.step)


def find_superseding_run(runs: Iterable[Run], run: int, step: int) -> Run | None:
    """Return the first later run that superseded the step of a run, or None."""
    found = None
    for later in _iter_line(runs):
        if later.number <= run:
            break
        if later.is_fresh_start or later.resumed_from < step or 0 < later.resumed_run < run:
            found = later
    return found


def find_shared_step(runs: Iterable[Run], run: int, step: int) -> int | None:
    """Return the last step that a step of a run and the newest run have in common, or None."""
    line = {each.number: each.resumed_from for each in _iter_line(runs)}
    later = (resumed_from for number, resumed_from in line.items() if number > run)
    return min([step, *later]) if run in line else None


def _iter_line(runs: Iterable[Run]) -> Iterator[Run]:
    """Yield the newest run and those that it continues, down to a fresh start."""
    annulled = math.inf
    for run in sorted(runs, key=lambda each: each.number, reverse=True):
        if run.number <= annulled:
            yield run
            if run.is_fresh_start:
                return
            annulled = run.resumed_run or annulled


class Commit(Protocol):
    """A committed step."""

    @property
    def step(self) -> int:
        """Number of the step."""

    @property
    def run(self) -> int:
        """Number of the run that committed it."""

    @property
    def checkpoint_run(self) -> int:
        """Number of the earlier run whose checkpoint it still has; 0 if that is ``run``'s."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What it serves as."""


def find_run_of(commit: Commit, kind: Kind) -> int:
    """Return the number of the run that committed a kind of a step."""
    return (kind == "checkpoint" and commit.checkpoint_run) or commit.run


def find_superseded_steps(commits: Collection[Commit], runs: Iterable[Run]) -> dict[int, Run]:
    """Return the steps of a place that do not count, each with the run that superseded it.

    A run that has committed nothing of a kind supersedes no step of that kind. Resumes, latest
    pointers, policies and names such as ``latest`` all decide by this.
    """
    newest: dict[Kind, int] = defaultdict(int)
    for each in commits:
        for kind in each.kinds:
            newest[kind] = max(newest[kind], find_run_of(each, kind))
    found, known = dict[int, Run](), list(runs)
    for each in commits:
        last = min((newest[kind] for kind in each.kinds), default=0)
        counting = [run for run in known if run.number <= last]
        if later := find_superseding_run(counting, each.run, each.step):
            found[each.step] = later
    return found


def _read(path: Path) -> Run:
    wrong: ValueError | None = None
    try:
        run = decode_record(Run, read_file(path), path)
        if run.number == parse_number(path.stem):
            return run
    except ValueError as error:
        wrong = error
    raise CommitError(
        f"run file {path} is torn or edited; restore it, or remove it if that run is over"
    ) from wrong


def _folder(root: str | Path) -> Path:
    return Path(root) / PRIVATE_FOLDER / "runs"


WAIT_S = 30.0
"""Seconds to wait for the earlier run to end: its last save on preemption may take as long."""
SHARED_WAIT_S = 120.0
"""The same on a network file system, whose server releases the locks of a lost node after its grace
period, by default 90 s with NFS."""
LOOK_S = 0.2
"""Seconds between two looks at the lock."""


@contextmanager
def hold_run(root: str | Path, number: int) -> Iterator[None]:
    """Show within the block that a process of a run lives."""
    with acquire_file_lock(_lock_path(root, number), shared=True) as lock:
        with suppress(OSError):  # for messages on nodes that do not see this process
            os.pwrite(lock.fd, f"{describe_this_process()}\n".encode(), 0)
        yield


def find_living_run(root: str | Path, key: str) -> tuple[Run, str] | None:
    """Return the run that a process is still part of, and a description of the process.

    Of the runs that processes have begun, the newest counts: earlier ones are superseded. The
    caller's run, which has ``key``, does not count. Raises as `list_runs`.
    """
    for run in sorted(list_runs(root), key=lambda each: each.number, reverse=True):
        path = _lock_path(root, run.number)
        if run.key == key or not path.exists():  # a rewind has no process
            continue
        with open_lock_file(path) as lock:
            return None if lock.try_acquire() else (run, describe_holder(lock.fd, path))
    return None


def wait_for_living_run(root: str | Path, key: str, *, take_over: bool) -> None:
    """Wait for an earlier run to end; with ``take_over``, only warn that it is superseded.

    ``key`` is that of the caller's run.

    Raises:
        RootInUseError: the run has not ended in time.
        CommitError, FormatError: as `list_runs`.
    """
    limit_s = SHARED_WAIT_S if find_mount(Path(root)).shared else WAIT_S
    began, said = time.monotonic(), False
    while living := find_living_run(root, key):
        run, holder = living
        running = f"run {run.number} of {root} is still running: {holder}"
        if take_over:
            logger.warning("%s. Taking over: its later saves are refused", running)
            return
        if time.monotonic() - began >= limit_s:
            raise RootInUseError(
                f"{running}. A second run would supersede its saves, so none has begun. End that "
                "process, or use another root. To read steps beside it, use "
                "trinity_sync.Checkpoints; to supersede it, pass take_over=True or set "
                "TRINITY_SYNC_TAKE_OVER=1."
            )
        if not said:
            said = True
            logger.warning("%s. Waiting up to %.0f s for its end", running, limit_s)
        time.sleep(LOOK_S)


ENDED_S = 10.0
"""Seconds for which a run has had no process when nothing of it is awaited any longer."""


class RunEnd:
    """Tells when nothing else of a run can come, since its processes have ended."""

    def __init__(self, root: str | Path, number: int) -> None:
        self._path = _lock_path(root, number)
        self._look_at, self._free_since = 0.0, math.inf

    def is_over(self) -> bool:
        """Return whether the run has had no process for `ENDED_S`; it looks once a second."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + 1.0
            self._free_since = min(self._free_since, now) if self._is_free() else math.inf
        return now - self._free_since >= ENDED_S

    def _is_free(self) -> bool:
        if not self._path.exists():  # no process has shown that it lives
            return False
        with try_acquire_file_lock(self._path) as is_free:
            return is_free


def _lock_path(root: str | Path, number: int) -> Path:
    return Path(root) / PRIVATE_FOLDER / "runs" / f"{number}.lock"
