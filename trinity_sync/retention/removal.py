"""The driver of every removal: what a plan is made from, and how it is carried out.

The steps are those of one place, the job's root or a remote. Pins, tags, leases, latest pointers
and runs are in the root, and keep a step in every place. Places differ only in how they read and
remove a step.

Each step is checked again right before it is removed: it is as planned, nothing keeps it since,
and the newest step of each of its kinds is valid.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from trinity_sync.errors import ManifestError
from trinity_sync.layout import KINDS
from trinity_sync.retention.planner import RemovalPlan
from trinity_sync.retention.policies import StepInfo
from trinity_sync.snapshot.job_identity import read_identity
from trinity_sync.storage.latest_pointer import read_latest_pointer
from trinity_sync.storage.manifest import read_run_number
from trinity_sync.storage.pins import list_steps_in_use
from trinity_sync.storage.runs import build_lineage, find_newest_run, list_runs

logger = logging.getLogger(__name__)

JUST_COMMITTED = "its save, just committed, removes the others"
GONE = "it is gone"


class Place(Protocol):
    """Where the steps of a job are: its root, or a remote."""

    @property
    def root(self) -> Path:
        """The job's root."""

    def __str__(self) -> str:
        """Return the path or URL, for messages."""

    def list_steps(self) -> Iterable[StepInfo]:
        """Return the committed steps, each with the place's own reasons.

        Raises:
            FormatError: another release has committed a step.
        """

    def read_step(self, step: int) -> StepInfo | None:
        """Return a step as it is now; None if it is gone.

        Raises:
            FormatError, ManifestError: its manifest is of another release, or torn.
        """

    def remove_step(self, step: StepInfo, find_reason: Callable[[], str]) -> str:
        """Remove a step, unless there is a reason to keep it; return that, empty if removed.

        ``find_reason`` is called once, when what may need the step is kept off, as far as the place
        can do that.
        """


def describe_steps(place: Place, *, just_committed: int | None = None) -> list[StepInfo]:
    """Return the steps of a place, oldest first, with all reasons to keep them.

    The step ``just_committed``, whose save requests the removal of others, is kept.

    Raises:
        FormatError: another release has made the root, committed a step or begun a run.
    """
    root = place.root
    read_identity(root)  # which refuses a root of another release
    steps, held = list(place.list_steps()), list_held(root)
    if just_committed is not None:
        held[just_committed].append(JUST_COMMITTED)
    runs = {each.step: each.run for each in steps}
    lineage = build_lineage(
        list_runs(root), lambda step: read_run_number(root, step) or runs.get(step, 0)
    )
    found = [
        replace(
            each,
            held=(*held[each.step], *each.held),
            superseded_by=lineage.supersedes(each.run),
        )
        for each in steps
    ]
    return sorted(found, key=lambda each: each.age)


def list_held(root: Path) -> dict[int, list[str]]:
    """Return why steps must be kept in every place, whatever the policies say."""
    held = defaultdict(list, list_steps_in_use(root))
    pointers = {kind: read_latest_pointer(root, kind) for kind in KINDS}
    for kind, named in pointers.items():
        if named is not None:
            held[named].append(f"the latest pointer of {kind}s names it")
    run, pointed = find_newest_run(root), pointers["checkpoint"]
    latest = 0 if pointed is None else read_run_number(root, pointed)
    if run and run.resumed_from and latest < run.number:
        held[run.resumed_from].append(f"run {run.number} resumed from it and has no checkpoint yet")
    return held


def carry_out(place: Place, plan: RemovalPlan) -> RemovalPlan:
    """Remove the steps of a plan, as far as it is still valid; return what became of them.

    Other removals, saves and readers may run meanwhile.

    Raises:
        OSError, CommitError, LockTimeoutError, RemoteError: as the place; earlier steps of the plan
            are removed.
    """
    removed: list[StepInfo] = []
    spared: list[tuple[StepInfo, str]] = []
    for each in plan.removed:
        try:
            why = place.remove_step(each, partial(_find_reason_to_keep, place, each, plan))
        except ManifestError as error:
            why = str(error)
        if why == GONE:
            continue
        if why:
            logger.info("keeping step %d in %s: %s", each.step, place, why)
            spared.append((each, why))
        else:
            removed.append(each)
    return replace(plan, removed=tuple(removed), spared=tuple(spared))


def _find_reason_to_keep(place: Place, planned: StepInfo, plan: RemovalPlan) -> str:
    found = place.read_step(planned.step)
    if found is None:
        return GONE
    if (found.run, found.kinds, found.committed_at) != (
        planned.run,
        planned.kinds,
        planned.committed_at,
    ):
        return "it was committed again meanwhile"
    held = list_held(place.root)[planned.step]
    if reasons := [*held, *found.held]:
        return "; ".join(reasons)
    for kind in found.kinds:
        newest = plan.newest[kind]
        successor = place.read_step(newest.step)
        if successor is None or successor.corruption:
            why = successor.corruption if successor else GONE
            return f"the newer step {newest.step} is not valid: {why}"
        if successor.age <= planned.age or kind not in successor.kinds:
            return f"step {newest.step} is no longer newer"
    return ""
