"""From files to rows: a commit's step, or all of a job again; and whether the two agree.

Each writer takes the job's row first and reads the files only then. So of any number of writers the
last one has seen the newest files, and what it writes is right whatever the others wrote.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from trinity_sync.catalog.database import opened, read_rows, reading, url_of
from trinity_sync.catalog.models import (
    Base,
    Claim,
    Job,
    Metric,
    Run,
    Shard,
    Step,
    WeightVersion,
)
from trinity_sync.errors import FormatError, ManifestError
from trinity_sync.fs.progress import Meter, unmetered
from trinity_sync.layout import job_id, steps_on_disk
from trinity_sync.settings import Settings
from trinity_sync.storage.discovery import manifest_state
from trinity_sync.storage.leases import list_leases
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.pins import list_pins
from trinity_sync.storage.runs import all_runs
from trinity_sync.weights.state_files import read_state

logger = logging.getLogger(__name__)

Rows = dict[type[Base], list[dict[str, Any]]]


def mirror(
    engine: sa.Engine,
    root: str | Path,
    steps: Iterable[int],
    *,
    flow_run: str | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Have the catalog say of some steps what the files say, and of the job's runs and claims.

    Args:
        engine: the catalog, `database.opened`.
        root: the job's root.
        steps: committed or gone.
        flow_run: Prefect's id of the flow run that has just committed them.
        clock: seconds since the epoch.
    """
    job, chosen = job_id(root), list(steps)
    with engine.begin() as connection:
        _take(connection, job, root, clock())
        known = _flow_runs(connection, job, chosen)
        connection.execute(sa.delete(Step).where(Step.job == job, Step.step.in_(chosen)))
        _refill(connection, job, root, chosen, known, flow_run)


def note_versions(engine: sa.Engine, root: str | Path) -> None:
    """Add the versions of the weights that the job's Synchronizer knows, if it has one.

    Nothing is asked of the Synchronizer itself, nor of the training: it writes its file anyway.
    """
    job = job_id(root)
    with engine.begin() as connection:
        if connection.execute(sa.select(Job.id).where(Job.id == job)).first():
            _add_versions(connection, job, root)


def try_mirror(
    settings: Settings, root: str | Path, steps: Iterable[int], *, flow_run: str | None = None
) -> None:
    """As `mirror`, of the catalog that the settings name; a failure is logged and no more.

    What was missed is in the files, and comes with the next `rebuild`.
    """
    try:
        with opened(url_of(settings)) as engine:
            mirror(engine, root, steps, flow_run=flow_run)
    except Exception as error:  # whatever is wrong with it, the files are as they should be
        logger.warning("the catalog misses a change of %s: %s", root, error)


def rebuild(
    engine: sa.Engine,
    root: str | Path,
    *,
    clock: Callable[[], float] = time.time,
    meter: Meter = unmetered,
) -> int:
    """Read all of a job from its files again; returns how many steps are committed.

    The meter is told of steps.
    """
    job = job_id(root)

    def steps() -> Iterator[int]:
        there = steps_on_disk(root)
        for step in there:
            yield step
            meter(1, len(there))

    with engine.begin() as connection:
        _take(connection, job, root, clock())
        known = _flow_runs(connection, job, None)
        connection.execute(sa.delete(Step).where(Step.job == job))
        return _refill(connection, job, root, steps(), known, None)


def forget(engine: sa.Engine, root: str | Path) -> bool:
    """Remove all rows of a job, whose files are left alone; whether there were any."""
    with engine.begin() as connection:
        return bool(connection.execute(sa.delete(Job).where(Job.id == job_id(root))).rowcount)


def differences(engine: sa.Engine, root: str | Path, *, claims: bool = True) -> list[str]:
    """In what the catalog and the files of a job differ; empty if they agree.

    Args:
        engine: the catalog, `database.opened`.
        root: the job's root.
        claims: compare pins and leases, too. Leases come and go, and nobody tells the catalog.
    """
    job = job_id(root)
    found = []
    with reading(engine) as connection:
        for model, rows in _rows_of(job, root, steps_on_disk(root), {}, None).items():
            if model is Claim and not claims:
                continue
            columns = [c for c in model.__table__.columns if c.name not in ("job", "flow_run")]
            of_job = model.__table__.columns["job"] == job
            have = {tuple(row) for row in read_rows(connection, sa.select(*columns).where(of_job))}
            want = {tuple(row[column.name] for column in columns) for row in rows}
            for what, some in (("lacks", want - have), ("has too much:", have - want)):
                if some:
                    example = ", ".join(str(value) for value in min(some)[:3])
                    found.append(f"{what} {len(some)} {model.__tablename__}, such as {example}")
    return found


