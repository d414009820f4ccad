"""The process of a node that drives the saves of all jobs of a spool, or has their stack do so.

Trainers with another umask, mount namespace or server have their own. Saves wait for a root that is
away.

The first save of a trainer starts ``python -m trinity_sync.saver SPOOL NAME``, which works until no
process saves there any more. The saves of a job without a stack are committed at once. The flow
runs of others are requested, and what none has begun in time is committed here. A flow run that
begins nevertheless does no harm: one of the two commits, and the other finds that commit.
"""

import asyncio
import logging
import math
import os
import queue
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from pydantic import ValidationError

from trinity_sync.client.prefect_api import PrefectApi
from trinity_sync.client.saver_control import (
    OF_WORKER,
    SERVER,
    UNREQUESTED,
    lock_path,
    name_saver,
    read_served,
    wake_path,
)
from trinity_sync.errors import (
    ConfigError,
    LockTimeoutError,
    PrefectApiError,
    RequestRefusedError,
    RootAwayError,
    TrinitySyncError,
    warn_once,
)
from trinity_sync.fs.atomic import list_paths, read_file, replace_file
from trinity_sync.fs.file_system import is_recent
from trinity_sync.fs.locks import LockFile
from trinity_sync.fs.process import lower_session_priority, lower_thread_priority
from trinity_sync.pipeline.pending import find_pending_saves
from trinity_sync.pipeline.save import SaverDriver
from trinity_sync.pipeline.several_nodes import Quiet, has_node_records
from trinity_sync.saves.journal import PATIENCE_S, Entry, Journal, append, read_entry
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import FAILURES, compare_late_images, end_images, read_status
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.identity import label_run, register_root
from trinity_sync.snapshot.spool import JobSpool, check_worker, list_job_spools, make_own_folder
from trinity_sync.snapshot.ticket import is_named
from trinity_sync.storage.placement import is_on_several_nodes
from trinity_sync.storage.save_functions import has_running_functions
from trinity_sync.storage.uncommitted import is_being_written

logger = logging.getLogger(__name__)

