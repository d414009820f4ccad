"""Have the saver of this node drive saves, and find those that nothing will commit.

The saver requests the flow runs of saves, and commits what none has begun in time, and everything
where no stack is known. It is started before each save, so it outlives trainer and server. A save
whose images were evicted before it was begun has failed.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from trinity_sync.client.prefect_api import PrefectApi, ask_server
from trinity_sync.client.prefect_connection import find_server
from trinity_sync.client.saver_control import SaverControl, Serving
from trinity_sync.errors import PrefectApiError, RemovedStepError, SaveError, TrinitySyncError
from trinity_sync.fs.atomic import replace_file
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import explain_away
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import failure_path
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.placement import is_on_several_nodes
from trinity_sync.storage.save_functions import has_request
from trinity_sync.storage.save_timing import refuse_removed
from trinity_sync.storage.uncommitted import is_being_written

logger = logging.getLogger(__name__)

SERVER = "server"
"""File in the folder of a job in the spool with the URL of the server that its trainer uses."""
UNREQUESTED = "unrequested"
"""File next to it that says why flow runs cannot be requested now; its saver writes it, or a worker
that can start none."""
CHECK_S = 5.0
"""Seconds to wait for the server's answer in `SaveTrigger.require_stack`."""


class SaveTrigger:
    """Has the saver of this node drive saves; arguments as of `PrefectApi`.

    `submit` may be called by any thread; `send` and `find_failures` are those of `CommitWatcher`.
    """

    def __init__(self, settings: Settings | None = None, api_url: str | None = None) -> None:
        self._settings = settings or Settings()
        self._api_url = api_url
        self._saver = SaverControl(self._settings.spool, self._settings.home, api_url)
        self._after_s: float | None = None
        """Seconds after which the saver of this node commits what no flow run has begun: 0 if it
        commits all saves, and requests no flow run; infinite if it only requests them; None if it
        does neither, because no stack is known to which all saves are left."""
        self._server = self._lacks_server = ""
        """Identity of the server, empty without one; and why none is known."""
        self._hurry_s = math.inf
        """As `hurry`, until the next `begin`."""
        self._has_begun = False
        """Whether a server was looked for."""
        self._lacks_saver = False
        """Whether it was logged that the saver cannot be started."""
        self._unrequested = ""
        """Why flow runs cannot be requested, as it was logged last."""
        self._unsent: deque[SaveRequest] = deque()
        """Saves for which the saver was not woken yet."""

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
            self._server = find_server(self._settings.home, self._api_url).identity
        except PrefectApiError as error:
            self._lacks_server = str(error)
        if self._settings.saver == "auto":
            self._after_s = self._settings.saver_after_s if self._server else 0.0
        elif self._settings.saver == "stack":
            self._after_s = math.inf if self._server else None
        else:
            self._after_s = 0.0

    def begin(self, job: str, *, again: bool = False, is_submitted: bool = False) -> None:
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
        """Have the saver commit earlier what no flow run has begun, until the next `begin`."""
        if self._after_s is not None:
            if self._settings.saver != "stack":
                self._hurry_s = min(self._hurry_s, after_s)
            self._prepare(job)

    def _prepare(self, job: str) -> None:
        """Have the saver serve a job, or leave it to the stack, and name the stack's server."""
        with suppress(OSError):  # the folder is gone, or shared memory is full
            path = self._settings.spool / job / SERVER
            if not path.exists() or path.read_text() != self._server:
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

        ask_server(self._settings, PrefectApi.require_deployment, self._api_url, answer_s=CHECK_S)

    def submit(self, request: SaveRequest) -> None:
        """Have the next `send` wake the saver for a save, whose images are sealed."""
        self._unsent.append(request)

    @property
    def has_unsent(self) -> bool:
        """Whether there are saves for which the saver was not woken yet."""
        return bool(self._unsent)

    def send(self) -> None:
        """Wake the saver for all submitted saves, and wait until it serves."""
        while self._unsent:
            request = self._unsent.popleft()
            self._find_stack()
            with suppress(SaveError):  # `find_failures` tells it
                self._prepare(request.job)
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
            why = (folder / UNREQUESTED).read_text()
        if why and why != self._unrequested:
            logger.warning("Saves in %s have no flow run, retrying the request: %s", folder, why)
        self._unrequested = why

    def close(self) -> None:
        """Let the saver end once it has committed what was submitted."""
        self._saver.close()

    def _find_lost(
        self, requests: Sequence[SaveRequest], begun: Collection[str] = ()
    ) -> dict[str, str]:
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
                    found[request.key] = failure_path(failed[0].slot).read_text()
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
