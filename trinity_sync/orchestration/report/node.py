"""What this node's memory holds of a job: saves in flight, and the slots."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trinity_sync.errors import TrinitySyncError
from trinity_sync.orchestration.prefect_queries import FlowRunSummary
from trinity_sync.orchestration.report.facts import InFlight, Memory
from trinity_sync.orchestration.report.health import Committed
from trinity_sync.settings import Settings
from trinity_sync.snapshot.evictions import count_evictions
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import Ticket
from trinity_sync.storage.placement import NodeRanks, describe_ranks, read_placement


def list_in_flight(
    settings: Settings,
    root: Path,
    spool: JobSpool,
    runs: Sequence[FlowRunSummary],
    committed: Committed,
) -> Iterator[InFlight]:
    """Yield the saves with images on this node, and those whose flow run has not ended."""
    under_way = {
        (int(run.tags["step"]), run.tags["kind"]): run
        for run in runs
        if run.is_save and not run.ended and run.tags.get("step", "").isdigit()
    }
    saves: dict[tuple[int, str], list[Ticket]] = {}
    for image in spool.tickets()[0]:
        ticket = image.ticket
        if not image.failed and (ticket.run, ticket.step, ticket.kind) not in committed:
            saves.setdefault((ticket.step, ticket.kind), []).append(ticket)
    for step, kind in sorted({*under_way, *saves}):
        run, tickets = under_way.get((step, kind)), saves.get((step, kind), [])
        since = min((ticket.sealed_at for ticket in tickets), default=run.since if run else 0.0)
        yield InFlight(
            step,
            kind,
            _name_phase(run),
            since,
            len(tickets),
            _find_missing_ranks(settings, root, tickets),
            run.url if run else "",
        )


def _name_phase(run: FlowRunSummary | None) -> str:
    if run is None:
        return "in memory, no flow run known"
    if run.state != "Running":
        return f"queued ({run.state.lower()})"
    return "committing" if "commit" in run.tasks else "writing"


def _find_missing_ranks(settings: Settings, root: Path, tickets: Sequence[Ticket]) -> str:
    missing = []
    for role in tickets[0].roles if tickets else ():
        places: Sequence[NodeRanks] = ()
        with suppress(TrinitySyncError, OSError):
            places = read_placement(root, tickets[0].run, tickets[0].run_key, role) or ()
        here = {rank for place in places if place.node == settings.node for rank in place.ranks}
        absent = sorted(here - {ticket.rank for ticket in tickets if ticket.role == role})
        if absent:
            missing.append(f"{role} {describe_ranks(absent)}")
    return ", ".join(missing)


def measure_memory(folder: Path, spool: JobSpool) -> Memory | None:
    """Return the state of this node's spool; None if there is none.

    ``folder`` is the node's spool, and ``spool`` the job's in it.
    """
    if not folder.is_dir():
        return None
    usage = shutil.disk_usage(folder)
    evicted = count_evictions(spool.folder).total()
    return Memory(len(spool.tickets()[0]), spool.bytes_used, usage.free, usage.total, evicted)
