"""From files to rows: a commit's step, or all of a job again; and whether the two agree.

Each writer takes the job's row first and reads the files only then. So of any number of writers the
last one has seen the newest files, and what it writes is right whatever the others wrote.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from trinity_sync.catalog.database import (
    get_catalog_url,
    open_catalog,
    read_consistently,
    read_rows,
)
from trinity_sync.catalog.models import Job, Step, WeightVersion
from trinity_sync.errors import FormatError, ManifestError
from trinity_sync.fs.progress import OnProgress, no_progress
from trinity_sync.layout import job_id, steps_on_disk
from trinity_sync.settings import Settings
from trinity_sync.storage.discovery import read_manifest_state
from trinity_sync.storage.leases import list_leases
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.pins import list_pins
from trinity_sync.storage.runs import list_runs
from trinity_sync.weights.state_files import read_state

logger = logging.getLogger(__name__)

WORDS = {"pin": "pinned", "tag": "tagged"}


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
        with open_catalog(get_catalog_url(settings)) as engine:
            mirror(engine, root, steps, flow_run=flow_run)
    except Exception as error:  # whatever is wrong with it, the files are as they should be
        logger.warning("the catalog misses a change of %s: %s", root, error)


def rebuild(
    engine: sa.Engine,
    root: str | Path,
    *,
    clock: Callable[[], float] = time.time,
    on_progress: OnProgress = no_progress,
) -> int:
    """Read all of a job from its files again; returns how many steps are committed.

    Progress counts steps.
    """
    job = job_id(root)

    def steps() -> Iterator[int]:
        there = steps_on_disk(root)
        for step in there:
            yield step
            on_progress(1, len(there))

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
    """Return in what the catalog and the files of a job differ; nothing if they agree.

    Args:
        engine: the catalog, `database.opened`.
        root: the job's root.
        claims: compare pins and leases, too. Leases come and go without a change of the catalog.
    """
    job = job_id(root)
    columns = [c for c in Step.__table__.columns if c.name not in ("job", "flow_run")]
    want: dict[str, set[Any]] = {
        "steps": {
            _freeze(row[column.name] for column in columns)
            for row in _make_step_rows(job, root, steps_on_disk(root), {}, None)
        }
    }
    with read_consistently(engine) as connection:
        rows = read_rows(connection, sa.select(*columns).where(Step.job == job))
        have: dict[str, set[Any]] = {"steps": {_freeze(row) for row in rows}}
        whole = sa.select(Job.runs, Job.claims).where(Job.id == job)
        row = next(read_rows(connection, whole), None)
    want["runs"] = {*_read_runs(root).items()}
    have["runs"] = {*row.runs.items()} if row else set()
    if claims:
        want["claims"] = {*_read_claims(root).items()}
        have["claims"] = {*row.claims.items()} if row else set()
    found = []
    for name in want:
        for what, some in (
            ("lacks", want[name] - have[name]),
            ("has too much:", have[name] - want[name]),
        ):
            if some:
                example = ", ".join(str(value) for value in min(some)[:3])
                found.append(f"{what} {len(some)} {name}, such as {example}")
    return found


def _freeze(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values of a row as a tuple that can be hashed and ordered."""
    return tuple(
        json.dumps(value, sort_keys=True) if isinstance(value, dict) else value for value in values
    )


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
    values = {"root": str(Path(root).resolve()), "mirrored_at": now, "runs": {}, "claims": {}}
    row = _insert(connection)(Job).values(id=job, **values)
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
    rows = _make_step_rows(job, root, steps, known, flow_run)
    if rows:
        connection.execute(sa.insert(Step), rows)
    now = {"runs": _read_runs(root), "claims": _read_claims(root)}
    connection.execute(sa.update(Job).where(Job.id == job).values(now))
    _add_versions(connection, job, root)
    return len(rows)


def _make_step_rows(
    job: str,
    root: str | Path,
    steps: Iterable[int],
    known: dict[tuple[int, float], str],
    flow_run: str | None,
) -> list[dict[str, Any]]:
    """Make the rows of committed steps from their files.

    Args:
        job: id of the job.
        root: its root.
        steps: committed or gone.
        known: flow runs by step and time of its commit.
        flow_run: the flow run that has just committed them.
    """
    rows = []
    for step in steps:
        try:
            manifest = read_manifest(root, step)
        except (ManifestError, FormatError):
            continue
        if manifest is None:
            continue
        rows.append(
            {
                "job": job,
                "step": step,
                "run": manifest.run,
                "kinds": ",".join(manifest.kinds),
                "nbytes": manifest.nbytes,
                "committed_at": manifest.committed_at,
                "damage": read_manifest_state(root, manifest, runs=()).reason,
                "flow_run": flow_run or known.get((step, manifest.committed_at)),
                "metrics": _read_finite_metrics(root, manifest),
                "files": {record.path: record.digest for record in manifest.files},
            }
        )
    return rows


def _read_finite_metrics(root: str | Path, manifest: Manifest) -> dict[str, float]:
    try:
        metrics = read_metrics(root, manifest.run, manifest.step)
    except FormatError as error:
        logger.warning("%s", error)
        return {}
    return {name: value for name, value in metrics.items() if isfinite(value)}  # JSON has no NaN


def _read_runs(root: str | Path) -> dict[str, int]:
    """Return the step that each run resumed from, by the run's number."""
    return {str(run.number): run.resumed_from for run in list_runs(root)}


def _read_claims(root: str | Path) -> dict[str, str]:
    """Return what holds steps, by step and name of its file."""
    claims = {
        f"{pin.step}/{pin.name or pin.step}.json": f"{WORDS[pin.kind]} {pin.why}".strip()
        for pin in list_pins(root)
    }
    for lease in list_leases(root):
        claims[f"{lease.step}/{lease.path.name}"] = f"leased by {lease.holder}".strip()
    return claims
