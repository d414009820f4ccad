"""Start and wake the saver: the process of this node that drives saves, or has the stack do so.

::

    spool/saver-NAME.lock   locked by the saver of this spool with that name: `name_saver`; its
                            process id
    spool/saver-NAME.wake   a pipe that it reads; a process that saves keeps it open for writing
    spool/JOB/saver         in the folder of each job that a saver serves: "alone" if the job has
                            no stack, otherwise the seconds for which it leaves a save to the stack,
                            for which it requests the flow run; and its name

So a write tells at once whether a saver lives, and the saver notices when the last process that
saves has ended, however it ended. Where saves wait and their saver was killed with all trainers, a
worker of the node starts one of its own.

The saver requests the flow runs of saves, and commits what none has begun in time, and everything
where no stack is known. It is started before the images of a save are sealed, so it outlives
trainer and server. A save whose images were evicted before it was begun has failed
(`SaveTrigger.find_failures`).
"""

import errno
import fcntl
import hashlib
import logging
import math
import os
import select
import signal
import stat
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

from trinity_sync.client.prefect_api import PrefectApi, ask_server
from trinity_sync.client.prefect_connection import find_server
from trinity_sync.errors import (
    PrefectApiError,
    RemovedStepError,
    SaveError,
    SpoolError,
    TrinitySyncError,
    warn_once,
)
from trinity_sync.fs.atomic import list_paths, make_folder, read_file, replace_file
from trinity_sync.fs.locks import LockFile
from trinity_sync.fs.process import read_umask
from trinity_sync.layout import ROOT_FORMAT, SPOOL_FORMAT, parse_number
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import explain_away
from trinity_sync.snapshot.spool import JobSpool, make_own_folder
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.placement import is_on_several_nodes
from trinity_sync.storage.save_functions import has_request
from trinity_sync.storage.save_timing import refuse_removed
from trinity_sync.storage.uncommitted import is_being_written

logger = logging.getLogger(__name__)

