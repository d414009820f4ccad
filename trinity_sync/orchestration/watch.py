"""What became of the saves that a process handed over.

The manifest on disk is the truth; the flow run's state tells of a failure. A daemon thread looks
at both, so that a failed save is in the trainer's log seconds after it failed, and not only when
the trainer asks.
"""

import logging
import math
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trinity_sync.errors import CommitError, ManifestError, SaveTimeout
from trinity_sync.layout import SERVES_AS
from trinity_sync.orchestration.trigger import Outcome, SaveTrigger
from trinity_sync.request import SaveRequest
from trinity_sync.snapshot.spool import JobSpool, Sealed
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.storage.commit import settle_late_image
from trinity_sync.storage.iteration import is_announced
from trinity_sync.storage.manifest import is_committed, own_manifest, read_manifest, run_of
from trinity_sync.storage.persist import Save
from trinity_sync.storage.runs import all_runs, left_behind_by
from trinity_sync.storage.steps import newest
from trinity_sync.storage.stored import is_stored, store_of
from trinity_sync.storage.wishes import is_exported

logger = logging.getLogger(__name__)

LOOK_S = 0.1, 2.0
"""Seconds between two looks at the root for a young save and, at most, for an old one."""
ASK_S = 1.0, 15.0
"""Seconds between two questions to the server and, at most, while it cannot be asked."""
SAY_S = 15.0
"""Seconds after which who waits is told what for."""


@dataclass
class _Pending:
    request: SaveRequest
    since: float
    look_at: float
    images: set[str]
    """Those of this process, which all have to be part of the commit."""
    exports: set[str]
    """Roles whose models are to be exported after the commit."""
    troubled: bool = False
    """Whether it was said already that the save cannot be followed."""


class SaveWatch:
    """Follows the saves of one process until each is committed or has failed.

    Args:
        trigger: asks the server for the saves' flow runs.
        spool: of the job on this node.
    """

    def __init__(self, trigger: SaveTrigger, spool: JobSpool) -> None:
        self.commit_seconds: dict[str, float] = {}
        """Seconds from hand-over to commit, by request key."""
        self._trigger = trigger
        self._spool = spool
        self._pending: dict[str, _Pending] = {}
        self._failures: list[str] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._ask_at = 0.0
        self._ask_every = ASK_S[0]

    def add(self, request: SaveRequest, *, images: Collection[str] = (), exports: str = "") -> None:
        """Follow a save of some images, and the export of a role's model; returns at once."""
        now = time.monotonic()
        with self._changed:
            new = _Pending(request, now, now, set(), set())
            save = self._pending.setdefault(request.key, new)
            save.images |= {*images}
            save.exports |= {exports} - {""}
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="save-watch", daemon=True)
                self._thread.start()

    def wait(self, deadline: float | None) -> list[str]:
        """Wait until nothing is pending; returns the failures since the last call.

        Raises:
            SaveTimeout: something still is at ``deadline`` (monotonic).
        """
        say_at = time.monotonic() + SAY_S
        end = math.inf if deadline is None else deadline
        with self._changed:
            while self._pending:
                now = time.monotonic()
                if now >= end:
                    waiting = ", ".join(sorted(self._pending))
                    raise SaveTimeout(
                        f"not committed yet: {waiting}. They may still commit; see the Prefect UI."
                    )
                if now >= say_at:
                    say_at = math.inf
                    logger.warning(
                        "still waiting for the commit of %s. They commit without this process, "
                        "too; see the Prefect UI, or: trinity-sync status",
                        ", ".join(pending.request.run_name for pending in self._pending.values()),
                    )
                until = min(end, say_at)
                self._changed.wait(None if until == math.inf else until - now)
            failures, self._failures = self._failures, []
            return failures

    def close(self) -> None:
        """Stop following."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _follow(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                pending = list(self._pending.values())
            outcomes = self._ask(pending)
            for save in pending:
                outcome = outcomes.get(save.request.key)
                if (outcome or save.look_at <= time.monotonic()) and self._done_with(save, outcome):
                    with self._changed:
                        self._pending.pop(save.request.key, None)
                        self._changed.notify_all()
            with self._changed:
                if self._pending and not self._closed:  # a new save ends the wait
                    self._changed.wait(max(0.0, self._next_at() - time.monotonic()))

    def _ask(self, pending: Sequence[_Pending]) -> dict[str, Outcome]:
        """What the server says of the saves; nothing where it is not their turn or it is away.

        One question for all, which is put less and less often while it gets no answer: each takes
        some 100 ms of the trainer's GIL then.
        """
        now = time.monotonic()
        asked = [save.request for save in pending if _ask_from(save) <= now]
        if not asked or now < self._ask_at:
            return {}
        outcomes = self._trigger.outcomes(asked)
        away = any(outcome.state == "unknown" for outcome in outcomes.values())
        self._ask_every = min(2 * self._ask_every, ASK_S[1]) if away else ASK_S[0]
        self._ask_at = time.monotonic() + self._ask_every
        return {key: said for key, said in outcomes.items() if said.state != "unknown"}

    def _next_at(self) -> float:
        """When there is something to do for a pending save."""
        return min(
            min(save.look_at, max(self._ask_at, _ask_from(save))) for save in self._pending.values()
        )

    def _done_with(self, save: _Pending, outcome: Outcome | None) -> bool:
        """Whether it is settled; not while the root's file system cannot tell."""
        now = time.monotonic()
        save.look_at = now + min(max(LOOK_S[0], (now - save.since) / 50), LOOK_S[1])
        try:
            return self._settled(save, outcome)
        except Exception as error:  # ESTALE, EIO: without this thread whoever waits would hang
            if not save.troubled:
                logger.warning(
                    "%s of %s cannot be followed, it is looked at again: %r",
                    save.request.run_name,
                    save.request.root,
                    error,
                )
            save.troubled = True
            return False

    def _settled(self, save: _Pending, outcome: Outcome | None) -> bool:
        request = save.request
        committed = _committed(save)
        if committed:
            if request.key not in self.commit_seconds:
                took = self.commit_seconds[request.key] = time.monotonic() - save.since
                logger.info("%s of %s: committed in %.1f s", request.run_name, request.root, took)
            if _exported(save):
                return True
        if outcome is None:
            return False
        done = _committed(save) and _exported(save)
        late = self._late(save) if outcome.state == "completed" and not done else []
        if outcome.state == "completed" and not done and not late and _superseded(request):
            logger.info(
                "%s of %s was committed, and has been removed or replaced since",
                request.run_name,
                request.root,
            )
            return True
        if outcome.state == "failed" or (outcome.state == "completed" and not done):
            what = "exported, but is committed" if committed else _missed(request)
            why = outcome.message
            if outcome.state == "completed":
                if self._settle(request, [image for image in late if not image.failed]):
                    return False  # what became of them shows at the next look
                why = f"its flow run completed without that step being {what}"
                why = "; ".join(map(_why_failed, late)) or why
            where = f" ({outcome.url})" if outcome.url else ""
            failure = f"{request.run_name} of {request.root} was not {what}: {why}{where}"
            logger.error("%s", failure)
            with self._changed:
                self._failures.append(failure)
            return True
        return False

    def _settle(self, request: SaveRequest, images: Sequence[Sealed]) -> bool:
        """Compare images with the commit that was made without them; whether there are any.

        A worker of this node does it, too, but a node need not have one.
        """
        root, run, step = request.root, request.run, request.step
        for image in images:
            settle_late_image(
                Save(root, run, step, request.kind, request.roles, request.run_key), image
            )
        return bool(images)

    def _late(self, save: _Pending) -> list[Sealed]:
        """Images of this process that wait in the spool and that the commit was made without.

        Those that it was made with are freed, also where the step has been removed since.
        """
        request = save.request
        manifest = own_manifest(request.root, request.run, request.step)
        missing = save.images - (manifest.images if manifest else frozenset())
        sealed = self._spool.of_step(request.run, request.step)[0] if missing else []
        return [each for each in sealed if each.ticket.image in missing]


