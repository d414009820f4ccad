"""What became of the saves that a process submitted.

The manifest on disk is the truth; the flow run's state tells of a failure. Rank 0 has a thread that
requests the flow runs, looks at the root and asks the server, so that a failed save is in its log
seconds after it failed. It writes what it learns into the root (`outcome_log`). The other ranks
have no thread of their own and ask no server: they look at the root and read that file while
`wait_all` waits, or once many saves are pending.

The thread runs an event loop in which requests and questions are tasks. Looking at the root blocks
that loop, and with it the requests. Nothing could be committed then either: the file system hangs,
or its commit lock is held.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from trinity_sync.client.outcome_log import OutcomeLog, OutcomeLogs
from trinity_sync.client.prefect_api import KEYS_PER_CALL
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.client.save_trigger import Outcome, SaveTrigger
from trinity_sync.errors import CommitError, FormatError, ManifestError, SaveTimeoutError
from trinity_sync.fs.atomic import revalidate_folder
from trinity_sync.layout import MANIFEST, SERVES_AS, step_folder
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.storage.discovery import find_newest
from trinity_sync.storage.export_requests import is_exported
from trinity_sync.storage.late_images import resolve_late_image
from trinity_sync.storage.latest_pointer import latest_pointer_covers
from trinity_sync.storage.manifest import Manifest, is_committed, read_manifest, read_run_number
from trinity_sync.storage.required_remote import is_replicated, read_required_remote
from trinity_sync.storage.runs import find_superseding_run, list_runs

logger = logging.getLogger(__name__)

LOOK_S = 0.1, 2.0
"""Seconds between two looks at the root for a young save and, at most, for an old one."""
ASK_S = 1.0, 15.0
"""Seconds between two calls to the server and, at most, while it cannot be asked; the latter also
between those of a rank that is not 0 and has lost its rank 0."""
RETRY_S = 1.0
"""Seconds after which the thread goes on that an error has stopped."""
SAY_S = 15.0
"""Seconds after which a log line says what `wait` waits for."""
MANY = 64
"""Pending saves of a rank that has no standing thread, after which a short one looks at them."""

COMPLETED = Outcome("completed")


@dataclass
class _Pending:
    request: SaveRequest
    since: float
    look_at: float
    submitted_at: float
    """Seconds since the epoch."""
    images: set[str] = field(default_factory=set)
    """Those of this process, which all have to be part of the commit."""
    exports: set[str] = field(default_factory=set)
    """Roles whose models are to be exported after the commit."""
    requested_here: bool = False
    """Whether this process has requested the flow run."""
    announced: bool = False
    """Whether the other ranks were told that rank 0 follows it."""
    manifest: Manifest | None = None
    stamp: tuple[int, int, int] | None = None
    """What the manifest's file was like when it was read."""
    troubled: bool = False
    """Whether it was said already that the save cannot be followed."""


