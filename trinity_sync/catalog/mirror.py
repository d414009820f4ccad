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
from trinity_sync.storage.manifest import Manifest, read_manifest
from trinity_sync.storage.metrics import read_metrics

logger = logging.getLogger(__name__)


def mirror(engine: sa.Engine, root: str | Path, steps: Iterable[int]) -> None:
    """Update the rows of some steps, which were committed, measured or removed, from the files."""
    chosen = list(steps)
    _replace_rows(engine, root, lambda: chosen, Step.step.in_(chosen))


def try_mirror(
    settings: Settings, root: str | Path, steps: Iterable[int], stack: StackSettings | None = None
) -> None:
    """Update the catalog of the settings with `mirror`; a failure is only logged.

    The next `rebuild` adds what is missing.
    """
    try:
        with open_catalog(get_catalog_url(settings, stack)) as engine:
            mirror(engine, root, steps)
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

    return _replace_rows(engine, root, steps, sa.true())


def remove_job(engine: sa.Engine, root: str | Path) -> bool:
    """Remove all rows of a job, and of earlier jobs at its root; return whether there were any."""
    with engine.begin() as connection:
        at_root = Job.root == str(Path(root).resolve())
        return bool(connection.execute(sa.delete(Job).where(at_root)).rowcount)


def is_current(engine: sa.Engine, root: str | Path) -> bool:
    """Return whether the catalog says of a job's steps what their files say.

    Raises:
        ValueError: A column is not JSON.
    """
    job = job_id(root)
    with read_consistently(engine) as connection:
        wanted = sa.select(Step.__table__).where(Step.job == job).order_by(Step.step)
        steps = [row._asdict() for row in connection.execute(wanted)]
    return steps == _make_step_rows(job, root, sorted(steps_on_disk(root)))


def _replace_rows(
    engine: sa.Engine,
    root: str | Path,
    steps: Callable[[], Iterable[int]],
    replaced: sa.ColumnElement[bool],
) -> int:
    """Replace the ``replaced`` rows of steps, and the job's row; return the number of new ones.

    ``steps`` returns the steps to read, and is called again if another writer was faster.
    """
    job, real = job_id(root), str(Path(root).resolve())
    with read_consistently(engine) as connection:
        before = _read_version(connection, job)
    rows, now = _make_step_rows(job, root, steps()), time.time()
    with engine.begin() as connection:
        _lock_job(connection, job, real)
        if _read_version(connection, job) != before:
            rows, now = _make_step_rows(job, root, steps()), time.time()
        connection.execute(sa.delete(Step).where(Step.job == job, replaced))
        if rows:
            connection.execute(sa.insert(Step), rows)
        connection.execute(sa.update(Job).where(Job.id == job).values(mirrored_at=now))
    return len(rows)


_NEVER = 0.0
"""``mirrored_at`` of a row that is being created."""


def _lock_job(connection: sa.Connection, job: str, root: str) -> None:
    """Create or update the job's row, which locks it until the end of the transaction."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    row = insert(Job).values(id=job, root=root, mirrored_at=_NEVER)
    connection.execute(row.on_conflict_do_update(index_elements=["id"], set_={"root": root}))


def _read_version(connection: sa.Connection, job: str) -> float:
    """Return when the job's rows were written last."""
    found = connection.execute(sa.select(Job.mirrored_at).where(Job.id == job)).scalar()
    return _NEVER if found is None else float(found)


def _make_step_rows(job: str, root: str | Path, steps: Iterable[int]) -> list[dict[str, Any]]:
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
                "metrics": _read_finite_metrics(root, manifest),
            }
        )
    return rows


def _read_finite_metrics(root: str | Path, manifest: Manifest) -> dict[str, float]:
    metrics = read_metrics(root, manifest.run, manifest.step)
    return {name: value for name, value in metrics.items() if isfinite(value)}  # JSON has no NaN
