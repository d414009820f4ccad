"""Mirror the files of a job in the catalog: some steps, or the whole job.

A writer reads the files before its transaction, because a root that hangs must not keep the lock of
SQLite from other jobs. It reads them again, in the transaction, if another has written the job's
rows meanwhile. So the last of several writers has read the newest files.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from trinity_sync.catalog.database import (
    Job,
    Step,
    get_catalog_url,
    open_catalog,
    read_consistently,
)
from trinity_sync.errors import FormatError, ManifestError
from trinity_sync.fs.direct_io import OnProgress, no_progress
from trinity_sync.layout import steps_on_disk
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.storage.discovery import read_manifest_state
from trinity_sync.storage.leases import list_leases
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.metrics import read_metrics
from trinity_sync.storage.pins import list_pins
from trinity_sync.storage.runs import list_runs

logger = logging.getLogger(__name__)

CLAIM_VERBS = {"pin": "pinned", "tag": "tagged"}


def mirror(
    engine: sa.Engine,
    root: str | Path,
    steps: Iterable[int],
    *,
    flow_run: str | None = None,
) -> None:
    """Update the rows of some steps, and of the job's runs, pins, tags and leases, from the files.

    ``steps`` were committed or removed; ``flow_run`` is Prefect's id of the run that has just
    committed them.
    """
    chosen = list(steps)
    _replace_rows(engine, root, lambda: chosen, Step.step.in_(chosen), flow_run)


def try_mirror(
    settings: Settings,
    root: str | Path,
    steps: Iterable[int],
    *,
    stack: StackSettings | None = None,
    flow_run: str | None = None,
) -> None:
    """Update the catalog of the settings with `mirror`; a failure is only logged.

    The next `rebuild` adds what is missing.
    """
    try:
        with open_catalog(get_catalog_url(settings, stack)) as engine:
            mirror(engine, root, steps, flow_run=flow_run)
    except Exception as error:  # the catalog is best effort, the files count
        logger.warning(
            "cannot update the catalog for %s, run trinity-sync jobs reindex %s: %s",
            root,
            root,
            error,
        )


def rebuild(engine: sa.Engine, root: str | Path, *, on_progress: OnProgress = no_progress) -> int:
    """Write all rows of a job again from its files, and return the number of committed steps.

    ``on_progress`` is called with the number of steps read.
    """

    def steps() -> Iterator[int]:
        found = steps_on_disk(root)
        for step in found:
            yield step
            on_progress(1, len(found))

    return _replace_rows(engine, root, steps, sa.true(), None)


def remove_job(engine: sa.Engine, root: str | Path) -> bool:
    """Remove all rows of a job, and of earlier jobs at its root; return whether there were any."""
    with engine.begin() as connection:
        at_root = Job.root == str(Path(root).resolve())
        return bool(connection.execute(sa.delete(Job).where(at_root)).rowcount)


def is_current(engine: sa.Engine, root: str | Path) -> bool:
    """Return whether the catalog says of a job's steps and runs what their files say.

    Raises:
        ValueError: A column is not JSON.
    """
    job = job_id(root)
    columns = [column for column in Step.__table__.columns if column.name != "flow_run"]
    with read_consistently(engine) as connection:
        wanted = sa.select(*columns).where(Step.job == job).order_by(Step.step)
        steps = [row._asdict() for row in connection.execute(wanted)]
        runs = connection.scalars(sa.select(Job.runs).where(Job.id == job)).all()
    on_disk = _make_step_rows(job, root, sorted(steps_on_disk(root)), None)
    for row in on_disk:
        del row["flow_run"]
    return steps == on_disk and (runs or [{}]) == [_read_runs(root)]


def _replace_rows(
    engine: sa.Engine,
    root: str | Path,
    steps: Callable[[], Iterable[int]],
    replaced: sa.ColumnElement[bool],
    flow_run: str | None,
) -> int:
    """Replace the ``replaced`` rows of steps, and the job's row; return the number of new ones.

    ``steps`` returns the steps to read, and is called again if another writer was faster.
    """
    job, real = job_id(root), str(Path(root).resolve())

    def read() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rows = _make_step_rows(job, root, steps(), flow_run)
        state = {"runs": _read_runs(root), "claims": _read_claims(root), "mirrored_at": time.time()}
        return rows, state

    with read_consistently(engine) as connection:
        before = _read_version(connection, job)
    rows, state = read()
    with engine.begin() as connection:
        _lock_job(connection, job, real)
        if _read_version(connection, job) != before:
            rows, state = read()
        _insert_rows(connection, job, rows, replaced)
        connection.execute(sa.update(Job).where(Job.id == job).values(state))
    return len(rows)


def _insert(connection: sa.Connection) -> Any:
    return sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert


_NEVER = 0.0
"""``mirrored_at`` of a row that is being created."""


def _lock_job(connection: sa.Connection, job: str, root: str) -> None:
    """Create or update the job's row, which locks it until the end of the transaction."""
    values = {"root": root, "mirrored_at": _NEVER, "runs": {}, "claims": {}}
    row = _insert(connection)(Job).values(id=job, **values)
    connection.execute(row.on_conflict_do_update(index_elements=["id"], set_={"root": root}))


def _read_version(connection: sa.Connection, job: str) -> float:
    """Return when the job's rows were written last."""
    found = connection.execute(sa.select(Job.mirrored_at).where(Job.id == job)).scalar()
    return _NEVER if found is None else float(found)


def _insert_rows(
    connection: sa.Connection,
    job: str,
    rows: list[dict[str, Any]],
    replaced: sa.ColumnElement[bool],
) -> None:
    """Replace rows of steps; keep the names of their flow runs, which no file contains."""
    columns = sa.select(Step.step, Step.committed_at, Step.flow_run)
    old = connection.execute(columns.where(Step.job == job, replaced, Step.flow_run.is_not(None)))
    known = {(step, at): str(flow_run) for step, at, flow_run in old}
    connection.execute(sa.delete(Step).where(Step.job == job, replaced))
    for row in rows:
        row["flow_run"] = row["flow_run"] or known.get((row["step"], row["committed_at"]))
    if rows:
        connection.execute(sa.insert(Step), rows)


def _make_step_rows(
    job: str, root: str | Path, steps: Iterable[int], flow_run: str | None
) -> list[dict[str, Any]]:
    """Make the rows of steps from their files; those that are not committed have none."""
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
                "corruption": read_manifest_state(root, manifest, runs=()).reason,
                "flow_run": flow_run,
                "metrics": _read_finite_metrics(root, manifest),
                "files": {record.path: record.digest for record in manifest.files},
            }
        )
    return rows


def _read_finite_metrics(root: str | Path, manifest: Manifest) -> dict[str, float]:
    metrics = read_metrics(root, manifest.run, manifest.step)
    return {name: value for name, value in metrics.items() if isfinite(value)}  # JSON has no NaN


def _read_runs(root: str | Path) -> dict[str, list[int]]:
    """Return what each run resumed from, as `database.Job.runs` has it."""
    return {str(run.number): [run.resumed_from, run.resumed_run] for run in list_runs(root)}


def _read_claims(root: str | Path) -> dict[str, str]:
    """Return the pins, tags and leases, by step and file name."""
    claims = {
        f"{pin.step}/{pin.name or pin.step}.json": f"{CLAIM_VERBS[pin.kind]} {pin.why}".strip()
        for pin in list_pins(root)
    }
    for lease in list_leases(root):
        claims[f"{lease.step}/{lease.path.name}"] = f"leased by {lease.holder}".strip()
    return claims
