"""Recover zombie runs, and tell which saves have failed whose worker could not.

Zombie runs are those that Prefect shows as running although no process executes them. A worker that
is killed cannot report the end of its run, nor can a worker whose last call finds the server away.
Every worker looks for such runs of its own node, where it identifies processes by pid and start
time: it sets their final state and retries them. The workers of other nodes recover theirs.

The message of the Pending state names the process that acquired a run. That state is set by a
single call; the run's ``infrastructure_pid`` is set by a later call. The run's lock
(`try_run_lock`) shows whether a process of this node still executes it. The server's state does
not: a server that was away shows runs as Crashed that are still executed.

The worker that runs a flow writes the journal of its root (`saves.journal`). How runs ended that
no worker could see to their end is read from the server, and written there as well.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
from pydantic import ValidationError

from trinity_sync.client.prefect_api import (
    AT_LIMIT,
    FINAL,
    UNDER_WAY,
    FlowRun,
    PrefectApi,
    State,
    strip_preamble,
)
from trinity_sync.errors import FormatError, TrinitySyncError
from trinity_sync.fs.process import is_process_alive
from trinity_sync.layout import SPOOL_FORMAT
from trinity_sync.orchestration.job_registry import ANSWER_S
from trinity_sync.orchestration.root_threads import RootVisits, run_in_thread
from trinity_sync.saves.journal import PATIENCE_S, SaveState, append, read_entry
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.saves.save_status import end_images
from trinity_sync.snapshot.spool import JobSpool, list_job_spools, try_run_lock

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Maximum number of times that a run is started, while its root is here."""
WAITING = "Waiting for its root"
"""Name of the state of a run whose root is away; it is retried once it is back."""
ACQUIRED_BY = "Acquired by "
"""Prefix of the message of a Pending state, before the process that acquired the run, as
``node/pid/start time``."""
TAG = "trinity-sync"
"""Tag of all deployments of prefect.yaml, which excludes other flows of the server."""
LATE_S = 60.0
"""Seconds after a run's end in which the states of its tasks may still arrive: Prefect sends them
separately, and again every 30 s until the server has them."""


async def recover_run(api: PrefectApi, run_id: UUID, here: str, *, spool: Path) -> None:
    """Set the final state of a zombie run, and retry a run that has crashed.

    A server that was away for long shows a run as Crashed while it is still executed. Such a run
    usually ends soon, in the state that it reports. On this node the run's lock shows it. A run of
    another node is not retried for a minute, and none that was started too often. ``here`` is this
    process, as ``node/pid/start time``.
    """
    with try_run_lock(spool, run_id) as free:  # no process changes it meanwhile
        if free and not await _is_executed(api, run_id, here, spool):
            await _retry_crashed(api, run_id, here)


async def _is_executed(api: PrefectApi, run_id: UUID, here: str, spool: Path) -> bool:
    """Return whether a process may execute a run whose lock is free; end a zombie run."""
    states = await api.read_states(run_id)
    run = await api.read_flow_run(run_id)
    if run.state.type not in UNDER_WAY:
        return False
    if run.state.id not in {state.id for state in states}:
        return True  # it changed between the two calls
    owner = _find_owner(states)
    node, _, process = owner.partition("/")
    if owner != here and (node != here.partition("/")[0] or is_process_alive(process)):
        return True
    why = f"Its process {owner} {'could not report its end' if owner == here else 'died'}."
    if run.state.type == "CANCELLING":
        end = State("CANCELLED", "Cancelled", why)
        await try_allow_eviction(spool, run.parameters, run.key, describe_end(end.name, why))
    else:
        end = State("CRASHED", "Crashed", why)
    logger.warning("flow run %s: %s", run.name, end.message)
    tasks = await api.read_unfinished_tasks({"flow_runs": {"id": {"any_": [str(run.id)]}}})
    await api.end_tasks(tasks.get(str(run.id), ()), end)
    await api.set_state(run.id, end)
    return False


async def _retry_crashed(api: PrefectApi, run_id: UUID, here: str) -> None:
    states = await api.read_states(run_id)
    run = await api.read_flow_run(run_id)
    if run.state.type != "CRASHED":
        return
    waited = sum(state.name == WAITING for state in states)
    if len(_find_acquisitions(states)) - waited >= ATTEMPTS:
        return
    is_elsewhere = _find_owner(states).partition("/")[0] not in ("", here.partition("/")[0])
    if is_elsewhere and time.time() + api.clock_skew - run.state.since < LATE_S:
        return
    logger.warning("flow run %s crashed (%s), retrying it", run.name, run.state.message)
    await api.retry_flow_run(run_id)


