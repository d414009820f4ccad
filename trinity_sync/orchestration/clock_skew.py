"""The Prefect server's clock, by which runs are due; those of trainers and workers may be off.

Prefect's clients write the time of their own node into a state that is due at once. A server whose
clock is behind it lets the run wait until then, and a worker whose clock is behind does not see it.
"""

import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import State
from prefect.states import Scheduled


def due(scheduled: Callable[[], State[Any]] = Scheduled) -> State[Any]:
    """A scheduled state that is due at once by the server's clock, which the server fills in."""
    state = scheduled()
    state.state_details.scheduled_time = None
    return state


def ahead_s(date: str | None, before: float, after: float) -> float:
    """Seconds by which a server's clock is ahead of this node's; negative if it is behind.

    Args:
        date: the header of an answer, which is cut to the second; None says nothing.
        before: this node's clock when the question was sent, in seconds since the epoch.
        after: the same when the answer had come. What header and way leave open counts as 0.
    """
    if not date:
        return 0.0
    theirs = parsedate_to_datetime(date).timestamp()
    return max(theirs - after, 0.0) + min(theirs + 1 - before, 0.0)


async def server_ahead_s(client: PrefectClient, clock: Callable[[], float] = time.time) -> float:
    """As `ahead_s`, by asking."""
    before = clock()
    answer = await client.request("GET", "/admin/version")
    return ahead_s(answer.headers.get("date"), before, clock())


async def server_now(client: PrefectClient) -> datetime:
    """The time by the server's clock, to a second."""
    return datetime.now(timezone.utc) + timedelta(seconds=await server_ahead_s(client))
