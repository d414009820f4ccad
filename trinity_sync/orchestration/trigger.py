"""The trainer's request for a flow run, off the training thread.

A request that cannot reach the server loses nothing: the sealed images wait in the spool, this
thread tries again, and the node's worker looks for them too. One idempotency key a save makes all
of these the same flow run. A save whose images were evicted meanwhile gets no flow run: it has
failed.
"""

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from uuid import UUID

from trinity_sync.errors import TicketError, TrinitySyncError
from trinity_sync.request import SAVE_DEPLOYMENT, SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import JobSpool, Sealed
from trinity_sync.storage.locks import run_lock_if_free
from trinity_sync.storage.manifest import read_manifest
from trinity_sync.storage.placement import placement

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

logger = logging.getLogger(__name__)

BACK_OFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
CRASH_GRACE_S = 30.0
"""Seconds for which a crashed run may still be taken up again by a worker."""


@dataclass(frozen=True)
class Outcome:
    """What Prefect knows of a save's flow run."""

    state: Literal["unknown", "pending", "running", "completed", "failed"]
    message: str = ""
    url: str = ""


NOT_ASKED = Outcome("pending", "nobody has asked for a flow run yet")


class SaveTrigger:
    """Asks for flow runs from a daemon thread; no method but `outcomes` waits for the server.

    Args:
        settings: say where the embedded stack is; it is looked up again before each try, so one
            that was started anew on another port is found.
        api_url: URL of the Prefect API; by default that of the environment, the Prefect profile or
            the embedded stack.
    """

    def __init__(self, settings: Settings | None = None, api_url: str | None = None) -> None:
        self._settings = settings or Settings()
        self._given_url = api_url
        self._requests: queue.SimpleQueue[tuple[SaveRequest, float] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection = contextlib.ExitStack()
        self._client: SyncPrefectClient | None = None
        self._one_at_a_time = threading.Lock()
        self._deployment: tuple[str, UUID] | None = None
        self._away = False
        self._url = ""
        self._refused: dict[str, str] = {}

    def submit(self, request: SaveRequest) -> None:
        """Ask for the flow run of a save; returns at once, whatever the server does."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="save-trigger", daemon=True)
            self._thread.start()
        self._requests.put((request, time.monotonic()))

    def outcomes(self, requests: Sequence[SaveRequest]) -> dict[str, Outcome]:
        """What became of the flow runs of some saves, whoever asked for them; one question a 100.

        Returns:
            The outcome of each save by its request's key.
        """
        found = {key: Outcome("failed", why) for key, why in self._refused.items()}
        wanted = [request.key for request in requests if request.key not in found]
        try:
            for batch in (wanted[at : at + 100] for at in range(0, len(wanted), 100)):
                with self._connected() as client:  # one thread at a time imports Prefect
                    url = str(client.api_url).removesuffix("/").removesuffix("/api")
                    runs = {run.idempotency_key: run for run in _runs_of(client, batch)}
                found |= {key: self._outcome(runs.get(key), url) for key in batch}
            found |= self._evicted([each for each in requests if found[each.key] == NOT_ASKED])
        except Exception as error:
            unknown = Outcome("unknown", f"the Prefect server cannot be asked: {error}")
            found |= {key: unknown for key in wanted if key not in found}
        return {request.key: found[request.key] for request in requests}

    def _outcome(self, run: "FlowRun | None", url: str) -> Outcome:
        if run is None or run.state is None:
            return NOT_ASKED
        state = run.state
        page = f"{url}/runs/flow-run/{run.id}"
        message = state.message or str(state.name)
        if state.is_completed():
            return Outcome("completed", message, page)
        if state.is_crashed():
            if time.time() - state.timestamp.timestamp() <= CRASH_GRACE_S:
                return Outcome("pending", message, page)
            with run_lock_if_free(self._settings.spool, run.id) as ended:
                # of a server that was away: the run goes on here, and ends as what it reports
                return Outcome("failed" if ended else "running", message, page)
        if state.is_final() or state.is_cancelling():
            return Outcome("failed", f"{state.name}: {message}", page)
        return Outcome("running" if state.is_running() else "pending", message, page)

    def _evicted(self, requests: Sequence[SaveRequest]) -> dict[str, Outcome]:
        """The saves that no flow run could commit: their images on this node were evicted.

        A save without components has no images. Nothing is said of what cannot be read, nor of a
        save of several nodes: its flow run fails at once, and that is what the other ranks hear.
        """
        jobs: dict[str, tuple[list[Sealed], list[TicketError]]] = {}
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
            if manifest and manifest.run == run and manifest.holds(kind, request.roles):
                continue
            found[request.key] = Outcome(
                "failed",
                f"its images in {spool.folder} were evicted for later steps before a flow run was "
                "requested. Was the Prefect server away? See: trinity-sync status",
            )
        return found

    def close(self, timeout: float) -> None:
        """Let queued requests get out for at most ``timeout`` seconds, then give up on them."""
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join(timeout / 2)
            self._closing.set()
            self._thread.join(timeout / 2)
        if self._one_at_a_time.acquire(timeout=0):  # else a server that hangs is being asked
            self._disconnect()
            self._one_at_a_time.release()

    def _run(self) -> None:
        while (queued := self._requests.get()) is not None:
            request, since = queued
            for attempt in itertools.count():
                if self._closing.is_set():
                    break
                if time.monotonic() - since > BACK_OFF_S[0] and self._evicted([request]):
                    break
                try:
                    with self._connected() as client:
                        self._ask(client, request)
                except Exception as error:  # whatever is wrong over there, training goes on
                    if refusal := refusal_of(error):
                        self._refused[request.key] = refusal
                        break
                    self._warn(request, error)
                    self._closing.wait(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
                else:
                    self._away = self._away and self._back_again()
                    break

    def _ask(self, client: "SyncPrefectClient", request: SaveRequest) -> None:
        from trinity_sync.orchestration.server_time import due

        url = str(client.api_url)
        if self._deployment is None or self._deployment[0] != url:
            self._deployment = url, client.read_deployment_by_name(SAVE_DEPLOYMENT).id
        try:
            client.create_flow_run_from_deployment(
                self._deployment[1], state=due(), **request.flow_run
            )
        except Exception:
            self._deployment = None  # it may have been deployed anew: look it up at the next try
            raise

    def _warn(self, request: SaveRequest, error: Exception) -> None:
        if not self._away:
            self._away = True
            logger.warning(
                "%s waits in the spool: the Prefect server cannot be asked for its flow run (%s). "
                "It is asked again until it can; see: trinity-sync status",
                request.run_name,
                _why(error, self._url),
            )

    @staticmethod
    def _back_again() -> bool:
        logger.warning("the Prefect server can be asked again; waiting saves go on")
        return False

    @contextmanager
    def _connected(self) -> Iterator["SyncPrefectClient"]:
        """A client that is kept until it fails: to make one takes 50 ms of the trainer's GIL."""
        with self._one_at_a_time:
            if self._client is None:
                self._client = self._connection.enter_context(self._connect())
            try:
                yield self._client
            except BaseException:
                self._disconnect()
                raise

    def _disconnect(self) -> None:
        self._client = None
        self._connection.close()

    def _connect(self) -> "SyncPrefectClient":
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_API_URL, temporary_settings

        from trinity_sync.orchestration.insistent import InsistentTransport

        url = self._given_url or api_url_for(self._settings)
        if not url:
            raise ConnectionError(
                "no server is configured; set PREFECT_API_URL or: trinity-sync up"
            )
        self._url = url
        insistent = {"mounts": {"http://": InsistentTransport()}}
        with temporary_settings({PREFECT_API_URL: url}):
            return get_client(httpx_settings=insistent, sync_client=True)


def _runs_of(client: "SyncPrefectClient", keys: Sequence[str]) -> "list[FlowRun]":
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey

    wanted = FlowRunFilterIdempotencyKey(any_=list(keys))
    return client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=wanted))