LOG = "saver.log"
SERVED = "saver"
Serving = float | Literal["alone"]
OF_WORKER = "-worker"
"""End of the name of a saver that a worker starts."""
CONNECT_S = 5.0
"""Seconds for which a process waits for the pipe of a saver that it has started."""
SILENT_S = 10.0
"""Seconds in which a saver that does not hang reads its pipe; its look at a job takes one."""
STARTS = 2
"""Savers in a row that end before they serve, after which saves fail; the first may have been
killed, or started before what is wrong was repaired."""
UNKNOWN_STARTS = 5
"""The same for savers whose exit code is 0, as that of each child of a process that ignores SIGCHLD
or reaps all children; also that of a saver in whose place another serves."""
SERVER = "server"
"""File in the folder of a job in the spool with the URL of the server that its trainer uses."""
UNREQUESTED = "unrequested"
"""File next to it that says why flow runs cannot be requested now; its saver writes it, or a worker
that can start none."""
CHECK_S = 5.0
"""Seconds to wait for the server's answer in `SaveTrigger.require_stack`."""
_BLOCKED = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that a scheduler sends to all processes of a job, some time before it kills them. The
saver uses the time to commit."""
_OF_SERVER = "PREFECT_API_", "PREFECT_CLIENT_", "SSL_CERT_FILE"
"""Beginnings of the names of variables that say how to connect to the server."""
_DEAD = {errno.ENXIO, errno.EPIPE, errno.ENOENT}
"""Errors of a pipe that no saver reads."""


class _SaverProcess(subprocess.Popen[bytes]):
    """A saver, which outlives what has started it: Popen would warn of that."""

    def __del__(self) -> None:
        super().__del__(_warn=lambda *_, **__: None)  # type: ignore[call-arg]


class SaverControl:
    """Wakes the saver of a node's spool, and starts one if none lives.

    Args:
        spool: the node's spool, with one folder per job.
        home: folder of the saver's log; the spool, if it cannot be written.
        name: that of the saver, if it is not `name_saver` of this process.
    """

    def __init__(self, spool: Path, home: Path, name: str = "") -> None:
        self._spool = spool
        self._home = home
        self._given_name = name
        self._name = name or name_saver()
        self._log = home / LOG
        self._pipe = -1
        self._started: _SaverProcess | None = None
        self._starts = 0
        """Starts since a saver was reached."""
        self._log_nbytes = 0
        """Size of the log at the last start."""
        self._lock = threading.RLock()  # a signal's handler saves as well

    def serve(self, job: str, how: Serving) -> None:
        """Have the saver commit the saves of a job, alone or what no stack has begun in time.

        Raises:
            SaveError: as `wake`.
        """
        path = self._spool / job / SERVED
        with self._lock:
            name = self._given_name or name_saver()
            if name != self._name:  # another server was named since
                self.close()
                self._name, self._started = name, None
        with suppress(OSError):  # it has no images, or shared memory is full: nothing is staged
            served = f"{how} {self._name}"
            if not path.exists() or read_file(path) != served.encode():
                replace_file(path, served, sync=False)
        with self._lock:
            if self._started is not None and self._started.poll() is not None:
                self._started = None  # why it has ended may have been repaired since
        self.wake()

    @property
    def is_reached(self) -> bool:
        """Whether the saver that this process has woken last lives; it is not woken."""
        poll = select.poll()
        with self._lock:
            if self._pipe >= 0:
                poll.register(self._pipe, 0)
            return self._pipe >= 0 and not poll.poll(0)  # an error tells that nobody reads

    def wake(self) -> None:
        """Have the saver look for images now.

        Raises:
            SaveError: none lives, and none can be started.
        """
        with self._lock:
            try:
                if self._pipe < 0:
                    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
                    path = wake_path(self._spool, self._name)
                    self._pipe = os.open(path, flags)
                    if not stat.S_ISFIFO(os.fstat(self._pipe).st_mode):
                        path.unlink()
                        raise OSError(errno.ENXIO, "it is no pipe, and nobody reads it")
                before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
                try:
                    os.write(self._pipe, b"\n")
                except BrokenPipeError:  # without SIGPIPE, which would end some programs
                    signal.sigtimedwait({signal.SIGPIPE}, 0)
                    raise
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                self._starts = 0
            except BlockingIOError:
                return  # it has been told often enough
            except OSError as error:
                self.close()
                if error.errno not in _DEAD:
                    raise SaveError(
                        f"the saver cannot be reached ({error}); repair that and save again, or "
                        "run: trinity-sync up"
                    ) from error
                self._start()

    def connect(self) -> None:
        """Wait until the saver serves, at most `CONNECT_S`; from then on it stays for this process.

        Raises:
            SaveError: as `wake`.
        """
        until = time.monotonic() + CONNECT_S
        while self._pipe < 0 and time.monotonic() < until:
            self.wake()
            time.sleep(0.02)

    def __del__(self) -> None:
        self.close()

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Let the saver end once it has committed what was submitted, until the next `wake`."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            close(pipe)  # at the end of the interpreter there is no module os any longer

    def _start(self) -> None:
        started = self._started
        if started is not None:
            if started.poll() is None:
                return  # it begins, and looks for images first
            self._started = None
            code = started.returncode
            if self._starts >= (STARTS if code else UNKNOWN_STARTS):
                raise SaveError(
                    f"the saver has ended with exit code {code or 'unknown'}: "
                    f"{self._read_reason()}. Its log is {self._log}. Repair that and save again. "
                    f"Images of saves stay in {self._spool}; the next start of a training on this "
                    "node, or trinity-sync up, commits them"
                )
        if not sys.executable:  # Python is embedded in another program
            raise SaveError(
                "the saver cannot be started: sys.executable names no Python. Set it to the "
                "interpreter of this environment, or run: trinity-sync up"
            )
        self._starts += 1
        spool, home = str(self._spool.absolute()), str(self._home.absolute())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)  # inherited
        try:
            make_own_folder(self._spool)
            with self._open_log() as log:
                self._log_nbytes = log.seek(0, os.SEEK_END)
                self._started = _SaverProcess(
                    [sys.executable, "-m", "trinity_sync.saver", spool, self._name],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",  # neither a tasks.py of the user's nor a folder that goes
                    umask=int(self._name[:3], 8),  # which its files have
                    start_new_session=True,  # a signal to the trainer's group is not for it
                    env={**os.environ, "PYTHONSAFEPATH": "1", "TRINITY_SYNC_HOME": home},
                )
        except (OSError, SpoolError) as error:
            raise SaveError(
                f"the saver cannot be started ({error}); repair that and save again, or run: "
                "trinity-sync up"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _read_reason(self) -> str:
        """Return the last line that the saver has logged, which names its error."""
        try:
            with self._log.open("rb") as log:
                log.seek(self._log_nbytes)
                lines = log.read().decode(errors="replace").split("\n")
        except OSError as error:
            return str(error)
        return next((line for line in reversed(lines) if line.strip()), "it has logged nothing")

    def _open_log(self) -> BinaryIO:
        try:
            make_folder(self._log.parent)
            return self._log.open("ab")
        except OSError as error:
            logger.warning("Cannot write %s (%s); the saver logs to the spool", self._log, error)
            self._log = self._spool / LOG
            return self._log.open("ab")


class SaveTrigger:
    """Has the saver of this node drive saves.

    `submit` may be called by any thread; `send` and `find_failures` are those of `CommitWatcher`.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._saver = SaverControl(self._settings.spool, self._settings.home)
        self._after_s: float | None = None
        """Seconds after which the saver of this node commits what no flow run has begun: 0 if it
        commits all saves, and requests no flow run; infinite if it only requests them; None if it
        does neither, because no stack is known to which all saves are left."""
        self._server = self._lacks_server = ""
        """Identity of the server, empty without one; and why none is known."""
        self._hurry_s = math.inf
        """As `hurry`, until the next `ensure_saver`."""
        self._has_begun = False
        """Whether a server was looked for."""
        self._lacks_saver = False
        """Whether it was logged that the saver cannot be started."""
        self._unrequested = ""
        """Why flow runs cannot be requested, as it was logged last."""
        self._unsent: deque[SaveRequest | str] = deque()
        """Saves for which the saver was not woken yet, and jobs for which it is to start."""

    def warn_without_stack(self, root: Path, spool: Path) -> None:
        """Log a warning if nothing would commit the saves of a root, which wait in its spool."""
        self._find_stack()
        if self._after_s is None:
            logger.warning(
                "%s. Until then saves of %s wait in %s and are not committed",
                self._lacks_server,
                root,
                spool,
            )
        elif not self._after_s:
            logger.info("No stack: the saver of this node commits the saves of %s", root)

    def _find_stack(self) -> None:
        """Look for a server, which decides what the saver of this node does; ask it nothing."""
        self._server = self._lacks_server = ""
        try:
            self._server = find_server(self._settings.home).identity
        except PrefectApiError as error:
            self._lacks_server = str(error)
        if self._settings.saver == "auto":
            self._after_s = self._settings.saver_after_s if self._server else 0.0
        elif self._settings.saver == "stack":
            self._after_s = math.inf if self._server else None
        else:
            self._after_s = 0.0

    def ensure_saver(self, job: str, *, again: bool = False, is_submitted: bool = False) -> None:
        """Start the saver, if it is needed: a save of a job that follows outlives this process.

        If an earlier call has found all else, it is called ``again``, and a saver that lives is not
        woken. It is called once more when the save ``is_submitted``.

        Raises:
            SaveError: no stack is known, and the saver cannot be started.
        """
        if not is_submitted:
            self._hurry_s = math.inf
        if not self._has_begun:  # later, `send` reads the stack's file
            self._find_stack()
            self._has_begun = True
        elif again and (self._after_s is None or self._saver.is_reached):
            return
        self._prepare(job)

    def hurry(self, job: str, after_s: float) -> None:
        """Have it commit earlier what no flow run has begun, until the next `ensure_saver`."""
        if self._after_s is not None:
            if self._settings.saver != "stack":
                self._hurry_s = min(self._hurry_s, after_s)
            self._prepare(job)

    def _prepare(self, job: str) -> None:
        """Have the saver serve a job, or leave it to the stack, and name the stack's server."""
        with suppress(OSError):  # the folder is gone, or shared memory is full
            path = self._settings.spool / job / SERVER
            if not path.exists() or read_file(path) != self._server.encode():
                replace_file(path, self._server, sync=False)
        if self._after_s is not None:
            how: Serving = min(self._after_s, self._hurry_s) if self._after_s else "alone"
            self._reach_saver(partial(self._saver.serve, job, how))

    def _reach_saver(self, reach: Callable[[], None]) -> None:
        try:
            reach()
        except SaveError as error:
            if not self._after_s:
                raise
            if not self._lacks_saver:
                self._lacks_saver = True
                logger.warning("Saves that the stack does not begin wait for it: %s", error)

    def require_stack(self) -> None:
        """Require that the server can take saves; query it once, for at most `CHECK_S` seconds.

        Raises:
            PrefectApiError: it cannot; the message says what to do.
        """

        ask_server(self._settings, PrefectApi.require_deployment, answer_s=CHECK_S)

    def submit(self, request: SaveRequest) -> None:
        """Have the next `send` wake the saver for a save, whose images are sealed."""
        self._unsent.append(request)

    def start_saver(self, job: str) -> None:
        """Have the next `send` start the saver of a job, of which this process keeps it alive."""
        self._unsent.append(job)

    @property
    def has_unsent(self) -> bool:
        """Whether there is a job for which the saver is to be woken."""
        return bool(self._unsent)

    def send(self) -> None:
        """Wake the saver for all submitted saves, and wait until it serves."""
        while self._unsent:
            of = self._unsent.popleft()
            job = of if isinstance(of, str) else of.job
            self._find_stack()
            with suppress(SaveError):  # `find_failures` tells it
                self._prepare(job)
                if self._after_s is not None:
                    self._reach_saver(self._saver.connect)

    def find_failures(
        self, requests: Sequence[SaveRequest], begun: Collection[str]
    ) -> dict[str, str]:
        """Return why saves that are not committed never will be, by request key; wake the saver.

        The reason is empty for a save that was committed, and removed since. The saver has to live
        for each, so another is started in the place of one that was killed. ``begun`` are the keys
        of saves that the stack or a saver works on, or has until it died.
        """
        found = {}
        self._find_stack()
        if self._after_s is not None:
            try:
                self._reach_saver(self._saver.wake)
            except SaveError as error:
                found = {each.key: str(error) for each in requests}
        return found | self._find_lost(requests, begun)

    def warn_of_server(self, folder: Path) -> None:
        """Log why flow runs of saves cannot be requested, as the saver says in a job's folder."""
        why = ""
        with suppress(OSError):
            why = read_file(folder / UNREQUESTED).decode()
        if why and why != self._unrequested:
            logger.warning("Saves in %s have no flow run, retrying the request: %s", folder, why)
        self._unrequested = why

    def close(self) -> None:
        """Let the saver end once it has committed what was submitted."""
        self._saver.close()

    def _find_lost(self, requests: Sequence[SaveRequest], begun: Collection[str]) -> dict[str, str]:
        """Return the failures of saves of which this node's memory has nothing any more, by key.

        Images that are marked as failed tell why, unless what has begun the save does; no journal
        does if the root is gone. A save without components has no images, but the saver needs its
        request. Saves whose manifest cannot be read are left out, and those of several nodes, whose
        flow run fails at once for all ranks. A save that was begun is lost once nothing writes it.
        """
        found: dict[str, str] = {}
        try:
            spool = JobSpool(self._settings.spool / requests[0].job)
            sealed, unreadable = spool.tickets()
        except (OSError, TrinitySyncError):
            return found
        for request in requests:
            save, has_begun = request.save, request.key in begun
            own = [image for image in sealed if save.owns(image.ticket)]
            with suppress(OSError, TrinitySyncError):
                if (failed := [image for image in own if image.failed]) and not has_begun:
                    found[request.key] = read_file(failure_path(failed[0].slot)).decode()
                    continue
                if own or is_on_several_nodes(save):
                    continue
                if not request.components and (
                    has_begun or self._after_s != 0 or has_request(spool, save)
                ):
                    continue
                # read after the spool: a commit frees its slots once the manifest is there
                manifest = read_manifest(save.root, save.step, ranks=())
                if request.is_in(manifest) or explain_away(save.root, save.job):
                    continue
                try:
                    refuse_removed(save)
                except RemovedStepError:
                    found[request.key] = ""
                    continue
                within_s = self._settings.saver_after_s
                if has_begun and is_being_written(save.root, save.step, within_s=within_s):
                    continue
                if unreadable:
                    found[request.key] = str(unreadable[0])
                elif request.components:
                    found[request.key] = (
                        f"its images in {spool.folder} were evicted for later steps before its "
                        f"save had {'written' if has_begun else 'begun with'} them. Save at longer "
                        "intervals, or see: trinity-sync status"
                    )
                else:
                    found[request.key] = (
                        f"its request in {spool.folder} was removed before the saver had begun it. "
                        "Look for what removes it: trinity-sync doctor"
                    )
        return found


