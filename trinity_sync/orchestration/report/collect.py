"""Collect the facts of a job: its files, this node's spool and the Prefect server."""

import platform
import shlex
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trinity_sync.client.prefect_api import (
    FAILED,
    PAGE,
    FlowRun,
    PrefectApi,
    ask_server,
    find_last_attempts,
)
from trinity_sync.client.prefect_connection import knows_server
from trinity_sync.errors import ConfigError, PrefectApiError, TrinitySyncError
from trinity_sync.fs.atomic import list_paths, walk_files
from trinity_sync.layout import steps_on_disk
from trinity_sync.orchestration.quantities import VERIFIED, make_artifact_key
from trinity_sync.orchestration.report.facts import (
    Disk,
    Failure,
    InFlight,
    JobReport,
    Memory,
    RunRow,
    SaveRow,
    StepRow,
    Use,
)
from trinity_sync.orchestration.report.health import group_failures, judge_health
from trinity_sync.orchestration.report.steps import list_saves, read_steps
from trinity_sync.retention.prune import plan_prune
from trinity_sync.retention.removal import Rules
from trinity_sync.settings import Settings
from trinity_sync.snapshot.identity import job_id
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.snapshot.ticket import Ticket
from trinity_sync.storage.block_reuse import list_spares
from trinity_sync.storage.discovery import list_known_runs
from trinity_sync.storage.job_settings import JobSettings, read_job_settings
from trinity_sync.storage.placement import NodeRanks, describe_ranks, list_nodes, read_placement
from trinity_sync.storage.replace import quarantine_folder
from trinity_sync.storage.runs import Run, find_living_run, read_start_time
from trinity_sync.storage.save_timing import read_saves
from trinity_sync.storage.steps_in_use import list_leases, list_pins
from trinity_sync.weights.state_files import read_sync_report

MAX_SAVES = 1000
"""Newest saves that a report has."""
UNKEPT = 5
"""Steps that no policy keeps from which on retention fails: each save removes those before it."""


@dataclass(frozen=True)
class _Server:
    """What the Prefect server knows."""

    runs: Sequence[FlowRun] = ()
    verified_at: float | None = None
    verified: Sequence[Mapping[str, Any]] = ()
    """Rows of the newest table of verified steps."""
    ui_url: str = ""
    error: str = ""


def collect_report(settings: Settings, root: Path) -> JobReport:
    """Read the files of a job, and query the Prefect server if it answers."""
    root, now = root.resolve(), time.time()
    server = _query_server(settings, root)
    starts = list_known_runs(root)
    saves = tuple(sorted(read_saves(root), key=lambda each: each.committed_at)[-MAX_SAVES:])
    steps = tuple(_list_steps(root, starts, server))
    spool = JobSpool(settings.spool / job_id(root))
    rows = list_saves(settings, root, runs=find_last_attempts(server.runs))
    failed = [
        Failure(row.cause, row.reason or "", row.since or 0.0, row.url, row.save, retry=row.retry)
        for row in rows
        if row.cause
    ]
    told = {row.flow_run for row in rows if row.has_failed}
    failed += [
        Failure(
            run.state.name,
            run.state.message,
            run.state.since or run.started_at,
            run.page,
            run.save if run.is_save else None,
            run.name,
        )
        for run in server.runs
        if run.state.type in FAILED and str(run.id) not in told
    ]
    committed = {row.save for row in rows if row.status == "committed"}
    failures = group_failures(str(root), failed, steps, committed)
    in_flight = tuple(_list_in_flight(settings, root, spool, rows, server))
    job = read_job_settings(root)
    quarantined = list_paths(quarantine_folder(root), "*/global_step_*")
    return JobReport(
        root=str(root),
        job=job_id(root),
        created_at=now,
        health=judge_health(
            *(saves, steps, failures, in_flight, now),
            is_running=is_running(root),
            retention=[*_find_unkept(root, job, now)],
        ),
        steps=steps,
        saves=saves,
        runs=tuple(_list_runs(root, starts)),
        in_flight=in_flight,
        failures=failures,
        disk=_measure_disk(root, steps, quarantined),
        memory=measure_memory(settings.spool, spool),
        keep=job.keep,
        uses=tuple(_list_uses(root, now)),
        quarantined=tuple("/".join(path.parts[-2:]) for path in quarantined),
        remote=job.remote,
        verified_at=server.verified_at,
        versions=_list_versions(),
        ui_url=server.ui_url,
        server_error=server.error,
        server_limit=PAGE if len(server.runs) == PAGE else 0,
    )


