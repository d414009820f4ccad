"""Collect the facts of a job: its files, this node's spool and the Prefect server."""

import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from trinity_sync.errors import FormatError, StackError, TrinitySyncError
from trinity_sync.layout import KINDS, PRIVATE_FOLDER, steps_on_disk
from trinity_sync.orchestration.prefect_queries import (
    ANSWER_S,
    PAGE,
    VERIFIED,
    ArtifactTable,
    FlowRunSummary,
    find_server,
    open_client,
    read_job_runs,
    read_table,
)
from trinity_sync.orchestration.report.facts import (
    Disk,
    JobReport,
    Mark,
    RunRow,
    StepRow,
    Use,
)
from trinity_sync.orchestration.report.health import Committed, group_failures, judge_health
from trinity_sync.orchestration.report.node import list_in_flight, measure_memory
from trinity_sync.orchestration.report.retention import measure_growth, preview_policies
from trinity_sync.retention.planner import Rules
from trinity_sync.retention.step_infos import list_step_infos
from trinity_sync.settings import Settings
from trinity_sync.snapshot.evictions import read_evictions
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.snapshot.spool import JobSpool
from trinity_sync.storage.block_reuse import list_spares
from trinity_sync.storage.discovery import list_known_runs, read_step_state
from trinity_sync.storage.job_settings import JobSettings, read_job_settings
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.leases import list_leases
from trinity_sync.storage.manifest import Manifest
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.pins import list_pins, list_tags
from trinity_sync.storage.placement import read_placement
from trinity_sync.storage.quarantine import quarantine_folder
from trinity_sync.storage.required_remote import is_replicated, read_required_remote
from trinity_sync.storage.runs import Run
from trinity_sync.storage.save_log import read_saves
from trinity_sync.weights.report import read_sync_report

MAX_SAVES = 1000
"""Newest saves that a report has, for charts."""


@dataclass(frozen=True)
class _Server:
    """What the Prefect server knows."""

    runs: Sequence[FlowRunSummary] = ()
    verified: ArtifactTable | None = None
    ui_url: str = ""
    error: str = ""


def collect_report(settings: Settings, root: Path) -> JobReport:
    """Read the files of a job, and query the Prefect server if it answers."""
    root, now = root.resolve(), time.time()
    server = _query_server(settings, root)
    known = list_known_runs(root)
    steps = tuple(_list_steps(root, known, server))
    saves = tuple(sorted(read_saves(root), key=lambda each: each.committed_at)[-MAX_SAVES:])
    spool = JobSpool(settings.spool / job_id(root))
    evictions = read_evictions(spool.folder)
    committed = _list_committed(steps) | {(each.run, each.step, each.timing.kind) for each in saves}
    failures = group_failures(str(root), server.runs, evictions, steps, committed)
    in_flight = tuple(list_in_flight(settings, root, spool, server.runs, committed))
    job = _read_job_settings(root)
    rules = Rules.of_job(job)
    infos = list_step_infos(root)
    quarantined = sorted(quarantine_folder(root).glob("*/global_step_*"))
    growth = measure_growth(saves, rules)
    return JobReport(
        root=str(root),
        job=job_id(root),
        created_at=now,
        health=judge_health(saves, steps, failures, in_flight, now),
        steps=steps,
        saves=saves,
        runs=tuple(_list_runs(root, known)),
        in_flight=in_flight,
        failures=failures,
        marks=tuple(
            Mark(int(run.tags["step"]), run.since or run.started_at, run.state)
            for run in server.runs
            if run.failed and run.is_save and run.tags.get("step", "").isdigit()
        ),
        disk=_measure_disk(root, steps, quarantined, growth, now),
        memory=measure_memory(settings.spool, spool),
        policies=preview_policies(infos, rules, now) if infos else (),
        uses=tuple(_list_uses(root, now)),
        quarantined=tuple("/".join(path.parts[-2:]) for path in quarantined),
        remote=job.remote,
        verified_at=server.verified.created_at if server.verified else None,
        versions={
            "trinity-sync": version("trinity-sync"),
            "prefect": version("prefect"),
            "python": platform.python_version(),
        },
        ui_url=server.ui_url,
        server_error=server.error,
        server_limit=PAGE if len(server.runs) == PAGE else 0,
    )


def _read_job_settings(root: Path) -> JobSettings:
    """Return the settings of the job; while their file is torn, nothing is removed."""
    try:
        return read_job_settings(root)
    except (TrinitySyncError, OSError):
        return JobSettings(keep="all", keep_weights="all", keep_quarantine="all")


