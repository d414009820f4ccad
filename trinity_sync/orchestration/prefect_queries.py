"""What is asked of a Prefect server by whoever starts or looks at a stack."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from trinity_sync.client.prefect_api import read_local_stack
from trinity_sync.errors import StackError, TrinitySyncError
from trinity_sync.settings import Settings


def api_url_for(settings: Settings) -> str | None:
    """Return the Prefect API of this process's environment or profile, or the local stack's.

    Raises:
        StackError: the state file of the local stack cannot be trusted or read.
    """
    return PREFECT_API_URL.value() or read_local_stack(settings.home)[0] or None


def refusal_of(error: httpx.HTTPStatusError) -> str:
    """Why the server will never accept a request, as after an upgrade of one side only; or ""."""
    if error.response.status_code not in (409, 422):
        return ""
    text = error.response.text
    return f"the Prefect server refuses its flow run: {text}; run: trinity-sync deploy"


@contextmanager
def server_client(api_url: str | None = None, auth: str = "") -> Iterator[SyncPrefectClient]:
    """A client of the server at ``api_url``; what goes wrong within is a StackError.

    Args:
        api_url: by default that of the environment.
        auth: ``user:password``; by default that of the environment.

    Raises:
        StackError: the server cannot be reached, or refuses a call; or there is none.
    """
    url = api_url or PREFECT_API_URL.value()
    if not url:
        raise StackError(
            "no Prefect server is known. Run trinity-sync up, or set PREFECT_API_URL to a server's."
        )
    try:
        named = {PREFECT_API_URL: url, **({PREFECT_API_AUTH_STRING: auth} if auth else {})}
        with temporary_settings(named), get_client(sync_client=True) as client:
            yield client
    except httpx.HTTPStatusError as error:
        raise StackError(
            f"Prefect server at {url} refused {error.request.method} {error.request.url.path}: "
            f"{error.response.status_code} {error.response.text[:300]}. Is it a Prefect 3 server, "
            "and is PREFECT_API_KEY or PREFECT_API_AUTH_STRING needed?"
        ) from error
    except httpx.TransportError as error:
        raise StackError(
            f"Prefect server at {url} cannot be reached ({error or type(error).__name__}). "
            "Start it, or correct PREFECT_API_URL."
        ) from error
    except TrinitySyncError:
        raise
    except (httpx.InvalidURL, ValueError) as error:  # no URL, or an answer that is not the API's
        raise StackError(
            f"{url} is not the API of a Prefect 3 server ({type(error).__name__}). Correct "
            "PREFECT_API_URL; it ends with /api."
        ) from error


def heartbeats(client: SyncPrefectClient, pool: str) -> dict[str, datetime | None]:
    """Time of the last heartbeat of each worker of the pool that Prefect calls online, by name."""
    try:
        workers = client.read_workers_for_work_pool(pool)
    except ObjectNotFound:
        return {}
    return {
        worker.name: worker.last_heartbeat_time
        for worker in workers
        if worker.status.value == "ONLINE"
    }


def waiting_runs(client: SyncPrefectClient, pool: str) -> int:
    """How many runs of the pool are due or late and have not been taken by a worker."""
    return client.count_flow_runs(
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            # schedules make their runs hours ahead
            expected_start_time=FlowRunFilterExpectedStartTime(before_=datetime.now(timezone.utc)),  # type: ignore[arg-type]
        ),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
    )