def _why_failed(sealed: Sealed) -> str:
    with suppress(OSError):
        return failure_path(sealed.slot).read_text()
    return f"{sealed.ticket.what} was evicted"


def _ask_from(save: _Pending) -> float:
    """When the server may be asked for it: most saves are committed before."""
    return save.since + ASK_S[0]


def _exported(save: _Pending) -> bool:
    if not save.exports:
        return True
    try:
        manifest = read_manifest(save.request.root, save.request.step)
    except (ManifestError, OSError):
        return False
    return all(is_exported(manifest, role) for role in save.exports)


def _missed(request: SaveRequest) -> str:
    """What has not been reached, to follow "was not"."""
    if is_committed(request.root, request.run, request.step, request.kind):
        with suppress(CommitError):
            if store := store_of(request.root):
                return f"brought to {store}, and is committed in the root only"
    return "committed"


def _committed(save: _Pending) -> bool:
    """Whether the images of this process are part of the step, the iteration files lead to it, and
    all of it is in the store, if the job has one."""
    request = save.request
    root, run, step, kind = request.root, request.run, request.step, request.kind
    roles = request.roles if request.components else ()  # functions have none
    manifest = own_manifest(root, run, step)
    if manifest is None or not manifest.holds(kind, roles) or not save.images <= manifest.images:
        return False
    serves_as = {*SERVES_AS[kind]} & {*manifest.kinds}
    if not all(is_announced(root, announced, run, step) for announced in serves_as):
        return False
    try:
        return kind != "checkpoint" or not store_of(root) or is_stored(root, manifest)
    except CommitError:  # nobody can tell, so the flow's end decides
        return False


def _superseded(request: SaveRequest) -> bool:
    """Whether a committed step was removed or replaced since: by retention, a rewind, a later run.

    Retention removes a step only where there is a newer one of its kind.
    """
    root, run, step = request.root, request.run, request.step
    if run_of(root, step) == run:
        return False
    best = newest(root, request.kind)
    if best is not None and (best.run, best.step) > (run, step):
        return True
    return left_behind_by(all_runs(root), run, step) is not None