def _add_versions(connection: sa.Connection, job: str, root: str | Path) -> None:
    if rows := _versions(job, root):
        connection.execute(_insert(connection)(WeightVersion).on_conflict_do_nothing(), rows)


def _versions(job: str, root: str | Path) -> list[dict[str, Any]]:
    try:
        return [
            {
                "job": job,
                "run": int(version["run"]),
                "step": int(version["step"]),
                "source": str(version["source"]),
                "published_at": float(version["known_at"]),
            }
            for version in (read_state(root) or {"registry": {"versions": []}})["registry"][
                "versions"
            ]
        ]
    except (FormatError, KeyError, TypeError, ValueError):
        return []  # of another release


def _insert(connection: sa.Connection) -> Any:
    return sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert


def _take(connection: sa.Connection, job: str, root: str | Path, now: float) -> None:
    """Make the job's row, or touch it; either way no other writer has it until the end."""
    row = _insert(connection)(Job).values(id=job, root=str(Path(root).resolve()), mirrored_at=now)
    connection.execute(row.on_conflict_do_update(index_elements=["id"], set_={"mirrored_at": now}))


def _flow_runs(
    connection: sa.Connection, job: str, steps: list[int] | None
) -> dict[tuple[int, float], str]:
    """Flow runs by step and time of its commit: what no file says."""
    wanted = sa.select(Step.step, Step.committed_at, Step.flow_run).where(Step.job == job)
    if steps is not None:
        wanted = wanted.where(Step.step.in_(steps))
    rows = connection.execute(wanted.where(Step.flow_run.is_not(None)))
    return {(step, at): str(flow_run) for step, at, flow_run in rows}


def _refill(
    connection: sa.Connection,
    job: str,
    root: str | Path,
    steps: Iterable[int],
    known: dict[tuple[int, float], str],
    flow_run: str | None,
) -> int:
    connection.execute(sa.delete(Run).where(Run.job == job))
    connection.execute(sa.delete(Claim).where(Claim.job == job))
    rows = _rows_of(job, root, steps, known, flow_run)
    for model, some in rows.items():
        if some:
            connection.execute(sa.insert(model), some)
    _add_versions(connection, job, root)
    return len(rows[Step])


def _rows_of(
    job: str,
    root: str | Path,
    steps: Iterable[int],
    known: dict[tuple[int, float], str],
    flow_run: str | None,
) -> Rows:
    """The rows that the files ask for, those first that others refer to."""
    rows: Rows = {Step: [], Shard: [], Metric: [], Run: [], Claim: []}
    for step in steps:
        try:
            manifest = read_manifest(root, step)
        except (ManifestError, FormatError):
            continue
        if manifest is None:
            continue
        run_id = flow_run or known.get((step, manifest.committed_at))
        rows[Step].append(_step_row(job, root, manifest, run_id))
        for record in manifest.files:
            rows[Shard].append({"job": job, "step": step, **asdict(record)})
        for name, value in _metrics(root, manifest).items():
            if isfinite(value):  # NaN is NULL to SQLite, and differs from itself
                rows[Metric].append({"job": job, "step": step, "name": name, "value": value})
    for run in all_runs(root):
        rows[Run].append({"job": job, "number": run.number, "resumed_from": run.resumed_from})
    for pin in list_pins(root):
        name = f"{pin.name or pin.step}.json"
        rows[Claim].append(_claim(job, name, pin.step, pin.kind, pin.why))
    for lease in list_leases(root):
        rows[Claim].append(_claim(job, lease.path.name, lease.step, "lease", lease.holder))
    return rows


def _metrics(root: str | Path, manifest: Manifest) -> dict[str, float]:
    try:
        return read_metrics(root, manifest.run, manifest.step)
    except FormatError as error:
        logger.warning("%s", error)
        return {}


def _step_row(
    job: str, root: str | Path, manifest: Manifest, flow_run: str | None
) -> dict[str, Any]:
    return {
        "job": job,
        "step": manifest.step,
        "run": manifest.run,
        "kinds": ",".join(manifest.kinds),
        "nbytes": manifest.nbytes,
        "committed_at": manifest.committed_at,
        "damage": manifest_state(root, manifest, runs=()).reason,
        "flow_run": flow_run,
    }


def _claim(job: str, name: str, step: int, kind: str, holder: str) -> dict[str, Any]:
    return {"job": job, "name": name, "step": step, "kind": kind, "holder": holder}