BEGUN = ".begun.json"
"""Suffix of the requests, in the folder of a job, of saves that a saver has begun, with a line feed
for each saver that has not ended it."""
MOST_KILLS = 2
"""Savers that are killed within a save, such as by a memory limit, after which it fails."""
ALONE_S = 60.0
"""Seconds for which a save that may have killed a saver waits for the others, and they for it."""
LOOK_S = 5.0
"""Seconds between two looks for images, if no trainer wakes the saver."""
START_S = 60.0
"""Seconds for which a saver waits for the first save: the trainer that has started it copies its
state."""
LINGER_S = 5.0
"""Seconds for which a saver without work outlives the last process that saves."""
ANSWER_S = 1.0
"""Seconds for which the look at one job may delay those at others: its file system may hang."""
BACK_OFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between attempts to request a flow run; the last value repeats."""
REQUEST_S = 60.0
"""Seconds after which the flow run of a save that waits is requested again: it may be deleted."""
SETTLE_S = 2.0
"""Age in seconds of a commit from which its slots are released if its process has not done so."""


class FlowRunRequests:
    """Requests flow runs, one after the other, each until the server takes it.

    Also those of saves that are committed meanwhile: the history of the server has each save. The
    idempotency key of a save makes all requests of it one flow run. What the server will never
    accept is left to the saver. ``wake`` is called then, and once it takes no request.
    """

    def __init__(self, api: PrefectApi, wake: Callable[[], None]) -> None:
        self.api = api
        self._wake = wake
        self._wanted: queue.SimpleQueue[tuple[Path, SaveRequest]] = queue.SimpleQueue()
        """Folders of jobs in the spool, and saves whose flow run is to be requested."""
        self._waiting: dict[Path, dict[str, float]] = {}
        """When what waited at the last look was requested (monotonic), by folder of job and key."""
        self._untaken: set[str] = set()
        """Keys of the saves whose flow run the server has not taken yet."""
        self._runs = self._fails = False
        self._lock = threading.Lock()

    def want(self, folder: Path, waiting: Sequence[SaveRequest]) -> None:
        """Request the flow runs of the saves of a job that wait, each at most every `REQUEST_S`."""
        now = time.monotonic()
        with self._lock:
            known = self._waiting.get(folder, {})
            requested = {each.key: known.get(each.key, -math.inf) for each in waiting}
            self._waiting[folder] = requested
            for each in waiting:
                if now >= requested[each.key] + REQUEST_S and each.key not in self._untaken:
                    requested[each.key] = now
                    self._untaken.add(each.key)
                    self._wanted.put((folder, each))
            if waiting and not self._runs:
                threading.Thread(target=self._run, daemon=True).start()
                self._runs = True

    def list_untaken(self) -> set[str]:
        """Return the keys of the saves that no stack begins, as the server takes no request now."""
        with self._lock:
            return {*self._untaken} if self._fails else set()

    def _run(self) -> None:
        """Request what is wanted, as long as the process lives."""
        with asyncio.Runner() as runner:  # one loop, whose connection serves the next save too
            while True:
                folder, request = self._wanted.get()
                for pause_s in chain(BACK_OFF_S, repeat(BACK_OFF_S[-1])):
                    try:
                        run = runner.run(self.api.create_flow_run(request.flow_run))
                        if run.state.type == "COMPLETED":
                            told = read_entry(request)
                            if told is None:
                                raise RequestRefusedError(
                                    "the stack has it as Completed, and has not begun it. Run: "
                                    f"trinity-sync retry {request.root} {request.step}"
                                )
                            if told.has_ended:  # the images came too late for it
                                compare_late_images(JobSpool(folder), request)
                        break
                    except RequestRefusedError as error:
                        append(request, "left", str(error), patience_s=PATIENCE_S)
                        self._wake()
                        break
                    except Exception as error:  # whatever is wrong there, saves continue
                        with suppress(OSError):  # it has gone, or shared memory is full
                            replace_file(folder / UNREQUESTED, str(error), sync=False)
                        if not self._fails:
                            self._fails = True
                            self._wake()
                        time.sleep(pause_s)
                with self._lock:
                    self._untaken.discard(request.key)
                    self._fails = False
                with suppress(OSError):
                    (folder / UNREQUESTED).unlink(missing_ok=True)


@dataclass(frozen=True)
class WaitingSave:
    """A save that waits, or was begun."""

    request: SaveRequest
    over: Entry | None = None
    """What has begun it before, as its journal tells."""
    kills: int = 0
    """Number of savers that were killed within it."""

    def is_due(self, job: JobSpool, late: Collection[str], within_s: float) -> bool:
        """Return whether the stack has left it to the saver, or does not begin or end it.

        The stack begins none of the ``late`` keys, and may have worked on it ``within_s`` seconds.
        """
        over = self.over
        if over and (over.is_left or (over.takes_over and not over.has_ended)):  # on another node
            return True
        return self.request.key in late and not is_left_to_stack(job, self.request, within_s)


def is_left_to_stack(job: JobSpool, request: SaveRequest, within_s: float) -> bool:
    """Return whether a save is left to the stack, which has worked on it within some seconds."""
    save = request.save
    with suppress(OSError, TrinitySyncError):  # the save tells why
        return not has_node_records(request) and (  # of the saver of another node
            is_being_written(save.root, save.step, within_s=within_s)
            or has_running_functions(job, save, within_s=within_s)
            or (not request.components and is_on_several_nodes(save))
        )
    return False


class Saver:
    """The saver of a node's spool, which is a folder with one folder per job."""

    def __init__(
        self, spool: Path, stack: StackSettings, settings: Settings | None = None, name: str = ""
    ) -> None:
        self._spool = spool
        settings = settings or Settings()
        self._node, self._home = settings.node, settings.home
        self._name = name or name_saver()
        self._requests = FlowRunRequests(PrefectApi(settings), self._look_again)
        self._wake = wake_path(spool, self._name)
        self._stack = stack
        self._lock = threading.Lock()
        self._looks: dict[Path, threading.Thread] = {}
        self._waiting: dict[Path, bool] = {}
        """Whether saves of a job waited at the last look, by its folder."""
        self._journals: dict[tuple[Path, str], Journal] = {}
        """By the folder of a job and the label of a run; each job has one look at a time."""
        self._saves: dict[str, threading.Thread] = {}
        """Saves that are being committed, by request key."""
        self._failed: dict[str, int] = {}
        """Starts of saves that have failed here, by request key; requests of functions stay."""
        self._repeated: list[WaitingSave] = []
        """Due saves within which a saver was killed."""
        self._alone, self._alone_until = "", time.monotonic() + ALONE_S
        """The last of them that was begun, by request key, and until when it is alone."""
        self._terminates = self._had_worker = self._had_writer = self._lacks_writer = False
        """Whether SIGTERM came; a worker was seen; a process that saves was; none is any longer."""
        self._idle_until = time.monotonic() + START_S
        self._ended, self._end = os.pipe()
        """Pipe to which a thread writes as it ends."""

    def hurry(self, *_: object) -> None:
        """Leave nothing to the stack or to idle cores; a handler of SIGTERM, which a node gets."""
        self._terminates = True
        lower_session_priority(os.getpid(), 0)  # to the usual one, which needs no privilege
        self._look_again()

    def _look_again(self) -> None:
        os.write(self._end, b"\n")

    def run(self) -> None:
        """Commit what waits, until no process saves; return at once if another saver does so."""
        make_own_folder(self._spool)
        path = lock_path(self._spool, self._name)
        self._held = lock = LockFile(path, os.O_RDWR | os.O_CREAT)
        try:
            lock.acquire(limit_s=LINGER_S)  # another may be about to end
            with suppress(OSError):  # shared memory is full
                os.truncate(lock.fd, 0)
                os.pwrite(lock.fd, b"%d" % os.getpid(), 0)
            self._serve()
            while is_named(lock, path) and self._look():  # submitted as the pipe was closed
                self._serve()
            for saving in [*self._saves.values()]:  # of a spool that is gone
                saving.join()
        except LockTimeoutError:
            logger.info("another saver serves %s", self._spool)
        finally:
            lock.close()

    def _serve(self) -> None:
        """Commit what is submitted, until no process saves there any more."""
        with suppress(FileExistsError):
            os.mkfifo(self._wake, 0o600)
        pipe = os.open(self._wake, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # a pipe tells that it has no writer only once it has had one
            os.close(os.open(self._wake, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            while not self._ends(pipe):
                works = True
                try:
                    works = self._look()
                except (OSError, RuntimeError) as error:  # it lacks files or threads
                    warn_once(f"cannot look for saves, will retry: {error}")
                if self._pause(pipe) or works:
                    self._idle_until = time.monotonic() + LINGER_S
        finally:
            os.close(pipe)

    def _ends(self, pipe: int) -> bool:
        """Return whether it is idle, or its spool gone: a trainer that wakes it starts another."""
        if not is_named(self._held, self._held.path):
            return True
        if time.monotonic() < self._idle_until:
            return False
        wake, away = self._wake, self._wake.with_name(f"{self._wake.name}.ended")
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
        has_writer = not ready.get(pipe, 0) & select.POLLHUP
        self._had_writer |= has_writer or bool(ready[pipe] & select.POLLIN)
        self._lacks_writer = self._had_writer and not has_writer
        if has_writer or self._ended in ready:
            return True
        time.sleep(0.1)  # the pipe would end each poll at once
        return False

    def _look(self) -> bool:
        """Begin to commit the saves that are due; return whether any waits, or a root hangs."""
        jobs = list_job_spools(self._spool)
        served = [job for job in jobs if read_served(job.folder, self._name) is not None]
        with self._lock:  # a folder may have vanished
            self._waiting = {job.folder: self._waiting.get(job.folder, False) for job in served}
            self._repeated.clear()
        for job in served:
            look = self._looks.get(job.folder)
            if look is None or not look.is_alive():
                look = threading.Thread(target=self._look_at, args=(job,), daemon=True)
                look.start()
                self._looks[job.folder] = look
                look.join(ANSWER_S)
        with self._lock:
            repeated = self._repeated[: not self._saves or time.monotonic() > self._alone_until]
        for save in repeated:
            self._alone, self._alone_until = save.request.key, time.monotonic() + ALONE_S
            self._begin(save)
        with self._lock:
            looks = any(look.is_alive() for look in self._looks.values())
            return bool(self._saves) or any(self._waiting.values()) or looks

    def _look_at(self, job: JobSpool) -> None:
        how = read_served(job.folder, self._name)
        after_s = within_s = how if isinstance(how, float) else 0.0
        works = check_worker(self._spool)
        self._had_worker |= works is not None
        if after_s < math.inf:  # otherwise it commits nothing
            ends = self._terminates or (self._had_worker and works is None)
            within_s = 0.0 if ends else min(LOOK_S, after_s) if works is False else after_s
            if ends or works is False or (self._lacks_writer and not works):
                after_s = 0.0  # a worker that works is as fast
        job.remove_closed()
        if self._is_away(job):
            return
        with self._lock:  # one that ends meanwhile is not begun again
            saving = {*self._saves}
        pending = find_pending_saves(job, grace_s=0, settle_s=SETTLE_S)
        begun = self._read_begun(job)
        waiting = [
            begun.pop(each.key) if each.key in begun else self._find_save(job, each)
            for each in pending
        ]
        with self._lock:  # what is retried has another start
            for each in waiting:
                if each.over and each.over.start > self._failed.get(each.request.key, math.inf):
                    del self._failed[each.request.key]
        due = waiting
        if waiting and how != "alone":
            self._request(job, pending)
            late = {each.key for each, age_s in pending.items() if age_s > after_s}
            late |= self._requests.list_untaken() if after_s < math.inf else set()
            due = [each for each in waiting if each.is_due(job, late, within_s)]
        with self._lock:
            waits = any(each.request.key not in self._failed for each in waiting)
            self._waiting[job.folder] = waits and after_s < math.inf
            known = {*saving, *self._saves, *self._failed}
            new = [each for each in [*due, *begun.values()] if each.request.key not in known]
            self._repeated += [each for each in new if each.kills]
            if self._alone in self._saves and time.monotonic() < self._alone_until:
                return
        for save in new:
            if after_s == math.inf and save.over and save.over.is_left:
                self._refuse(save.request, save.over)
            elif not save.kills:
                self._begin(save)

    def _begin(self, save: WaitingSave) -> None:
        thread = threading.Thread(target=self._save, args=(save,), daemon=True)
        with self._lock:
            thread.start()
            self._saves[save.request.key] = thread

    def _find_save(self, job: JobSpool, request: SaveRequest, kills: int = 0) -> WaitingSave:
        """Return a save with what has begun it, as the journal of its run tells."""
        name = job.folder, label_run(request.save)
        journal = self._journals[name] = self._journals.get(name) or Journal.of(request)
        with suppress(OSError):  # the save tells why
            journal.read()
        return WaitingSave(request, journal.find(request.key), kills)

    def _read_begun(self, job: JobSpool) -> dict[str, WaitingSave]:
        """Return the saves that a saver had begun when it was killed, by key.

        Of the committed ones, the export or upload may be missing. Nobody was told of the others,
        which are tried again: the images of one that has failed are marked before its journal says
        so.
        """
        found = {}
        for path in list_paths(job.folder, f"*{BEGUN}"):
            try:
                content = read_file(path)
                request = SaveRequest.model_validate_json(content)
                save = self._find_save(job, request, content.count(b"\n"))
                if read_status(request, save.over)[0] in FAILURES:
                    path.unlink()
                else:
                    found[request.key] = save
            except FileNotFoundError:
                continue  # it has just ended
            except (OSError, ValidationError, TrinitySyncError) as error:
                warn_once(f"cannot resume the save of {path}: {error}")
        return found

    def _request(self, job: JobSpool, waiting: Collection[SaveRequest]) -> None:
        """Request the flow runs of what waits on the node of rank 0, or, for a worker, anywhere."""
        first = {image.ticket.save.key for image in job.tickets()[0] if not image.ticket.rank}
        every = self._name.endswith(OF_WORKER)
        wanted = [each for each in waiting if every or each.key in first or not each.components]
        with self._lock:
            wanted = [each for each in wanted if each.key not in self._failed]
        with suppress(OSError, PrefectApiError):  # the trainer will name another one
            if read_file(job.folder / SERVER).decode() == self._requests.api.find_server().identity:
                self._requests.want(job.folder, wanted)

    def _refuse(self, request: SaveRequest, over: Entry) -> None:
        """Fail a save that the stack cannot or will never do, unless it is committed."""
        with suppress(OSError, TrinitySyncError):
            if request.is_committed:
                return
        append(request, "failed", over.message, over=over, patience_s=PATIENCE_S)
        with self._lock:
            self._failed[request.key] = over.start
        end_images(JobSpool(self._spool / request.job), request, over.message)

    def _is_away(self, job: JobSpool) -> bool:
        """Return whether this process does not see a job's root, and tell the job's processes."""
        why = job.tell_away()
        waits = bool(why) and any(not image.failed for image in job.tickets()[0])
        with suppress(OSError), self._lock:  # shared memory is full
            waits = waits and is_recent(job.away.stat().st_mtime, time.time(), PATIENCE_S)
            self._waiting[job.folder] = waits
        return bool(why)

    def _save(self, save: WaitingSave) -> None:
        """Save, in the place of what has begun it before."""
        request, over, kills = save.request, save.over, save.kills
        began, failure, waits = time.monotonic(), "", False
        driver = self._make_driver(request)
        begun = self._spool / request.job / f"{request.key_digest}{BEGUN}"
        why = over.message if over and over.is_left else ""
        try:  # what is raised outside of it would leave the save begun for ever
            lower_thread_priority(self._stack.worker.nice)
            content = request.model_dump_json() + "\n" * kills  # what follows a commit: no images
            if kills >= MOST_KILLS:
                driver.refusal = (
                    f"{kills} savers were killed while they saved it, perhaps by a memory limit "
                    "(see dmesg): raise that, and save the step again"
                )
            append(request, "begun", why, over=over)
            with suppress(OSError):  # shared memory is full: the commit frees it
                replace_file(begun, content + "\n", sync=False)
            driver.save()
            with suppress(OSError):  # commands do not list it then
                register_root(self._home, request.root)
            logger.info(
                "%s of %s: %.2f s", request.run_name, request.root, time.monotonic() - began
            )
        except Exception as error:
            failure, waits = str(error) or repr(error), isinstance(error, RootAwayError)
            logger.error(
                "%s of %s has failed: %s",
                request.run_name,
                request.root,
                error,
                exc_info=not isinstance(error, TrinitySyncError),
            )
        try:
            if failure and not waits:
                self._tell_failure(request, failure, over)
            elif driver.commits and not waits:  # otherwise what follows the commit may go on
                append(request, "completed", why, over=over, patience_s=PATIENCE_S)
        except Exception:
            logger.exception("cannot tell how %s of %s ended", request.run_name, request.root)
        finally:
            with suppress(OSError):
                replace_file(begun, content, sync=False) if waits else begun.unlink(missing_ok=True)
            with self._lock:
                if failure and not waits:
                    self._failed[request.key] = over.start if over else 0
                del self._saves[request.key]
            self._look_again()

    def _tell_failure(self, request: SaveRequest, failure: str, over: Entry | None) -> None:
        """Tell why a save has failed, also in the place of a flow run that has begun it since.

        Such a flow run may still commit it, as long as it writes.
        """
        append(request, "failed", failure, over=over, patience_s=PATIENCE_S)
        how = read_served(self._spool / request.job, self._name)
        quiet_s = how if isinstance(how, float) else LOOK_S
        journal, quiet = Journal.of(request), Quiet(request, quiet_s)
        while True:
            journal.read()
            known = journal.find(request.key)
            if known is None or known.has_ended or known.takes_over:
                return
            if known.is_left or quiet.pause():
                append(request, "failed", failure, over=known, patience_s=PATIENCE_S)

    def _make_driver(self, request: SaveRequest) -> SaverDriver:
        return SaverDriver(request, self._stack, self._spool, self._node)


def _has_writer(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return not dict(poll.poll(0)).get(pipe, 0) & select.POLLHUP


def _end_without_memory(raised: "sys.UnraisableHookArgs") -> None:
    """End if a thread lacks memory to begin: Python waits for it for ever, and trainers for this.

    A trainer starts another saver, which resumes the saves.
    """
    sys.__unraisablehook__(raised)
    if issubclass(raised.exc_type, MemoryError):
        os._exit(1)


def main() -> None:
    """Commit what waits in a spool until no process saves there any more."""
    with suppress(OSError):  # a file to which all savers append, and that may allow nothing else
        if os.fstat(sys.stderr.fileno()).st_size > 1 << 20:
            os.ftruncate(sys.stderr.fileno(), 0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    try:
        stack = StackSettings()
    except ConfigError as error:  # the last line of the log is what trainers tell
        sys.exit(" ".join(str(error).split()))
    name = sys.argv[2] if sys.argv[2:] else name_saver()
    if not name.endswith(OF_WORKER) and name != name_saver():
        sys.exit(  # it would read no job of the trainer, which would wait for ever
            f"the trainer has another release of trinity_sync than {Path(__file__).parent}, which "
            f"{sys.executable} imports. Name the folder of the trainer's in PYTHONPATH"
        )
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy starts one for each core otherwise
    saver = Saver(Path(sys.argv[1]), stack, Settings(), name)
    sys.unraisablehook = _end_without_memory
    signal.signal(signal.SIGTERM, saver.hurry)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    lower_session_priority(os.getpid(), stack.worker.nice)
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # it opens four for each image of its node
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    saver.run()


if __name__ == "__main__":
    main()