def _why(error: Exception, url: str) -> str:
    """What is wrong with a server that was asked for a flow run, and what to do where it shows."""
    from prefect.exceptions import ObjectNotFound

    if not isinstance(error, ObjectNotFound):
        return f"{type(error).__name__}: {error}" + (f", at {url}" if url else "")
    answer = getattr(error.http_exc, "response", None)
    if answer is not None and "Deployment not found" in answer.text:
        return f"{url} has no deployment {SAVE_DEPLOYMENT}; run: trinity-sync deploy"
    return (
        f"{url} answers, but is not the API of a Prefect server; correct PREFECT_API_URL, which "
        "ends with /api"
    )


def _on_several_nodes(request: SaveRequest) -> bool:
    """Whether ranks of a save are on other nodes than this one.

    Raises:
        OSError, CommitError: the root cannot tell.
    """
    found = [placement(request.root, request.run, request.run_key, r) for r in request.roles]
    return len({place.node for places in found for place in places or ()}) > 1


def refusal_of(error: Exception) -> str:
    """Why the server will never take this request, as after an upgrade of one side only; or ""."""
    response = getattr(error, "response", None)
    if response is None or response.status_code not in (409, 422):
        return ""
    return f"the Prefect server refuses its flow run: {response.text}; run: trinity-sync deploy"


def api_url_for(settings: Settings) -> str | None:
    """The Prefect API of this process's environment or profile, else the embedded stack's."""
    from prefect.settings import PREFECT_API_URL

    from trinity_sync.orchestration.stack import find

    if url := PREFECT_API_URL.value():
        return url
    stack = find(settings)
    return stack.api_url if stack else None