def name_saver() -> str:
    """Return the name of the saver of processes with this one's umask, mount namespace and server.

    The server is the one that the environment names, with its password. A saver of a release with
    other formats reads none of their jobs.
    """
    named = {name: value for name, value in os.environ.items() if name.startswith(_OF_SERVER)}
    what = SPOOL_FORMAT, ROOT_FORMAT, sorted(named.items())
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:8]
    return f"{read_umask():03o}-{Path('/proc/self/ns/mnt').stat().st_ino}-{digest}"


def lock_path(spool: Path, name: str) -> Path:
    """Return the path of the lock of a saver."""
    return spool / f"saver-{name}.lock"


def wake_path(spool: Path, name: str) -> Path:
    """Return the path of the pipe of a saver."""
    return spool / f"saver-{name}.wake"


def list_savers(spool: Path) -> dict[str, int]:
    """Return the savers of a spool that live: process ids, 0 for one that does not tell, by name.

    Savers of two containers may have the same process id.
    """
    found = {}
    for path in list_paths(spool, "saver-*.lock"):
        with suppress(OSError), closing(LockFile(path, os.O_RDONLY)) as lock:
            if not lock.try_acquire(shared=True):
                pid = parse_number(os.read(lock.fd, 20).decode()) or 0
                found[path.name.removeprefix("saver-").removesuffix(".lock")] = pid
    return found


