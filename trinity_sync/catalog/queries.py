"""Query all jobs without reading their files."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from trinity_sync.catalog.database import make_corruption_error, read_consistently, read_rows
from trinity_sync.catalog.models import Job, Step, WeightVersion
from trinity_sync.layout import KINDS
from trinity_sync.retention.policies import StepInfo
from trinity_sync.snapshot.job_identity import job_id
from trinity_sync.storage.runs import Run, build_lineage

STEP_COLUMNS = [column for column in Step.__table__.columns if column.name != "files"]


@dataclass(frozen=True)
class JobSteps:
    """A job and its committed steps, oldest first."""

    job: str
    root: str
    mirrored_at: float
    steps: tuple[StepInfo, ...]
    flow_runs: dict[int, str]
    """Prefect's id of the flow run that committed a step, if it is known."""
    versions: tuple[sa.Row[Any], ...]
    """Rows of `WeightVersion`, oldest first."""

    @property
    def nbytes(self) -> int:
        """Bytes of all steps."""
        return sum(each.nbytes for each in self.steps)


def list_jobs_at(engine: sa.Engine, root: str | Path) -> list[JobSteps]:
    """Read the jobs at a root, which may be gone: the one that is there now comes first."""
    real, now = str(Path(root).resolve()), job_id(root)
    found = [each for each in list_jobs(engine) if each.root == real]
    return sorted(found, key=lambda each: each.job != now)


def list_jobs(engine: sa.Engine) -> list[JobSteps]:
    """Read all jobs with their steps, by three statements in all.

    They are sorted by root. Pins, tags and leases are those of the last update of the job.
    """
    steps: dict[str, list[sa.Row[Any]]] = defaultdict(list)
    versions: dict[str, list[sa.Row[Any]]] = defaultdict(list)
    with read_consistently(engine) as connection:
        wanted = sa.select(*STEP_COLUMNS).order_by(Step.run, Step.step)
        for row in read_rows(connection, wanted):
            steps[row.job].append(row)
        order = WeightVersion.run, WeightVersion.step, WeightVersion.source
        versioned = sa.select(WeightVersion.__table__).order_by(*order)
        for row in read_rows(connection, versioned):
            versions[row.job].append(row)
        found = []
        for row in read_rows(connection, sa.select(Job.__table__).order_by(Job.root)):
            try:
                held = _group_claims(row.claims)
                runs = [Run(int(number), "", step) for number, step in row.runs.items()]
            except ValueError as error:
                raise make_corruption_error(
                    connection, f"{error} in the row of {row.root}"
                ) from error
            found.append(
                JobSteps(
                    row.id,
                    row.root,
                    row.mirrored_at,
                    tuple(_mark_superseded([_read_step(s, held) for s in steps[row.id]], runs)),
                    {each.step: each.flow_run for each in steps[row.id] if each.flow_run},
                    tuple(versions[row.id]),
                )
            )
        return found


def _group_claims(claims: Mapping[str, str]) -> dict[int, list[str]]:
    """Return the pins, tags and leases of each step."""
    held: dict[int, list[str]] = defaultdict(list)
    for key in sorted(claims):
        held[int(key.partition("/")[0])].append(claims[key])
    return held


def _read_step(row: sa.Row[Any], held: Mapping[int, list[str]]) -> StepInfo:
    return StepInfo(
        row.step,
        row.run,
        tuple(kind for kind in KINDS if kind in row.kinds.split(",")),
        row.committed_at,
        row.nbytes,
        row.metrics,
        tuple(held.get(row.step, ())),
        row.corruption,
    )


def _mark_superseded(steps: Collection[StepInfo], runs: Iterable[Run]) -> list[StepInfo]:
    """Return the steps, each with the run that superseded it."""
    run_of_step = {each.step: each.run for each in steps}
    line = build_lineage(runs, lambda step: run_of_step.get(step, 0))
    return [replace(each, superseded_by=line.supersedes(each.run)) for each in steps]