def _query_server(settings: Settings, root: Path) -> _Server:
    try:
        url, auth = find_server(settings)
        if not url:
            return _Server(error="no Prefect server is known")
        with open_client(url, auth, answer_s=ANSWER_S) as client:
            base = str(client.api_url).removesuffix("/").removesuffix("/api")
            return _Server(
                read_job_runs(client, root),
                read_table(client, VERIFIED, root),
                f"{base}/runs?tags={quote(f'job:{job_id(root)}')}",
            )
    except StackError as error:
        return _Server(error=str(error))


def _list_committed(steps: Sequence[StepRow]) -> Committed:
    return {
        (step.run, step.step, kind)
        for step in steps
        if step.run is not None and step.is_loadable
        for kind in step.kinds
    }


def _list_steps(root: Path, known: Sequence[Run], server: _Server) -> Iterator[StepRow]:
    pointers = {kind: read_latest_pointer(root, kind) for kind in KINDS}
    tags = list_tags(root).values()
    try:
        has_remote = bool(read_required_remote(root))
    except TrinitySyncError:
        has_remote = False
    verified = server.verified.rows if server.verified else ()
    checked = {row.get("step") for row in verified if row.get("state") in ("valid", "restored")}
    urls: dict[tuple[str, str], list[str]] = {}
    for run in server.runs:
        if run.is_save and run.ended and not run.failed:
            key = run.tags.get("step", ""), run.tags.get("run", "")
            urls.setdefault(key, []).append(run.url)
    for step in steps_on_disk(root):
        found = read_step_state(root, step, known)
        row = StepRow(
            step,
            found.state,
            found.reason,
            pointers=tuple(kind for kind, target in pointers.items() if target == step),
            tags=tuple(tag.name for tag in tags if tag.step == step),
            verified_at=server.verified.created_at if server.verified and step in checked else None,
        )
        if found.manifest is None:
            yield row
            continue
        manifest, replicated = found.manifest, None
        with suppress(FormatError):
            replicated = is_replicated(root, manifest) if has_remote else None
        yield _add_manifest(root, row, manifest, replicated, urls)


def _add_manifest(
    root: Path,
    row: StepRow,
    manifest: Manifest,
    replicated: bool | None,
    urls: Mapping[tuple[str, str], Sequence[str]],
) -> StepRow:
    components: dict[str, int] = {}
    for file in manifest.files:
        name = file.component or "other"
        components[name] = components.get(name, 0) + file.nbytes
    metrics: Mapping[str, float] = {}
    with suppress(FormatError):
        metrics = read_metrics(root, manifest.run, manifest.step)
    return replace(
        row,
        run=manifest.run,
        kinds=manifest.kinds,
        nbytes=manifest.nbytes,
        components=components,
        committed_at=manifest.committed_at,
        timings=manifest.timings,
        callables=tuple(
            f"{each.name} of rank {each.rank} {each.seconds:.2f} s" for each in manifest.callables
        ),
        replicated=replicated,
        metrics=metrics,
        urls=tuple(urls.get((str(manifest.step), str(manifest.run)), ())),
    )


def _list_runs(root: Path, known: Sequence[Run]) -> Iterator[RunRow]:
    for run in sorted(known, key=lambda each: each.number):
        nodes: set[str] = set()
        for path in (root / PRIVATE_FOLDER / "placements").glob(f"{run.number}.*.json"):
            role = path.name.split(".")[1]
            with suppress(TrinitySyncError, OSError):
                nodes |= {
                    each.node for each in read_placement(root, run.number, run.key, role) or ()
                }
        began_at = None
        with suppress(OSError):
            began_at = (root / PRIVATE_FOLDER / "runs" / f"{run.number}.json").stat().st_mtime
        yield RunRow(run.number, run.resumed_from, began_at, tuple(sorted(nodes)))


def _measure_disk(
    root: Path,
    steps: Sequence[StepRow],
    quarantined: Sequence[Path],
    growth: float | None,
    now: float,
) -> Disk:
    usage = shutil.disk_usage(root)
    files = (file for folder in quarantined for file in folder.rglob("*") if file.is_file())
    return Disk(
        nbytes=sum(step.nbytes for step in steps),
        quarantine_bytes=sum(file.stat().st_size for file in files),
        spare_bytes=sum(list_spares(root).values()),
        free_bytes=usage.free,
        total_bytes=usage.total,
        growth_per_day=growth,
        full_at=now + usage.free / growth * 86400 if growth else None,
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
    except (OSError, FormatError):
        return
    for reader in report.readers if report else ():
        yield Use(reader.step, "reader", reader.name, reader.since, reader.behind)
