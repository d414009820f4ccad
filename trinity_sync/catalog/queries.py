"""Questions that span jobs, answered without a look at their files."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import sqlalchemy as sa

from trinity_sync.catalog.database import read_rows, reading
from trinity_sync.catalog.models import Claim, Job, Metric, Run, Step, WeightVersion
from trinity_sync.layout import KINDS
from trinity_sync.retention.policies import StepInfo
from trinity_sync.storage.runs import Run as Known
from trinity_sync.storage.runs import lineage

WORDS = {"pin": "pinned", "tag": "tagged", "lease": "leased by"}


@dataclass(frozen=True)
class Handed:
    """A version of the weights; see `models.WeightVersion`."""

    step: int
    run: int
    source: str
    published_at: float


@dataclass(frozen=True)
class JobSteps:
    """A job and its committed steps, oldest first."""

    job: str
    root: str
    mirrored_at: float
    steps: tuple[StepInfo, ...]
    flow_runs: dict[int, str]
    """Prefect's id of the flow run that committed a step, where that is known."""
    versions: tuple[Handed, ...]
    """Versions of the weights that were seen, oldest first."""

    @property
    def nbytes(self) -> int:
        """Bytes of all steps."""
        return sum(each.nbytes for each in self.steps)


def jobs(engine: sa.Engine, job: str | None = None) -> list[JobSteps]:
    """All jobs, or one by its id, with their steps: six questions, however many steps there are.

    What a step is held by is what pinned or leased it when its job was last looked at.
    """
    steps: dict[str, list[StepInfo]] = defaultdict(list)
    metrics: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    held: dict[tuple[str, int], list[str]] = defaultdict(list)
    flow_runs: dict[str, dict[int, str]] = defaultdict(dict)
    versions: dict[str, list[Handed]] = defaultdict(list)
    with reading(engine) as connection:
        of_job = [] if job is None else [Metric.job == job]
        for each in read_rows(connection, sa.select(Metric.__table__).where(*of_job)):
            metrics[each.job, each.step][each.name] = each.value
        of_job = [] if job is None else [Claim.job == job]
        for each in read_rows(connection, sa.select(Claim.__table__).where(*of_job)):
            held[each.job, each.step].append(
                f"{WORDS.get(each.kind, each.kind)} {each.holder}".strip()
            )
        runs: dict[str, list[Known]] = defaultdict(list)
        of_job = [] if job is None else [Run.job == job]
        for each in read_rows(connection, sa.select(Run.__table__).where(*of_job)):
            runs[each.job].append(Known(each.number, "", each.resumed_from))
        of_job = [] if job is None else [Step.job == job]
        wanted = sa.select(Step.__table__).where(*of_job).order_by(Step.run, Step.step)
        for each in read_rows(connection, wanted):
            key = each.job, each.step
            if each.flow_run:
                flow_runs[each.job][each.step] = each.flow_run
            steps[each.job].append(
                StepInfo(
                    each.step,
                    each.run,
                    tuple(kind for kind in KINDS if kind in each.kinds.split(",")),
                    each.committed_at,
                    each.nbytes,
                    metrics.get(key, {}),
                    tuple(held.get(key, ())),
                    each.damage,
                )
            )
        of_job = [] if job is None else [WeightVersion.job == job]
        order = WeightVersion.run, WeightVersion.step, WeightVersion.source
        versioned = sa.select(WeightVersion.__table__).where(*of_job).order_by(*order)
        for each in read_rows(connection, versioned):
            seen = Handed(each.step, each.run, each.source, each.published_at)
            versions[each.job].append(seen)
        of_job = [] if job is None else [Job.id == job]
        return [
            JobSteps(
                each.id,
                each.root,
                each.mirrored_at,
                tuple(_told_apart(steps[each.id], runs[each.id])),
                flow_runs[each.id],
                tuple(versions[each.id]),
            )
            for each in read_rows(
                connection, sa.select(Job.__table__).where(*of_job).order_by(Job.root)
            )
        ]


def _told_apart(steps: Collection[StepInfo], runs: Iterable[Known]) -> list[StepInfo]:
    """The steps, each with the run that did not go on from it, as `retention.survey` has them."""
    run_of_step = {each.step: each.run for each in steps}
    line = lineage(runs, lambda step: run_of_step.get(step, 0))
    return [replace(each, superseded_by=line.supersedes(each.run)) for each in steps]
