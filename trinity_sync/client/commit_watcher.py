"""Have the saver drive saves, and follow each save until it is committed or has failed.

The manifest in the root tells that a save is committed, the journal in the root that it failed
(`journal`); no process queries the server. Rank 0 has a thread that wakes the saver and reads the
root, so a failure is in its log seconds later. The other ranks have no standing thread: they read
the root while `wait_all` waits, or once many saves are pending.

Reading the root blocks the thread. While that takes long, nothing could be committed either: the
file system hangs, or its commit lock is held.
"""

import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from trinity_sync.client.run_context import RunContext
from trinity_sync.client.saver_control import SaveTrigger
from trinity_sync.errors import (
    FormatError,
    SaveError,
    SaveTimeoutError,
    SpoolError,
    TrinitySyncError,
    warn_once,
)
from trinity_sync.fs.atomic import read_file
from trinity_sync.saves.journal import PATIENCE_S, Entry, Journal, append
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import PendingSave, end_images
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.placement import describe_ranks, read_placement

logger = logging.getLogger(__name__)

LOOK_S = 0.02, 2.0
"""Seconds between two reads of the root: for a new save, and at most for an old one."""
OTHERS_LOOK_S = 0.1
"""Seconds between two reads by ranks other than 0 at least: thousands of them may wait."""
CARE_S = 2.0
"""Seconds between two looks for saves that nothing will commit, see `SaveTrigger.find_failures`."""
WATCH_S = 5.0
"""Seconds between two looks for a run that supersedes this one."""
RETRY_S = 1.0
"""Seconds after which the thread continues after an error."""
SIGNAL_S = 1.0
"""Most seconds of a wait of the main thread: a signal that comes just before does not end it."""
SAY_S = 15.0
"""Seconds after which the log says what a save, or `wait`, waits for."""
HURRY_S = 5.0
"""Seconds after which the saver commits what no flow run has begun while a process waits for it."""
MANY = 64
"""Pending saves at which a rank without a standing thread starts one to read their status."""


