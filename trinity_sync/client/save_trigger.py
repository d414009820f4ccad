"""The trainer's request for a flow run, off the training thread.

A request that cannot reach the server loses nothing: the sealed images wait in the spool, it is
sent again, and the node's worker looks for them too. One idempotency key a save makes all of these
the same flow run. A save whose images were evicted meanwhile gets no flow run: it has failed.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trinity_sync.client.prefect_api import FlowRun, PrefectApi
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import (
    FormatError,
    PrefectApiError,
    RequestRefusedError,
    TicketError,
    TrinitySyncError,
)
from trinity_sync.settings import Settings
from trinity_sync.snapshot.run_lock import try_run_lock
from trinity_sync.snapshot.spool import JobSpool, SealedImage
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.placement import read_placement

logger = logging.getLogger(__name__)

BACK_OFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between attempts to request a flow run; the last one for all that follow."""
CHECK_S = 5.0
"""Seconds for the server's answer before training begins."""
CRASH_GRACE_S = 30.0
"""Seconds for which a crashed run may still be taken up again by a worker, from when this process
has heard of it: the clock of the server may be another."""

State = Literal["unknown", "pending", "running", "completed", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What Prefect knows of a save's flow run."""

    state: State
    message: str = ""
    url: str = ""


NOT_REQUESTED = Outcome("pending", "its flow run has not been requested yet")


class SaveTrigger:
    """Requests flow runs of saves, and asks what became of them.

    `submit` may be called by any thread. The rest belongs to the event loop of the thread that
    follows the saves: requests and questions are separate tasks there, so a server that hangs while
    it is asked holds up no request.

    Args:
        settings: say where the local stack is, and the node's spool.
        api_url: URL of the Prefect API; by default that of the environment or the local stack.
    """

    def __init__(self, settings: Settings | None = None, api_url: str | None = None) -> None:
        self._settings = settings or Settings()
        self._api_url = api_url
        self._api = PrefectApi(self._settings, api_url)
        self._unsent: deque[tuple[SaveRequest, float]] = deque()
        self._away = False
        self._refused: dict[str, str] = {}
        self._crashed: dict[tuple[uuid.UUID, float], float] = {}
        """When it was heard (monotonic) that a run has crashed at some time of the server."""

    def warn_without_stack(self, root: Path, spool: Path) -> None:
        """Log a warning if no server is named; look at the environment and the local stack's file.

        Args:
            root: of the job.
            spool: folder in which its saves wait.
        """
        try:
            self._api.find_server()
        except PrefectApiError as error:
            logger.warning(
                "%s. Until then saves of %s wait in %s and are not committed", error, root, spool
            )

    def require_stack(self) -> None:
        """Ask the server once whether it can take saves; wait at most `CHECK_S` seconds.

        Raises:
            PrefectApiError: it cannot; the message says what to do.
        """

        async def ask() -> None:
            api = PrefectApi(self._settings, self._api_url, answer_s=CHECK_S)
            try:
                await api.require_deployment()
            finally:
                await api.close()

        with ThreadPoolExecutor(1, "require-stack") as thread:  # the caller may have an event loop
            thread.submit(asyncio.run, ask()).result()

    def submit(self, request: SaveRequest) -> None:
        """Have the flow run of a save requested by the next `send`."""
        self._refused.pop(request.key, None)  # by a stack that may have been upgraded since
        self._unsent.append((request, time.monotonic()))

    @property
    def has_unsent(self) -> bool:
        """Whether there are requests that the server has not answered."""
        return bool(self._unsent)

    async def send(self) -> None:
        """Request the flow runs of all that was submitted, each until the server has taken it."""
        while self._unsent:
            request, since = self._unsent[0]
            for attempt in itertools.count():
                if time.monotonic() - since > BACK_OFF_S[0] and self._evicted([request]):
                    break
                try:
                    await self._api.create_flow_run(request.flow_run)
                except RequestRefusedError as error:
                    self._refused[request.key] = str(error)
                    break
                except Exception as error:  # whatever is wrong over there, training goes on
                    self._warn(request, error)
                    await asyncio.sleep(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
                else:
                    if self._away:
                        logger.warning("the Prefect server answers again; waiting saves continue")
                    self._away = False
                    break
            self._unsent.popleft()

    async def outcomes(self, requests: Sequence[SaveRequest]) -> dict[str, Outcome]:
        """What became of the flow runs of some saves, whoever requested them.

        Returns:
            The outcome of each save by its request's key.
        """
        found = {key: Outcome("failed", why) for key, why in self._refused.items()}
        wanted = [request.key for request in requests if request.key not in found]
        try:
            runs = await self._api.flow_runs(wanted)
            found |= {key: self._outcome(runs.get(key)) for key in wanted}
            found |= self._evicted([each for each in requests if found[each.key] == NOT_REQUESTED])
        except Exception as error:
            unknown = Outcome("unknown", f"the Prefect server cannot be asked: {error}")
            found |= {key: unknown for key in wanted if key not in found}
        return {request.key: found[request.key] for request in requests}

    async def disconnect(self) -> None:
        """Close the connections to the server, before the event loop ends."""
        await self._api.close()

    def _outcome(self, run: FlowRun | None) -> Outcome:
        if run is None or not run.state:
            return NOT_REQUESTED
        message = run.message or run.name
        if run.state == "COMPLETED":
            return Outcome("completed", message, run.page)
        if run.state == "CRASHED":
            heard = self._crashed.setdefault((run.id, run.since), time.monotonic())
            if time.monotonic() - heard <= CRASH_GRACE_S:
                return Outcome("pending", message, run.page)
            with try_run_lock(self._settings.spool, run.id) as ended:
                # of a server that was away: the run goes on here, and ends as what it reports
                return Outcome("failed" if ended else "running", message, run.page)
        if run.state in ("FAILED", "CANCELLED", "CANCELLING"):
            return Outcome("failed", f"{run.name}: {message}", run.page)
        return Outcome("running" if run.state == "RUNNING" else "pending", message, run.page)

    def _evicted(self, requests: Sequence[SaveRequest]) -> dict[str, Outcome]:
        """The saves that no flow run could commit: their images on this node were evicted.

        A save without components has no images. Nothing is said of what cannot be read, nor of a
        save of several nodes: its flow run fails at once, and that is what the other ranks hear.
        """
        jobs: dict[str, tuple[list[SealedImage], list[TicketError | FormatError]]] = {}
        found = {}
        for request in requests:
            spool = JobSpool(self._settings.spool / request.job)
            run, step, kind = request.run, request.step, request.kind
            try:
                if request.job not in jobs:
                    jobs[request.job] = spool.tickets()
                sealed, unreadable = jobs[request.job]
                tickets = [image.ticket for image in sealed]
                waits = any(
                    (each.run, each.step, each.kind) == (run, step, kind)
                    and each.role in request.roles
                    for each in tickets
                )
                if waits or unreadable or not request.components or _on_several_nodes(request):
                    continue
                # after the spool: a commit frees its slots once the manifest is there
                manifest = read_manifest(request.root, step)
            except (OSError, TrinitySyncError):
                continue
            if manifest and manifest.run == run and manifest.has_kind(kind, request.roles):
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
                "%s of %s waits in the spool, and its flow run is requested again until the server "
                "takes it: %s",
                request.run_name,
                request.root,
                error,
            )


def _on_several_nodes(request: SaveRequest) -> bool:
    """Whether ranks of a save are on other nodes than this one.

    Raises:
        OSError, CommitError: the root cannot tell.
    """
    found = [read_placement(request.root, request.run, request.run_key, r) for r in request.roles]
    return len({place.node for places in found for place in places or ()}) > 1