class CommitWatcher:
    """Requests and follows the saves of one process until each is committed or has failed.

    Args:
        trigger: requests flow runs, and asks what became of them.
        spool: of the job on this node.
        rank: of this process; rank 0 leads.
        world_size: ranks that save together.
    """

    def __init__(
        self, trigger: SaveTrigger, spool: JobSpool, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.commit_seconds: dict[str, float] = {}
        """Seconds from a save's submission to its commit, by request key. Rank 0 has seen the
        commit; other ranks go by the manifest's time, and so by the clocks of two nodes."""
        self._trigger = trigger
        self._spool = spool
        self._leads = rank == 0
        self._is_alone = world_size == 1
        self._log: OutcomeLog | None = None
        self._logs: OutcomeLogs | None = None
        self._pending: dict[str, _Pending] = {}
        self._failures: list[str] = []
        self._changed = threading.Condition()
        self._waiting = 0
        """Calls of `wait` that are under way."""
        self._sweep_at = MANY
        """Pending saves at which the next short thread begins."""
        self._sweeps = False
        self._end_at = math.inf
        """When requests that are not out yet are given up (monotonic)."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._ask_at = 0.0
        self._ask_every = ASK_S[0]

    def follow(
        self,
        request: SaveRequest,
        *,
        images: Collection[str] = (),
        exports: str = "",
        submit: bool = False,
    ) -> None:
        """Follow a save of some images, and the export of a role's model; returns at once.

        Args:
            request: the save.
            images: names of those of this process.
            exports: role whose model is to be exported; empty for none.
            submit: have its flow run requested by this process.
        """
        if submit:
            self._trigger.submit(request)
        now = time.monotonic()
        with self._changed:
            known = self._pending.get(request.key) or _Pending(request, now, now, time.time())
            self._pending[request.key] = replace(  # by `_end` told from what it has looked at
                known,
                images=known.images | {*images},
                exports=known.exports | {exports} - {""},
                requested_here=known.requested_here or submit,
            )
            self._sweeps |= not self._leads and len(self._pending) >= self._sweep_at
            self._start()

    def wait(self, deadline: float | None) -> list[str]:
        """Wait until nothing is pending; returns the failures since the last call.

        Raises:
            SaveTimeoutError: something still is at ``deadline`` (monotonic), or after `close`.
        """
        say_at = time.monotonic() + SAY_S
        with self._changed:
            self._waiting += 1
            self._sweeps |= not self._leads and bool(self._pending)  # also if the time is over
            self._start()
            try:
                while self._pending:
                    now = time.monotonic()
                    end = min(math.inf if deadline is None else deadline, self._end_at)
                    if now >= end:
                        waiting = ", ".join(sorted(self._pending))
                        closed = " when the coordinator was closed" if now >= self._end_at else ""
                        raise SaveTimeoutError(
                            f"not committed yet{closed}: {waiting}. They may still commit; see the "
                            "Prefect UI."
                        )
                    if now >= say_at:
                        say_at = math.inf
                        logger.warning(
                            "still waiting for the commit of %s. They commit without this process, "
                            "too; see the Prefect UI, or: trinity-sync status",
                            ", ".join(each.request.run_name for each in self._pending.values()),
                        )
                    until = min(end, say_at)
                    self._changed.wait(None if until == math.inf else until - now)
            finally:
                self._waiting -= 1
                self._wake_up()
            self._sweep_at = MANY
            failures, self._failures = self._failures, []
            return failures

    def close(self, timeout: float = 0.0) -> None:
        """Stop following; give requests that are not out yet at most ``timeout`` seconds."""
        with self._changed:
            self._end_at = time.monotonic() + timeout
            self._wake_up()
            thread = self._thread
        if thread is not None:
            thread.join(timeout + 1)  # a file system that hangs may keep it
        with self._changed:
            self._end_at = -math.inf
            self._changed.notify_all()  # who waits, too
        if self._log is not None:
            self._log.close()

    # ------------------------------------------------------------ the thread

    @property
    def _has_work(self) -> bool:
        if self._end_at < math.inf:
            return self._trigger.has_unsent and time.monotonic() < self._end_at
        if self._leads:
            return bool(self._pending or self._thread)  # from the first save on
        waits = bool(self._waiting and self._pending)
        return waits or self._sweeps or self._trigger.has_unsent

    def _start(self) -> None:
        """Have the thread look at what is new; under the lock."""
        if self._thread is None and self._has_work:
            thread = threading.Thread(target=self._stand, name="commit-watcher", daemon=True)
            thread.start()
            self._thread = thread
        self._wake_up()

    def _wake_up(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    def _stand(self) -> None:
        """Work until nothing is left to do; an error ends it as little as it ends who waits."""
        ended = False
        while not ended:
            try:
                asyncio.run(self._run())
            except Exception:  # no file is left to open, say
                logger.exception("Saves in %s cannot be followed, will retry", self._spool.folder)
                time.sleep(RETRY_S)
            with self._changed:
                ended = self._thread is not threading.current_thread()

    async def _run(self) -> None:
        self._wake = asyncio.Event()
        with self._changed:
            self._loop = asyncio.get_running_loop()
        ended = False
        try:
            while not ended:
                await self._work()
                with self._changed:
                    if ended := not self._has_work:
                        self._thread = self._loop = None
        finally:
            if not ended:  # by an error
                with self._changed:
                    self._loop = None

    async def _work(self) -> None:
        """Request and follow until nothing is left to do."""
        loop = asyncio.get_running_loop()
        sending: asyncio.Task[None] | None = None
        asking: asyncio.Task[None] | None = None
        try:
            while self._has_work:
                self._wake.clear()
                for task in (sending, asking):
                    if task is not None and task.done():
                        task.result()  # an error, if it has ended with one
                if self._trigger.has_unsent and (sending is None or sending.done()):
                    sending = loop.create_task(self._trigger.send())
                    sending.add_done_callback(lambda _: self._wake.set())
                if (asking is None or asking.done()) and self._asks_at() <= time.monotonic():
                    asking = loop.create_task(self._ask())
                    asking.add_done_callback(lambda _: self._wake.set())
                await asyncio.sleep(0)  # requests go out before the root is looked at
                self._look()
                moments = [save.look_at for save in self._saves()]
                if asking is None or asking.done():
                    moments.append(self._asks_at())
                if self._has_work:
                    await self._pause(min(moments, default=math.inf))
        finally:
            for task in (sending, asking):
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            await self._trigger.disconnect()

    async def _pause(self, until: float) -> None:
        until = min(until, self._end_at)
        seconds = None if until == math.inf else max(0.0, until - time.monotonic())
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)

    def _saves(self) -> list[_Pending]:
        with self._changed:
            return list(self._pending.values())

    # ------------------------------------------------------------ the root

    def _look(self) -> None:
        """Look at the root, and at what rank 0 says, for the saves whose turn it is."""
        now = time.monotonic()
        due = [save for save in self._saves() if save.look_at <= now]
        said = self._said(due)
        for save in due:
            self._look_at(save, said.get(save.request.key))
        with self._changed:
            if self._sweeps:
                self._sweeps = False
                self._sweep_at = len(self._pending) + MANY

    def _said(self, saves: Sequence[_Pending]) -> Mapping[str, Outcome]:
        """What the file of rank 0 says of the end of some saves."""
        if self._leads or not saves:
            return {}
        logs = self._read_logs(saves)
        found = {save.request.key: logs.outcome(save.request.key) for save in saves}
        return {key: each for key, each in found.items() if each}

    def _read_logs(self, saves: Sequence[_Pending]) -> OutcomeLogs:
        logs = self._logs = self._logs or OutcomeLogs(saves[0].request)
        with suppress(OSError):  # the next look may have better luck, or the server is asked
            logs.read()
        return logs

    def _tell(self, saves: Sequence[_Pending], outcome: Outcome) -> None:
        """Let the other ranks know, if this is rank 0 and there are any."""
        if self._leads and not self._is_alone and saves:
            self._log = self._log or OutcomeLog(saves[0].request)
            self._log.append({save.request.key: outcome for save in saves})

    def _look_at(self, save: _Pending, outcome: Outcome | None) -> None:
        """See whether it is settled; it is not while the root's file system cannot tell."""
        now = time.monotonic()
        save.look_at = now + min(max(LOOK_S[0], (now - save.since) / 50), LOOK_S[1])
        try:
            end = self._end_of(save, outcome)
        except Exception as error:  # ESTALE, EIO: without this thread `wait` would hang
            if (
                isinstance(error, FormatError)  # which no later look mends
                and outcome is not None
                and outcome.state in ("completed", "failed")
            ):
                self._fail(save, f"{outcome.message}. {error}")
                self._end(save, outcome)
            elif not save.troubled:
                logger.warning(
                    "Cannot read the status of %s in %s, will retry: %r",
                    save.request.run_name,
                    save.request.root,
                    error,
                )
            save.troubled = True
            return
        if end is not None:
            self._end(save, end)

    def _end(self, save: _Pending, outcome: Outcome) -> None:
        self._tell([save], outcome)
        with self._changed:
            if self._pending.get(save.request.key) is save:  # nothing has been added meanwhile
                del self._pending[save.request.key]
            self._changed.notify_all()

    def _fail(self, save: _Pending, why: str, what: str = "committed") -> None:
        failure = f"{save.request.run_name} of {save.request.root} was not {what}: {why}"
        logger.error("%s", failure)
        with self._changed:
            self._failures.append(failure)

    # ------------------------------------------------------------ the server

    def _asks_at(self) -> float:
        """When the server may be asked next: most saves are committed before."""
        asked = [save.since + ASK_S[0] for save in self._saves()]
        return max(min(asked, default=math.inf), self._ask_at)

    def _to_ask_for(self, saves: Sequence[_Pending]) -> list[_Pending]:
        """Those whose end this process has to learn from the server itself."""
        if self._leads or not saves:
            return [*saves]
        if not self._waiting:
            return []
        logs, now = self._read_logs(saves), time.monotonic()

        def is_followed(save: _Pending) -> bool:
            with suppress(OSError):
                return logs.is_followed(save.request.key, now - save.since)
            return False

        return [save for save in saves if save.requested_here or not is_followed(save)]

    async def _ask(self) -> None:
        """Ask the server about all pending saves in one call, or leave it to rank 0.

        While there is no answer, it is asked less and less often.
        """
        now = time.monotonic()
        self._ask_at = now + self._ask_every
        asked = self._to_ask_for([s for s in self._saves() if s.since + ASK_S[0] <= now])
        self._tell([save for save in asked if not save.announced], Outcome("pending"))
        outcomes = await self._trigger.outcomes([save.request for save in asked])
        away = any(outcome.state == "unknown" for outcome in outcomes.values())
        alone = self._leads or all(save.requested_here for save in asked)
        least = ASK_S[0] if alone else ASK_S[1]  # else of many ranks that have lost rank 0
        self._ask_every = min(2 * self._ask_every, ASK_S[1]) if away else least
        calls = max(1, math.ceil(len(asked) / KEYS_PER_CALL))
        self._ask_at = time.monotonic() + self._ask_every * calls
        for save in asked:
            save.announced = True
            outcome = outcomes[save.request.key]
            if outcome.state != "unknown" and self._pending.get(save.request.key) is save:
                self._look_at(save, outcome)

    # ------------------------------------------------------------ one save

    def _end_of(self, save: _Pending, outcome: Outcome | None) -> Outcome | None:
        """How a save ended, `COMPLETED` if all that it is for was reached; None if it has not."""
        request = save.request
        committed = self._is_committed(save)
        if committed:
            self._note_seconds(save)
            if self._is_exported(save):
                return COMPLETED
        if outcome is None:
            return None
        done = self._is_committed(save) and self._is_exported(save)
        late = self._late(save) if outcome.state == "completed" and not done else []
        if outcome.state == "completed" and not done and not late and _superseded(request):
            logger.info(
                "%s of %s was committed, and has been removed or replaced since",
                request.run_name,
                request.root,
            )
            return COMPLETED
        if outcome.state == "failed" or (outcome.state == "completed" and not done):
            what = "exported, but is committed" if committed else _missed(request)
            why = outcome.message
            if outcome.state == "completed":
                if self._settle(request, [image for image in late if not image.failed]):
                    return None  # what became of them shows at the next look
                why = f"its flow run completed without that step being {what}"
                why = "; ".join(map(_why_failed, late)) or why
            where = f" ({outcome.url})" if outcome.url else ""
            self._fail(save, f"{why}{where}", what)
            return outcome
        return None

    def _settle(self, request: SaveRequest, images: Sequence[SealedImage]) -> bool:
        """Compare images with the commit that was made without them; whether there are any.

        A worker of this node does it, too, but a node need not have one.
        """
        for image in images:
            resolve_late_image(request.save, image)
        return bool(images)

    def _late(self, save: _Pending) -> list[SealedImage]:
        """Images of this process that wait in the spool and that the commit was made without.

        Those that it was made with are freed, also where the step has been removed since.
        """
        request = save.request
        manifest = self._manifest(save)
        missing = save.images - (manifest.images if manifest else frozenset())
        sealed = self._spool.of_step(request.run, request.step)[0] if missing else []
        return [each for each in sealed if each.ticket.image in missing]

    def _manifest(self, save: _Pending) -> Manifest | None:
        """What this very run has committed of the step; read again only when its file changed.

        Raises:
            OSError: the root cannot be read.
        """
        request = save.request
        path = step_folder(request.root, request.step) / MANIFEST
        revalidate_folder(path.parent.parent)
        revalidate_folder(path.parent)
        stamp = None
        with suppress(FileNotFoundError, NotADirectoryError):
            found = path.stat()
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if stamp != save.stamp:
            save.manifest = None
            with suppress(ManifestError):
                manifest = read_manifest(request.root, request.step)
                save.manifest = manifest if manifest and manifest.run == request.run else None
            save.stamp = stamp
        return save.manifest

    def _is_committed(self, save: _Pending) -> bool:
        """Whether the images of this process are part of the step, the iteration files lead to it,
        and all of it is in the store, if the job has one."""
        request = save.request
        root, run, step, kind = request.root, request.run, request.step, request.kind
        roles = request.roles if request.components else ()  # functions have none
        manifest = self._manifest(save)
        if not (manifest and manifest.has_kind(kind, roles) and save.images <= manifest.images):
            return False
        serves_as = {*SERVES_AS[kind]} & {*manifest.kinds}
        if not all(latest_pointer_covers(root, announced, run, step) for announced in serves_as):
            return False
        try:
            return (
                kind != "checkpoint"
                or not read_required_remote(root)
                or is_replicated(root, manifest)
            )
        except CommitError:  # nobody can tell, so the flow's end decides
            return False

    def _is_exported(self, save: _Pending) -> bool:
        return not save.exports or all(
            is_exported(self._manifest(save), role) for role in save.exports
        )

    def _note_seconds(self, save: _Pending) -> None:
        request, manifest = save.request, self._manifest(save)
        if request.key in self.commit_seconds:
            return
        took = time.monotonic() - save.since
        if not self._leads and manifest:  # which looks later
            took = min(took, max(0.0, manifest.committed_at - save.submitted_at))
        self.commit_seconds[request.key] = took
        logger.info("%s of %s: committed in %.1f s", request.run_name, request.root, took)


def _why_failed(sealed: SealedImage) -> str:
    with suppress(OSError):
        return failure_path(sealed.slot).read_text()
    return f"{sealed.ticket.what} was evicted"


def _missed(request: SaveRequest) -> str:
    """What has not been reached, to follow "was not"."""
    if is_committed(request.root, request.run, request.step, request.kind):
        with suppress(CommitError):
            if store := read_required_remote(request.root):
                return f"brought to {store}, and is committed in the root only"
    return "committed"


def _superseded(request: SaveRequest) -> bool:
    """Whether a committed step was removed or replaced since: by retention, a rewind, a later run.

    Retention removes a step only where there is a newer one of its kind.
    """
    root, run, step = request.root, request.run, request.step
    if read_run_number(root, step) == run:
        return False
    best = find_newest(root, request.kind)
    if best is not None and (best.run, best.step) > (run, step):
        return True
    return find_superseding_run(list_runs(root), run, step) is not None