class CommitWatcher:
    """Follows the saves of one process until each is committed or has failed.

    With ``run``, the thread of rank 0 also notices that a later run supersedes this one.
    """

    def __init__(
        self, trigger: SaveTrigger, spool: JobSpool, *, rank: int = 0, run: RunContext | None = None
    ) -> None:
        self.commit_seconds: dict[str, float] = {}
        """Seconds from submission to commit, by request key. Rank 0 measures them; other ranks take
        the manifest's time, so the clocks of two nodes decide."""
        self._trigger = trigger
        self._spool = spool
        self._rank = rank
        self.node_ranks: Collection[int] = ()
        """Ranks of this node, of which warnings name those that have not saved."""
        self._leads = rank == 0
        # no reference: the thread lives on, and a coordinator that is gone has no living run
        self._own_run = weakref.ref(run) if run and self._leads else None
        self._watch_at = self._care_at = 0.0
        self._away = ""
        self._left = ""
        """Key of the last save that the stack has left to the saver, which was woken for it."""
        self._journal: Journal | None = None
        self._pending: dict[str, PendingSave] = {}
        self._failures: list[str] = []
        """Failures that no `wait` has returned yet."""
        self._failed: dict[str, str] = {}
        """The last failure of each save, by request key."""
        # the lock is entered, since a signal's handler that raises in a condition leaves it locked
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        """Number of calls of `wait` in progress."""
        self._sweep_at = MANY
        """Number of pending saves at which the next short thread starts."""
        self._sweeps = False
        self._end_at = math.inf
        """When nothing more is done (monotonic)."""
        self._thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # a signal's handler may wake too

    def follow(
        self,
        request: SaveRequest,
        *,
        images: Collection[str] = (),
        exports: str = "",
        submit: bool = False,
    ) -> None:
        """Follow a save, and the export of a role's model if one is named; return at once.

        This process wakes the saver only with ``submit``. ``images`` are the random names of its
        images, all of which have to be part of the commit.
        """
        if submit:
            self._trigger.submit(request)
        now, key = time.monotonic(), request.key
        # a new object, so that `_end` keeps it if the thread has read the status of the old one
        save = PendingSave(request, now, now, time.time(), self._rank, {*images}, {exports} - {""})
        with self._lock:
            if known := self._pending.get(key):
                save = replace(
                    known, images=known.images | save.images, exports=known.exports | save.exports
                )
            self._pending[key] = save
            self._sweeps |= not self._leads and len(self._pending) >= self._sweep_at
            self._start()

    def start_saver(self) -> None:
        """Have the thread of a node's first rank start the saver; the first save finds it then."""
        if self._rank == min(self.node_ranks, default=0):
            self._trigger.start_saver(self._spool.folder.name)
            with self._lock:
                self._start()

    def ensure_saver(self, *, is_submitted: bool = False) -> None:
        """Have everything ready that commits a save after the death of this process.

        With ``is_submitted``, nothing but the saver may be missing.

        Raises:
            SaveError: the saver cannot be started.
        """
        with suppress(OSError, SpoolError):  # staging tells why, and the request is retried
            # otherwise the thread prepares all once the save is submitted
            again = not self._spool.make() and (self._leads or is_submitted)
            job = self._spool.folder.name
            self._trigger.ensure_saver(job, again=again, is_submitted=is_submitted)

    def hurry(self) -> None:
        """Have the saver commit soon what no flow run has begun, because this process waits."""
        with suppress(SaveError):  # the flow run may begin
            self._trigger.hurry(self._spool.folder.name, HURRY_S)
        with self._lock:  # images of saves that others know to have failed are evicted
            self._sweeps |= not self._leads and bool(self._pending)
            self._start()
        if absent := self._find_absent(self._list_pending()):
            logger.warning("%s", absent)

    def has_failed(self, key: str) -> bool:
        """Return whether this process knows that a save has failed."""
        with self._lock:
            return key in self._failed

    def wait(self, deadline: float | None) -> list[str]:
        """Wait until no save is pending; return the failures since the last call.

        The deadline is in monotonic seconds.

        Raises:
            SaveTimeoutError: the deadline, `close`, or `PATIENCE_S` without a root has come first.
        """
        with self._lock:
            self._wait(deadline, lambda: [*self._pending.values()])
            self._sweep_at = MANY
            failures, self._failures = self._failures, []
            return failures

    def wait_for(self, key: str, deadline: float | None = None) -> str:
        """Wait until one save is not pending; return why it failed, as `wait` will, or nothing.

        Raises:
            SaveTimeoutError: as `wait`.
        """
        with self._lock:
            self._wait(deadline, lambda: [save for save in [self._pending.get(key)] if save])
            return self._failed.get(key, "")

    def warn_of_pending(self) -> None:
        """Say which saves an interrupted process leaves in shared memory."""
        if pending := [save.request for save in self._list_pending()]:
            logger.warning(
                "Interrupted. In shared memory, and committed without this process once a stack "
                "or a saver runs here: %s. See: trinity-sync runs %s",
                *(", ".join(each.run_name for each in pending), pending[0].root),
            )

    def has_committed(self, key: str) -> bool:
        """Return whether a save that this process has submitted is committed."""
        with self._lock:
            if not (save := self._pending.get(key)):
                return key not in self._failed
        with suppress(OSError, TrinitySyncError):  # the root cannot be read
            # a copy, since the thread looks as well
            return replace(save).find_result(None, self._spool) == ""
        return False

    def _wait(self, deadline: float | None, pending: Callable[[], Sequence[PendingSave]]) -> None:
        """Wait until none of some saves is pending; call it under the lock."""
        here_at, deadline = time.monotonic(), math.inf if deadline is None else deadline
        say_at = here_at + SAY_S
        self._waiting += 1
        self._sweeps |= not self._leads and bool(self._pending)  # also if the time is over
        self._start()
        try:
            while saves := pending():
                now = time.monotonic()
                away = self._read_away()
                here_at = here_at if away else now
                end = min(deadline, self._end_at, here_at + PATIENCE_S)
                if now >= end:
                    away = away or self._find_absent(saves)
                    raise _make_timeout(saves, away, closed=now >= self._end_at)
                if now >= say_at:
                    say_at = math.inf
                    logger.warning(
                        "Still waiting for the commit of %s, which does not need this process. %s"
                        "See trinity-sync runs and trinity-sync status",
                        ", ".join(save.request.run_name for save in saves),
                        away or self._find_absent(saves),
                    )
                self._changed.wait(min(end - now, say_at - now, SIGNAL_S))
                if self._thread is None:  # none could be started
                    self._look()
                    self._start()
        finally:
            self._waiting -= 1
            self._wake_up()

    def close(self, timeout: float = 0.0) -> None:
        """Stop following saves; wake the saver for them within ``timeout`` seconds at most."""
        self.end_at_most(timeout)
        if (thread := self._thread) is not None:
            thread.join(timeout + 1)  # a file system that hangs may keep it
        self._trigger.close()
        with self._lock:
            self._end_at = -math.inf
            self._changed.notify_all()  # ends `wait`

    def end_at_most(self, timeout: float) -> None:
        """As `close`, without waiting for the thread."""
        with self._lock:
            self._end_at = min(self._end_at, time.monotonic() + timeout)
            self._wake_up()

    # ------------------------------------------------------------ the thread

    @property
    def _has_work(self) -> bool:
        if self._end_at < math.inf:
            return self._trigger.has_unsent and time.monotonic() < self._end_at
        of_saves = self._pending if self._waiting or self._leads else {}
        stands = self._leads and self._thread  # from the first save on
        return bool(of_saves or stands or self._sweeps or self._trigger.has_unsent)

    def _start(self) -> None:
        """Start the thread if there is work, or wake it; call it under the lock."""
        if self._thread is None and self._has_work:
            thread = threading.Thread(target=self._run_thread, name="commit-watcher", daemon=True)
            with suppress(RuntimeError):  # none can be started: the next save or wait tries again
                thread.start()
                self._thread = thread
        self._wake_up()

    def _wake_up(self) -> None:
        if self._thread is not None:
            self._wake.put(None)

    def _run_thread(self) -> None:
        """Work until nothing is left; continue after errors, or `wait` would hang."""
        ended = False
        while not ended:
            try:
                while self._has_work:
                    self._work()
            except Exception:  # such as no file descriptor left
                logger.exception("Cannot follow the saves in %s, will retry", self._spool.folder)
                time.sleep(RETRY_S)
            with self._lock:
                if ended := not self._has_work:
                    self._thread = None

    def _work(self) -> None:
        """Wake the saver for new saves, look at those that are due, and wait for the next."""
        while not self._wake.empty():
            self._wake.get()
        if self._trigger.has_unsent:
            self._trigger.send()
        self._look()
        if self._next_care_at() <= time.monotonic():
            self._care()
        moments = [save.look_at for save in self._list_pending()]
        if self._own_run:
            moments.append(self._watch_at)
        until = min(*moments, self._next_care_at(), self._end_at)
        if self._has_work:
            with suppress(queue.Empty):
                self._wake.get(timeout=min(max(0.0, until - time.monotonic()), 3600.0))

    def _list_pending(self) -> list[PendingSave]:
        with self._lock:
            return list(self._pending.values())

    # ------------------------------------------------------------ the root

    def _look(self) -> None:
        """Read the status of the saves that are due, from the root."""
        now = time.monotonic()
        if self._own_run and self._watch_at <= now:
            self._watch_at = now + WATCH_S
            if run := self._own_run():
                with suppress(OSError, TrinitySyncError):  # read again the next time
                    run.notice_later_runs()
        if due := [save for save in self._list_pending() if save.look_at <= now]:
            journal = self._read_journal(due[0].request)
            for save in due:
                self._look_at(save, journal.find(save.request.key))
            self._read_away()
        with self._lock:
            if self._sweeps:
                self._sweeps = False
                self._sweep_at = len(self._pending) + MANY

    def _read_away(self) -> str:
        """Return why the saver does not see the root, empty if it does; log it once."""
        why = ""
        with suppress(OSError):
            why = f"{read_file(self._spool.away).decode()} "
        if why not in ("", self._away):
            logger.warning("Saves in %s wait: %s", self._spool.folder, why)
        self._away = why
        return why

    def _read_journal(self, request: SaveRequest) -> Journal:
        """Read the journal of the run that a save belongs to."""
        journal = self._journal = self._journal or Journal.of(request)
        with suppress(OSError):  # read again the next time
            journal.read()
        return journal

    def _look_at(self, save: PendingSave, entry: Entry | None) -> None:
        """End a save that is committed or has failed; it stays pending if that cannot be read."""
        now = time.monotonic()
        least = LOOK_S[0] if self._leads else OTHERS_LOOK_S
        save.look_at = now + min(max(least, (now - save.since) / 25), LOOK_S[1])
        try:
            failure = save.find_result(entry, self._spool)
            if failure is None and self._leads and entry and entry.is_left:
                self._leave_to_saver(entry)
        except Exception as error:  # ESTALE, EIO: without this thread `wait` would hang
            if isinstance(error, FormatError) and entry and entry.has_ended:
                # no later look can read it either
                why = ". ".join(filter(None, (entry.message, str(error))))
                self._end(save, f"{save.describe('committed')}: {why}")
            elif not save.troubled:
                logger.warning(
                    "Cannot read the status of %s in %s, will retry: %r",
                    save.request.run_name,
                    save.request.root,
                    error,
                )
            save.troubled = True
            return
        if save.committed:
            self._note_seconds(save)
        if failure is not None:
            self._end(save, failure)

    def _leave_to_saver(self, entry: Entry) -> None:
        """Wake the saver once, which ends what the stack cannot."""
        if self._left != entry.key:
            logger.warning("Step %d is left to the saver: %s", entry.step, entry.message)
            self.hurry()
        self._left = entry.key

    def _end(self, save: PendingSave, failure: str) -> None:
        request = save.request
        if failure:
            logger.error("%s", failure)
            with suppress(OSError, TrinitySyncError):  # also if another process has told it
                end_images(self._spool, request, failure, limit_s=0)
        with self._lock:
            if failure:
                self._failures.append(failure)
                self._failed[request.key] = failure
            if self._pending.get(request.key) is save:  # `follow` has added nothing meanwhile
                del self._pending[request.key]
            self._changed.notify_all()

    # ------------------------------------------------------------ what no journal tells

    def _next_care_at(self) -> float:
        """Return when to look next: most saves are begun or committed before that."""
        due = [save.since + CARE_S for save in self._list_pending()]
        return max(min(due, default=math.inf), self._care_at)

    def _care(self) -> None:
        """End saves that nothing will commit, and tell the other ranks why."""
        self._care_at = time.monotonic() + CARE_S
        saves = self._list_pending()
        journal = self._read_journal(saves[0].request)
        begun = {save.request.key for save in saves if journal.find(save.request.key)}
        requests = [save.request for save in saves]
        found = self._trigger.find_failures(requests, begun)
        if self._leads:
            self._trigger.warn_of_server(self._spool.folder)
            if time.monotonic() > saves[0].since + SAY_S and (why := self._find_absent(saves)):
                warn_once(why)
        journal = self._read_journal(saves[0].request)
        for save in saves:
            request, known = save.request, journal.find(save.request.key)
            ended = known is not None and known.has_ended
            if request.key in found and not ended and self._pending.get(request.key) is save:
                why = found[request.key]
                told = append(request, "failed" if why else "completed", why, over=known)
                self._look_at(save, told)

    def _find_absent(self, saves: Sequence[PendingSave]) -> str:
        return _find_absent(saves, self._spool, self._rank, self.node_ranks)

    def _note_seconds(self, save: PendingSave) -> None:
        request = save.request
        if request.key in self.commit_seconds:
            return
        took = time.monotonic() - save.since
        if not self._leads and save.manifest:  # the other ranks look later
            took = min(took, max(0.0, save.manifest.committed_at - save.submitted_at))
        if self._leads and save.manifest:  # in the log of the training, not only in the saver's
            for alarm in save.manifest.alarms:
                logger.warning("%s of %s: %s", request.run_name, request.root, alarm)
        self.commit_seconds[request.key] = took
        logger.info("%s of %s: committed in %.1f s", request.run_name, request.root, took)


