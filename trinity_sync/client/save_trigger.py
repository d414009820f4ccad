"""Request the flow runs of saves, and query their states, off the training thread.

While the server cannot be reached, the sealed images wait in the spool, the request is retried, and
the node's worker looks for the images as well. The idempotency key of a save makes all of these
requests one flow run. A save whose images were evicted meanwhile gets no flow run: it has failed.
"""

import asyncio
import itertools
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trinity_sync.client.outcomes import Outcome, OutcomeLogs
from trinity_sync.client.prefect_api import FlowRun, PrefectApi, ask_server
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.client.saver_control import SaverControl
from trinity_sync.errors import (
    PrefectApiError,
    RequestRefusedError,
    SaveError,
    TicketError,
    TrinitySyncError,
)
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import JobSpool, SealedImage, try_run_lock
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.placement import read_placement

logger = logging.getLogger(__name__)

BACK_OFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between attempts to request a flow run; the last value repeats."""
CHECK_S = 5.0
"""Seconds to wait for the server's answer in `SaveTrigger.require_stack`."""
CRASH_GRACE_S = 30.0
"""Seconds for which a worker may still retry a crashed run, from when this process has heard of the
crash: the server's clock may differ."""

NOT_REQUESTED = Outcome("pending", "its flow run has not been requested yet")


