"""The process that commits the saves of all jobs of a spool where no stack is known.

The first save of a trainer starts ``python -m trinity_sync.saver SPOOL``, which works until no
process saves there any more.
"""

import logging
import os
import select
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from trinity_sync.client.outcomes import Outcome, OutcomeLog
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.client.saver_control import LOCK, SERVED, WAKE
from trinity_sync.errors import LockTimeoutError, TrinitySyncError
from trinity_sync.fs.locks import LockFile
from trinity_sync.pipeline.pending import compare_late_images, find_pending_saves
from trinity_sync.pipeline.save import NodeWriting, run_save
from trinity_sync.settings import StackSettings
from trinity_sync.snapshot.spool import JobSpool, list_job_spools, make_own_folder
from trinity_sync.storage.save import mark_failed

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks for images, if no trainer wakes the saver."""
START_S = 60.0
"""Seconds for which a saver waits for the first save: the trainer that has started it copies its
state."""
LINGER_S = 5.0
"""Seconds for which a saver without work outlives the last process that saves."""
LOGS = 16
"""Runs whose outcome log stays open."""
ANSWER_S = 1.0
"""Seconds for which the look at one job may delay those at others: its file system may hang."""
SETTLE_S = 2.0
"""Age in seconds of a commit from which its slots are released if its process has not done so."""


class Saver:
    """The saver of a node's spool, which is a folder with one folder per job."""

    def __init__(self, spool: Path, writing: NodeWriting) -> None:
        self._spool = spool
        self._writing = writing
        self._lock = threading.Lock()
        self._looks: dict[Path, threading.Thread] = {}
        self._saves: dict[str, threading.Thread] = {}
        """Saves that are being committed, by request key."""
        self._failed: set[str] = set()
        """Saves that have failed here, by request key; requests of save functions stay."""
        self._logs: dict[tuple[str, str], OutcomeLog] = {}
        self._log_locks: dict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
        self._idle_until = time.monotonic() + START_S
        self._ended, self._end = os.pipe()
        """Pipe to which a thread writes as it ends."""

    def run(self) -> None:
        """Commit what waits, until no process saves; return at once if another saver does so."""
        make_own_folder(self._spool)
        lock = LockFile(self._spool / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            lock.acquire(limit_s=LINGER_S)  # another may be about to end
            self._serve()
            while self._look():  # what was submitted as the pipe was closed
                self._serve()
        except LockTimeoutError:
            logger.info("another saver serves %s", self._spool)
        finally:
            lock.close()

    def _serve(self) -> None:
        """Commit what is submitted, until no process saves there any more."""
        with suppress(FileExistsError):
            os.mkfifo(self._spool / WAKE, 0o600)
        pipe = os.open(self._spool / WAKE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # a pipe tells that it has no writer only once it has had one
            os.close(os.open(self._spool / WAKE, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            while not self._ends(pipe):
                works = self._look()
                if self._pause(pipe) or works:
                    self._idle_until = time.monotonic() + LINGER_S
        finally:
            os.close(pipe)

    def _ends(self, pipe: int) -> bool:
        """Return whether this saver is idle: a trainer that wakes it now starts another."""
        if time.monotonic() < self._idle_until:
            return False
        wake, away = self._spool / WAKE, self._spool / f"{WAKE}.ended"
        with suppress(FileNotFoundError):
            wake.rename(away)
            if _has_writer(pipe):  # since the last look
                away.rename(wake)
                return False
            away.unlink()
        return True

    def _pause(self, pipe: int) -> bool:
        """Wait until there may be work; return whether a process saves, or a save has ended."""
        poll = select.poll()
        for fd in (pipe, self._ended):
            poll.register(fd, select.POLLIN)
        ready = dict(poll.poll(LOOK_S * 1000))
        for fd, events in ready.items():
            if events & select.POLLIN:
                os.read(fd, 1 << 16)
        if not ready.get(pipe, 0) & select.POLLHUP or self._ended in ready:
            return True
        time.sleep(0.1)  # the pipe would end each poll at once
        return False

    def _look(self) -> bool:
        """Begin to commit the saves that wait; return whether any is, or a root does not answer."""
        for job in list_job_spools(self._spool):
            if not (job.folder / SERVED).exists():
                continue
            look = self._looks.get(job.folder)
            if look is None or not look.is_alive():
                look = threading.Thread(target=self._look_at, args=(job,), daemon=True)
                self._looks[job.folder] = look
                look.start()
                look.join(ANSWER_S)
        with self._lock:
            return bool(self._saves) or any(look.is_alive() for look in self._looks.values())

    def _look_at(self, job: JobSpool) -> None:
        requests = find_pending_saves(job, grace_s=0, clock=lambda: time.time() - SETTLE_S)
        with self._lock:
            for request in requests:
                if request.key not in self._saves and request.key not in self._failed:
                    save = threading.Thread(target=self._save, args=(request,), daemon=True)
                    self._saves[request.key] = save
                    save.start()

    def _save(self, request: SaveRequest) -> None:
        began = time.monotonic()
        self._tell(request, Outcome("pending"))
        try:
            run_save(request, self._writing, self._spool)
            outcome = Outcome("completed")
            logger.info(
                "%s of %s: %.2f s", request.run_name, request.root, time.monotonic() - began
            )
        except Exception as error:
            outcome = Outcome("failed", str(error))
            logger.error(
                "%s of %s has failed: %s",
                request.run_name,
                request.root,
                error,
                exc_info=not isinstance(error, TrinitySyncError),
            )
        try:
            if outcome.state == "completed":
                compare_late_images(self._spool, request)
            else:
                mark_failed(JobSpool(self._spool / request.job), request.save, outcome.message)
            self._tell(request, outcome)
        except Exception:
            logger.exception("cannot tell how %s of %s ended", request.run_name, request.root)
        finally:
            with self._lock:
                if outcome.state == "failed":
                    self._failed.add(request.key)
                del self._saves[request.key]
            os.write(self._end, b"\n")

    def _tell(self, request: SaveRequest, outcome: Outcome) -> None:
        """Write for the ranks how a save ended, or that it is being committed."""
        run = request.root, request.save.run_label
        with self._log_locks[run]:
            with self._lock:
                known = self._logs.pop(run) if run in self._logs else OutcomeLog(request)
                log = self._logs[run] = known
                oldest = self._logs.pop(next(iter(self._logs))) if len(self._logs) > LOGS else None
            if oldest:
                oldest.close()
            log.append({request.key: outcome})


def _has_writer(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return not dict(poll.poll(0)).get(pipe, 0) & select.POLLHUP


LOG_BYTES = 1 << 20


def main() -> None:
    """Commit what waits in a spool until no process saves there any more."""
    log = sys.stderr.fileno()  # a file to which all savers append
    if os.fstat(log).st_size > LOG_BYTES:
        os.ftruncate(log, 0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    stack = StackSettings()
    os.nice(stack.worker.nice)
    Saver(Path(sys.argv[1]), NodeWriting.of(stack)).run()


if __name__ == "__main__":
    main()