def _find_unkept(root: Path, job: JobSettings, now: float) -> Iterator[str]:
    """Yield what is wrong with the retention of a job, in words."""
    try:
        unkept = [each.step for each in plan_prune(root, Rules.of_job(job), now).removed]
    except ConfigError as error:
        yield f"no step is removed: {error}"
        return
    if len(unkept) >= UNKEPT:
        yield (
            f"{len(unkept)} steps that no policy keeps are left, {unkept[0]} to {unkept[-1]}: "
            f"trinity-sync prune {shlex.quote(str(root))} removes them, or says why it cannot"
        )


def is_running(root: Path) -> bool | None:
    """Return whether a process of the newest run lives; None if its lock cannot be opened."""
    try:
        return find_living_run(root, "") is not None
    except (TrinitySyncError, OSError):
        return None


def _list_versions() -> dict[str, str]:
    found = {"trinity-sync": version("trinity-sync"), "python": platform.python_version()}
    with suppress(PackageNotFoundError):
        found["prefect"] = version("prefect")
    return found


def _query_server(settings: Settings, root: Path) -> _Server:
    async def ask(api: PrefectApi) -> _Server:
        runs = await api.read_job_runs(job_id(root))
        table = await api.read_table(make_artifact_key(VERIFIED, root))
        verified_at, verified = table or (None, ())
        url = f"{api.find_server().ui_url}/runs?tags={quote(f'job:{job_id(root)}')}"
        return _Server(runs, verified_at, verified, url)

    try:
        is_used = settings.saver == "stack" or knows_server(settings)
        return ask_server(settings, ask) if is_used else _Server()
    except PrefectApiError as error:
        return _Server(error=str(error))


def _list_steps(root: Path, known: Sequence[Run], server: _Server) -> Iterator[StepRow]:
    good = ("valid", "restored")
    checked = {row.get("step") for row in server.verified if row.get("state") in good}
    urls: dict[tuple[int, int | None], list[str]] = {}
    for run in server.runs:
        if run.is_save and run.state.type == "COMPLETED":
            urls.setdefault((run.step, run.run), []).append(run.page)
    for row in read_steps(root, steps_on_disk(root), known):
        yield replace(
            row,
            verified_at=server.verified_at if row.step in checked else None,
            urls=tuple(urls.get((row.step, row.run), ())),
        )


def _list_runs(root: Path, known: Sequence[Run]) -> Iterator[RunRow]:
    for run in sorted(known, key=lambda each: each.number):
        began_at = None
        with suppress(OSError):
            began_at = read_start_time(root, run.number) or None
        yield RunRow(run.number, run.resumed_from, began_at, list_nodes(root, run), run.left_out)


def _measure_disk(root: Path, steps: Sequence[StepRow], quarantined: Sequence[Path]) -> Disk:
    usage = shutil.disk_usage(root)
    files = (file for folder in quarantined for file in walk_files(folder))
    return Disk(
        nbytes=sum(step.nbytes for step in steps),
        quarantine_bytes=sum(file.lstat().st_size for file in files),
        spare_bytes=sum(list_spares(root).values()),
        free_bytes=usage.free,
        total_bytes=usage.total,
    )


def _list_uses(root: Path, now: float) -> Iterator[Use]:
    """Yield the pins, leases and readers that use a step."""
    for pin in list_pins(root):
        yield Use(pin.step, pin.kind, pin.why, pin.pinned_at)
    for lease in list_leases(root):
        host = lease.host.partition("/")[0]
        yield Use(lease.step, "lease", f"{lease.holder} on {host}", None)
    try:
        report = read_sync_report(root, now)
    except OSError:
        return
    for reader in report.readers if report else ():
        yield Use(reader.step, "reader", reader.name, reader.since, reader.behind)


def _list_in_flight(
    settings: Settings, root: Path, spool: JobSpool, rows: Sequence[SaveRow], server: _Server
) -> Iterator[InFlight]:
    """Yield the saves that have not ended, with their images on this node."""
    runs = {str(run.id): run for run in server.runs}
    images: dict[tuple[int, int, str], list[Ticket]] = defaultdict(list)
    for image in spool.tickets()[0]:
        if not image.failed:
            images[image.ticket.run, image.ticket.step, image.ticket.kind].append(image.ticket)
    for row in rows:
        if row.is_in_flight:
            run, tickets = runs.get(row.flow_run or ""), images[row.save]
            yield InFlight(
                row.step,
                row.kind,
                _name_phase(row, run),
                min((ticket.sealed_at for ticket in tickets), default=row.since or 0.0),
                len(tickets),
                _find_missing_ranks(settings, root, tickets),
                row.url or "",
            )


def _name_phase(row: SaveRow, run: FlowRun | None) -> str:
    if run and run.state.name != "Running":
        return f"queued ({run.state.name.lower()})"
    return "writing" if row.status == "writing" else "in memory"


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
    return Memory(len(spool.tickets()[0]), spool.bytes_used, usage.free, usage.total)