def answers(spool: Path, name: str) -> bool:
    """Return whether a saver that lives reads its pipe within `SILENT_S`."""
    until = time.monotonic() + SILENT_S
    with suppress(OSError):  # it begins or ends
        pipe = os.open(wake_path(spool, name), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(pipe, "wb", buffering=0) as file:  # noqa: PTH123
            with suppress(BlockingIOError):
                file.write(b"\n")
            while any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):
                if time.monotonic() > until:
                    return False
                time.sleep(0.02)
    return True


def read_served(folder: Path, name: str) -> Serving | None:
    """Return for how many seconds the saver of a name leaves the saves of a job to a stack.

    None means for ever: a stack or another saver serves the job. ``folder`` is the job's in the
    spool.
    """
    how, of = find_saver(folder)
    return how if of == name else None


def find_saver(folder: Path) -> tuple[Serving, str]:
    """Return how a job is served, as `read_served`, and by which saver; empty for none."""
    try:
        how, _, name = read_file(folder / SERVED).decode().partition(" ")
        return "alone" if how == "alone" else float(how), name
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # those of other jobs are committed
        warn_once(
            f"{folder / SERVED} cannot be read ({error}), so images in its folder are not saved "
            "until it is written again, by the job's next save at the latest"
        )
    return math.inf, ""