async def end_unreported_tasks(api: PrefectApi, pool: str, *, late_s: float = LATE_S) -> None:
    """Set the final state of task runs whose own final states were lost with a server.

    States of its tasks may still arrive within ``late_s`` after the end of a flow run.
    """
    before = datetime.fromtimestamp(time.time() - late_s, UTC).isoformat()
    ended = {"state": {"type": {"any_": list(FINAL)}}, "end_time": {"before_": before}}
    tasks = await api.read_unfinished_tasks(
        {"flow_runs": ended, "deployments": {"tags": {"all_": [TAG]}}}
    )
    for run in await api.read_pool_runs(pool, *FINAL, ids=list(tasks)) if tasks else ():
        why = f"Its flow run is {run.state.name}; its own final state was lost."
        end = run.state.type if run.state.type in ("COMPLETED", "CANCELLED") else "CRASHED"
        await api.end_tasks(tasks[str(run.id)], State(end, end.capitalize(), why))


def _find_acquisitions(states: Sequence[State]) -> list[State]:
    return [s for s in states if s.type == "PENDING" and s.message.startswith(ACQUIRED_BY)]


def _find_owner(states: Sequence[State]) -> str:
    """Return the last process that acquired a run, as ``node/pid/start time``; "" for none."""
    acquired = _find_acquisitions(states)
    return acquired[-1].message.removeprefix(ACQUIRED_BY) if acquired else ""


MARK_S = 5.0
"""Seconds to wait for a root or a spool: a task on a file system that hangs holds its images."""


def look_at_jobs(
    visits: RootVisits, spool: Path, look: Callable[[JobSpool], Iterable[SaveRequest]]
) -> list[SaveRequest]:
    """Return what looks at all jobs find, oldest first of each.

    Jobs whose roots do not answer are left out.
    """
    jobs = defaultdict(list)  # an earlier job of a root may have a folder as well
    for job in list_job_spools(spool):
        jobs[job.read_root() or job.folder].append(job)
    found = visits.visit(
        jobs, lambda root: [each for job in jobs[root] for each in look(job)], limit_s=ANSWER_S
    )
    return [request for requests in found.values() for request in requests]


async def try_allow_eviction(
    spool: Path, parameters: Mapping[str, Any], key: str | None, reason: str
) -> None:
    """Call `allow_eviction` for at most `MARK_S`; not for a user's run, which has another key."""
    if (request := read_request(parameters)) and request.key == key:
        with anyio.move_on_after(MARK_S):
            await run_in_thread(allow_eviction, spool, request, reason)


def allow_eviction(spool: Path, request: SaveRequest, reason: str) -> None:
    """End the images of a save whose flow run has failed, as `end_images`."""
    try:
        end_images(JobSpool(spool / request.job), request, reason)
    except (OSError, TrinitySyncError) as error:
        logger.warning("cannot mark the images of %s for eviction: %s", request.save, error)


def read_request(
    parameters: Mapping[str, Any], *, of_any_release: bool = False
) -> SaveRequest | None:
    """Return the save of a flow run by its parameters; None for a run of another flow.

    None also for a trainer of another release, whose images are not touched; with
    ``of_any_release``, its save is returned if it can be read, to tell how it ended.
    """
    try:
        values = parameters["request"]
        if of_any_release:
            values = {**values, "format": SPOOL_FORMAT}
        return SaveRequest.model_validate(values)
    except (KeyError, TypeError, ValidationError, FormatError):
        return None


def describe_end(name: str | None, message: str | None) -> str:
    """Return why a run has not committed its save, by its last state."""
    name = None if message and name == "Failed" else name
    return ": ".join(filter(None, (name, strip_preamble(message or ""))))


async def try_tell(
    request: SaveRequest, state: SaveState, message: str = "", *, url: str, start: int
) -> None:
    """Call `append` until it is written, and wait no longer than `MARK_S` for it."""
    with anyio.move_on_after(MARK_S):
        await run_in_thread(
            append, request, state, message, url=url, start=start, patience_s=PATIENCE_S
        )


async def try_tell_failure(spool: Path, run: FlowRun) -> None:
    """Mark the images that this node has of a failed run, and tell it unless its worker has."""
    why, start = describe_end(run.state.name, run.state.message), run.attempts + 1
    request = read_request(run.parameters, of_any_release=True)
    if request is None or request.key != run.key:
        return
    known = None
    with anyio.move_on_after(MARK_S), suppress(OSError):
        known = await run_in_thread(read_entry, request)
    if known and known.is_left:  # the saver ends it
        return
    state: SaveState = "left" if run.state.message == AT_LIMIT else "failed"
    if state == "failed":
        await try_allow_eviction(spool, run.parameters, run.key, why)
    # what the saver has taken over, the saver tells
    is_told = known is not None and (known.has_ended or known.takes_over)
    if known is None or not is_told or known.start < run.attempts:
        # after a start that the server has not counted: its process died before it ran
        await try_tell(request, state, why, url=run.page, start=start)