class SaveTrigger:
    """Requests the flow runs of saves, and queries their states; arguments as of `PrefectApi`.

    `submit` may be called by any thread. The coroutines run in the event loop of `CommitWatcher`,
    where requests and queries are separate tasks: a query that hangs delays no request.
    """

    def __init__(self, settings: Settings | None = None, api_url: str | None = None) -> None:
        self._settings = settings or Settings()
        self._api_url = api_url
        self._api = PrefectApi(self._settings, api_url)
        self._saver = SaverControl(self._settings.spool, self._settings.home)
        self.has_several_nodes = False
        """Whether the ranks are on several nodes, whose saves need the stack."""
        self._uses_saver: bool | None = None
        """What `has_saver` was when it was asked last; None before."""
        self._had_saver = False
        """Whether it was True once."""
        self._logs: dict[tuple[str, str], OutcomeLogs] = {}
        """What savers have written, by root and run."""
        self._unsent: deque[tuple[SaveRequest, float]] = deque()
        """Requests, and when they were submitted (monotonic)."""
        self._away = False
        self._refused: dict[str, str] = {}
        self._crashed: dict[tuple[uuid.UUID, float], float] = {}
        """When this process heard of a crash (monotonic), by run and the server's time of it."""

    def warn_without_stack(self, root: Path, spool: Path) -> None:
        """Log a warning if nothing would commit the saves of a root, which wait in its spool."""
        if self.has_saver:
            logger.info("No stack is known: the saver of this node commits the saves of %s", root)
            return
        try:
            self._api.find_server()
        except PrefectApiError as error:
            logger.warning(
                "%s. Until then saves of %s wait in %s and are not committed", error, root, spool
            )

    @property
    def has_saver(self) -> bool:
        """Whether the saver of this node commits saves, rather than flow runs of a stack."""
        if self._settings.saver != "auto" or self._api_url or os.environ.get("PREFECT_API_URL"):
            return self._settings.saver == "built-in"
        if self.has_several_nodes:
            return False
        try:
            self._api.find_server()
        except PrefectApiError:
            return True
        return False

    def begin(self, job: str) -> None:
        """Start the saver, if it is needed: a save of a job that follows outlives this process."""
        if self._uses_saver is None:  # later, `send` reads the stack's file
            self._choose(job)
        elif self._uses_saver:
            self._saver.wake(job)

    def _choose(self, job: str) -> bool:
        """Have the saver serve a job, or the stack; return whether it is the saver.

        Raises:
            SaveError: the saver cannot be started.
        """
        self._uses_saver = self.has_saver
        self._had_saver |= self._uses_saver
        if self._uses_saver:
            self._saver.wake(job)
        else:
            self._saver.release(job)
        return self._uses_saver

    def require_stack(self) -> None:
        """Require that the server can take saves; query it once, for at most `CHECK_S` seconds.

        Raises:
            PrefectApiError: it cannot; the message says what to do.
        """

        ask_server(self._settings, PrefectApi.require_deployment, self._api_url, answer_s=CHECK_S)

    def submit(self, request: SaveRequest) -> None:
        """Queue the request of a save for the next `send`."""
        self._refused.pop(request.key, None)  # the stack may have been upgraded since
        self._unsent.append((request, time.monotonic()))

    @property
    def has_unsent(self) -> bool:
        """Whether there are requests that the server has not taken yet."""
        return bool(self._unsent)

    async def send(self) -> None:
        """Request the flow runs of all submitted saves; retry each until the server takes it."""
        while self._unsent:
            request, since = self._unsent[0]
            for attempt in itertools.count():
                if time.monotonic() - since > BACK_OFF_S[0] and self._evicted([request]):
                    break
                try:
                    if await asyncio.to_thread(self._choose, request.job):
                        await asyncio.to_thread(self._saver.connect)
                    else:
                        await self._api.create_flow_run(request.flow_run)
                except (RequestRefusedError, SaveError) as error:
                    self._refused[request.key] = str(error)
                    break
                except Exception as error:  # whatever is wrong there, training continues
                    self._warn(request, error)
                    await asyncio.sleep(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
                else:
                    if self._away:
                        logger.warning("The Prefect server answers again; waiting saves continue")
                    self._away = False
                    break
            self._unsent.popleft()

    async def outcomes(self, requests: Sequence[SaveRequest]) -> dict[str, Outcome]:
        """Query the states of the flow runs of saves; return the outcome of each by request key."""
        found = {request.key: NOT_REQUESTED for request, _ in self._unsent}
        found |= {key: Outcome("failed", why) for key, why in self._refused.items()}
        if self.has_saver:
            asked = [request for request in requests if request.key not in found]
            found |= await asyncio.to_thread(self._ask_saver, asked)
        wanted = [request.key for request in requests if request.key not in found]
        try:
            runs = await self._api.flow_runs(wanted)
            found |= {key: self._outcome(runs.get(key)) for key in wanted}
            for each in requests if self._had_saver else ():  # before a stack came up
                if found[each.key] == NOT_REQUESTED:
                    found[each.key] = self._read_saver(each) or NOT_REQUESTED
            found |= self._evicted([each for each in requests if found[each.key] == NOT_REQUESTED])
        except Exception as error:
            unknown = Outcome("unknown", f"the Prefect server cannot be asked: {error}")
            found |= {key: unknown for key in wanted if key not in found}
        return {request.key: found[request.key] for request in requests}

    def _ask_saver(self, requests: Sequence[SaveRequest]) -> dict[str, Outcome]:
        """Return what the saver has written of saves, by request key."""
        try:
            # starts another in the place of one that was killed
            self._saver.wake(*{each.job for each in requests})
            otherwise = NOT_REQUESTED
        except SaveError as error:
            otherwise = Outcome("failed", str(error))
        found = {each.key: self._read_saver(each) or otherwise for each in requests}
        waiting = [each for each in requests if found[each.key] == NOT_REQUESTED]
        return found | self._evicted(waiting)

    def _read_saver(self, request: SaveRequest) -> Outcome | None:
        """Return how the saver has ended a save, None if it has not."""
        run = request.root, request.save.run_label
        logs = self._logs.setdefault(run, OutcomeLogs(request))
        with suppress(OSError):
            logs.read()
        return logs.outcome(request.key)

    async def disconnect(self) -> None:
        """Close the connections to the server, before the event loop ends."""
        await self._api.close()

    def _outcome(self, run: FlowRun | None) -> Outcome:
        if run is None or not run.state.type:
            return NOT_REQUESTED
        state, message = run.state, run.state.message or run.state.name
        if state.type == "COMPLETED":
            return Outcome("completed", message, run.page)
        if state.type == "CRASHED":
            heard = self._crashed.setdefault((run.id, state.since), time.monotonic())
            if time.monotonic() - heard <= CRASH_GRACE_S:
                return Outcome("pending", message, run.page)
            with try_run_lock(self._settings.spool, run.id) as ended:
                # a run that continues on this node lost its server; it ends as what it reports
                return Outcome("failed" if ended else "running", message, run.page)
        if state.type in ("FAILED", "CANCELLED", "CANCELLING"):
            return Outcome("failed", f"{state.name}: {message}", run.page)
        return Outcome("running" if state.type == "RUNNING" else "pending", message, run.page)

    def _evicted(self, requests: Sequence[SaveRequest]) -> dict[str, Outcome]:
        """Return the failures of saves whose images on this node were evicted, by request key.

        A save without components has no images. Saves whose images or manifest cannot be read are
        left out, and saves of several nodes, whose flow run fails at once for all ranks.
        """
        jobs: dict[str, tuple[list[SealedImage], list[TicketError]]] = {}
        found = {}
        for request in requests:
            spool = JobSpool(self._settings.spool / request.job)
            save = request.save
            try:
                if request.job not in jobs:
                    jobs[request.job] = spool.tickets()
                sealed, unreadable = jobs[request.job]
                tickets = [image.ticket for image in sealed]
                waits = any(save.owns(each) for each in tickets)
                if waits or unreadable or not request.components or _on_several_nodes(request):
                    continue
                # read after the spool: a commit frees its slots once the manifest is there
                manifest = read_manifest(save.root, save.step, ranks=())
            except (OSError, TrinitySyncError):
                continue
            if manifest and manifest.run == save.run and manifest.has_kind(save.kind, save.roles):
                continue
            found[request.key] = Outcome(
                "failed",
                f"its images in {spool.folder} were evicted for later steps before a flow run was "
                "requested. Was the Prefect server away? See: trinity-sync status",
            )
        return found

    def _warn(self, request: SaveRequest, error: Exception) -> None:
        if not self._away:
            self._away = True
            logger.warning(
                "%s of %s waits in the spool; retrying the request of its flow run until the "
                "server takes it: %s",
                request.run_name,
                request.root,
                error,
            )


def _on_several_nodes(request: SaveRequest) -> bool:
    """Return whether the ranks of a save are on more than one node.

    Raises:
        OSError, CommitError: the placements cannot be read.
    """
    found = [read_placement(request.root, request.run, request.run_key, r) for r in request.roles]
    return len({place.node for places in found for place in places or ()}) > 1