def _find_absent(
    saves: Sequence[PendingSave], spool: JobSpool, rank: int, node_ranks: Collection[int]
) -> str:
    """Return which ranks of this node, or roles, the oldest save waits for, as a sentence."""
    with suppress(OSError, TrinitySyncError, IndexError):
        request = saves[0].request
        tickets = [sealed.ticket for sealed in spool.read_step(request.save)]
        roles = {each.role for each in tickets if each.rank == rank}
        have = {each.rank for each in tickets if each.role in roles}
        awaited = f"Step {request.step} waits for"
        if have and (absent := [each for each in node_ranks if each not in have]):
            return f"{awaited} {describe_ranks(absent)} of this node: every rank has to call save. "
        run = request.root, request.run, request.run_key
        if lacking := [role for role in request.roles if read_placement(*run, role) is None]:
            return (
                f"{awaited} role {', '.join(lacking)}, which has saved nothing in this run. If "
                "this training has no such role, leave it out of TRINITY_SYNC_ROLES. "
            )
    return ""


def _make_timeout(saves: Iterable[PendingSave], away: str, *, closed: bool) -> SaveTimeoutError:
    waiting = ", ".join(sorted(save.request.key for save in saves))
    when = " when the coordinator was closed" if closed else ""
    return SaveTimeoutError(
        f"not committed yet{when}: {waiting}. {away}They may still commit; see trinity-sync "
        "runs and trinity-sync status."
    )
