"""Every removal of steps: the plan, from policies and from what keeps a step, and its driver.

The steps are those of one place, the job's root or a remote. Pins, tags, leases, latest pointers
and runs are in the root, and keep a step in every place. Places differ only in how they read and
remove a step.

The plan is computed from values alone, so it can be tested on any history. Each step is checked
again right before it is removed: it is as planned, nothing keeps it since, and the newest step of
each of its kinds is valid.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Protocol

from trinity_sync.errors import ConfigError, ManifestError, RemoteError, warn_once
from trinity_sync.fs.file_system import CLOCKS_DIFFER_S, read_file_system_time
from trinity_sync.layout import KINDS, Kind
from trinity_sync.retention.policies import ALL, Policy, StepInfo, parse_policy, refuse_metrics
from trinity_sync.snapshot.identity import read_identity
from trinity_sync.storage.discovery import read_latest_pointer
from trinity_sync.storage.job_settings import JobSettings
from trinity_sync.storage.manifest import Manifest, read_run_number
from trinity_sync.storage.runs import (
    find_newest_run,
    find_superseded_steps,
    list_runs,
    read_restart_time,
)
from trinity_sync.storage.steps_in_use import list_steps_in_use

logger = logging.getLogger(__name__)

JUST_COMMITTED = "its save, just committed, removes the others"
GONE = "it is gone"


@dataclass(frozen=True)
class Rules:
    """The policies of a job."""

    checkpoints: Policy
    """Policy for steps that a training can resume from."""
    syncs: Policy
    """Policy for steps with weights only, which the next sync supersedes."""
    quarantine: Policy = ALL
    """Policy for folders in quarantine, each of which counts as a step of the time when it was
    created, and for steps of both types that another training superseded, each as a step of the
    time when it did so. Their user may have forgotten to load them."""
    models: Policy | None = None
    """Policy for checkpoints of which only the weights stay, unless that for checkpoints keeps
    them; None reduces no step, and keeps those that are."""
    named: frozenset[int] = frozenset()
    """Steps that no policy keeps, since a user removes them by their numbers."""

    @classmethod
    def of_job(cls, job: JobSettings, **given: str) -> "Rules":
        """Return the policies of a job; the ``given`` ones, by setting, replace what is not empty.

        Raises:
            ConfigError: a policy is invalid.
        """
        refuse_metrics("keep_quarantine", given.get("keep_quarantine", ""))
        names = "keep", "keep_weights", "keep_quarantine", "keep_model"
        keep, weights, quarantine, models = (given.get(n) or getattr(job, n) for n in names)
        others = parse_policy(quarantine), parse_policy(models) if models else None
        return cls(parse_policy(keep), parse_policy(weights), *others)

    @classmethod
    def of_remote(cls, job: JobSettings, url: str) -> "Rules":
        """Return the policies for the copies at ``url``: all stay, unless it is the job's remote.

        A remote keeps whole steps: of an object store, none is rewritten for less.

        Raises:
            ConfigError: the policy of the job is invalid.
        """
        return cls(parse_policy(job.remote_keep if url.rstrip("/") == job.remote else "all"), ALL)


def read_now(root: Path, rules: Rules, clock: Callable[[], float] = time.time) -> float | str:
    """Return the time in seconds since the epoch; or, if a clock is wrong, why no age is known."""
    now, policies = clock(), (rules.checkpoints, rules.syncs, rules.quarantine, rules.models)
    if not any(each and each.goes_by_time for each in policies):
        return now
    apart = abs(now - read_file_system_time(root))
    if apart <= CLOCKS_DIFFER_S:
        return now
    why = (
        "no age is known: the clocks of this node and of the file system are "
        f"{apart / 60:.0f} min apart; correct the clock that is wrong"
    )
    warn_once(f"{root}: {why}")
    return why


@dataclass(frozen=True)
class RemovalPlan:
    """The steps to remove, and the others with reasons; carried out, what became of them."""

    kept: tuple[tuple[StepInfo, str], ...]
    """Steps and reasons, oldest first."""
    removed: tuple[StepInfo, ...]
    """Oldest first."""
    newest: dict[Kind, StepInfo]
    """Steps that must be valid before older steps are removed."""
    healthy: dict[Kind, StepInfo] = field(default_factory=dict)
    """Steps that must also be healthy before older healthy steps are removed."""
    spared: tuple[tuple[StepInfo, str], ...] = ()
    """Steps that were planned for removal and kept when the plan was carried out, with reasons."""
    quarantine: tuple[str, ...] = ()
    """Names of the folders in quarantine to remove, oldest first."""
    reduced: tuple[tuple[StepInfo, str], ...] = ()
    """Steps of which only the weights are to stay, and reasons, oldest first."""
    error: OSError | RemoteError | None = None
    """Why the first of those that could not be removed was not."""

    @property
    def nbytes(self) -> int:
        """Bytes that the plan frees, including those kept as spare files."""
        of_reduced = sum(each.resume_nbytes for each, _ in self.reduced)
        return of_reduced + sum(each.nbytes for each in self.removed)

    @property
    def changed(self) -> list[int]:
        """Numbers of the steps that are removed or reduced."""
        return [each.step for each in (*self.removed, *(step for step, _ in self.reduced))]

    def describe(self, *, dry_run: bool = False) -> list[tuple[StepInfo, str, str]]:
        """Return all steps, oldest first, with what becomes of each and why, in words."""
        would = "would be " if dry_run else ""
        found = [(each, "kept", why) for each, why in (*self.kept, *self.spared)]
        found += [(each, f"{would}reduced to weights", why) for each, why in self.reduced]
        found += [(each, f"{would}removed", "") for each in self.removed]
        return sorted(found, key=lambda each: each[0].age)


def make_step_info(
    manifest: Manifest,
    *,
    metrics: dict[str, float] | None = None,
    held: Sequence[str] = (),
    corruption: str = "",
) -> StepInfo:
    """Return the input of policies for the step of a manifest."""
    return StepInfo(
        manifest.step,
        manifest.run,
        manifest.kinds,
        manifest.committed_at,
        manifest.nbytes,
        manifest.nbytes - manifest.keep_weights().nbytes,
        manifest.is_reduced,
        metrics or {},
        tuple(held),
        corruption,
        manifest.nonfinite,
        checkpoint_run=manifest.checkpoint_run,
    )


def plan_removals(steps: Sequence[StepInfo], rules: Rules, now: float | str) -> RemovalPlan:
    """Return the steps to remove, and why the others are kept; ``now`` is that of `Policy.keeps`.

    These steps are kept whatever the policies say: the newest valid step of each kind, which a
    training resumes from and a reader loads, the newest without values that are not finite, steps
    in use, and corrupted steps.

    Raises:
        ConfigError: a policy by itself keeps no step of its type, or names an unknown metric.
    """
    steps = sorted(steps, key=lambda each: each.age)
    valid = [each for each in steps if not each.corruption]
    newest = {kind: each for each in valid for kind in each.kinds}
    healthy = {kind: each for each in valid if not each.nonfinite for kind in each.kinds}
    why: dict[int, list[str]] = defaultdict(list)
    for each in steps:
        why[each.step] += [f"newest {kind}" for kind in KINDS if newest.get(kind) is each]
        why[each.step] += [
            f"newest healthy {kind}: later ones have values that are not finite"
            for kind in KINDS
            if healthy.get(kind) is each is not newest.get(kind)
        ]
        why[each.step] += each.held
        if each.corruption:
            why[each.step].append(f"corrupted, so no policy applies: {each.corruption}")
    left_to_policies = [each for each in valid if each.step not in rules.named]
    forgotten = [
        replace(each, committed_at=each.forgotten_at, superseded_by=0)
        for each in left_to_policies
        if each.forgotten_at is not None
    ]
    for step, reason in rules.quarantine.keeps(forgotten, now).items():
        why[step].append(f"{reason} (steps superseded by a run that began at step 0)")
    ours = [each for each in left_to_policies if each.forgotten_at is None]
    checkpoints = [each for each in ours if "checkpoint" in each.kinds]
    syncs = [each for each in ours if "checkpoint" not in each.kinds and not each.is_reduced]
    for policy, candidates in ((rules.checkpoints, checkpoints), (rules.syncs, syncs)):
        keeps = policy.keeps(candidates, now)
        if not keeps and any(not why[e.step] and not e.superseded_by for e in candidates):
            raise ConfigError(
                f"retention policy {str(policy)!r} keeps none of its {len(candidates)} steps; "
                "nothing was removed. Add last=1 or more to it."
            )
        for step, reason in keeps.items():
            why[step].append(reason)
    reduced = dict[int, str]()
    models = {e.step: e for e in ours if e.is_reduced or (rules.models and "checkpoint" in e.kinds)}
    for step, reason in (rules.models or ALL).keeps([*models.values()], now).items():
        if not why[step] and models[step].resume_nbytes:  # of a reduced step: what a crash has left
            reduced[step] = f"weights: {reason}"
        elif not why[step]:
            what = "weights" if models[step].is_reduced else "no optimizer to remove alone"
            why[step].append(f"{what}: {reason}")
    rest = [each for each in steps if each.step not in reduced]
    return RemovalPlan(
        kept=tuple((each, "; ".join(why[each.step])) for each in rest if why[each.step]),
        removed=tuple(each for each in rest if not why[each.step]),
        newest=newest,
        healthy=healthy,
        reduced=tuple((each, reduced[each.step]) for each in steps if each.step in reduced),
    )


class Place(Protocol):
    """Where the steps of a job are: its root, or a remote."""

    @property
    def root(self) -> Path:
        """The job's root."""

    def __str__(self) -> str:
        """Return the path or URL, for messages."""

    def list_steps(self) -> Iterable[StepInfo]:
        """Return the committed steps, each with the place's own reasons; raises as `read_step`."""

    def read_step(self, step: int) -> StepInfo | None:
        """Return a step as it is now; None if it is gone.

        Raises:
            FormatError, ManifestError: its manifest is of another release, or torn.
        """

    def remove_step(self, step: StepInfo, find_reason: Callable[[], str], *, reduce: bool) -> str:
        """Remove a step, unless there is a reason to keep it; return that, empty if removed.

        With ``reduce``, its weights stay. ``find_reason`` is called once, when what may need the
        step is kept off, as far as the place can do that.
        """


def describe_steps(place: Place, *, just_committed: int | None = None) -> list[StepInfo]:
    """Return the steps of a place, oldest first, with all reasons to keep them.

    One of these is that a step was ``just_committed``, by the save that requests the removals.

    Raises:
        FormatError: another release has made the root, committed a step or begun a run.
    """
    root = place.root
    read_identity(root)  # which refuses a root of another release
    steps, held = list(place.list_steps()), list_held(root)
    if just_committed is not None:
        held[just_committed].append(JUST_COMMITTED)
    superseded = find_superseded_steps(steps, list_runs(root))
    read_restart = cache(partial(read_restart_time, root))
    found = []
    for each in steps:
        later = superseded.get(each.step)
        found.append(
            replace(
                each,
                held=(*held[each.step], *each.held),
                superseded_by=later.number if later else 0,
                forgotten_at=read_restart(each.run, later.number) if later else None,
            )
        )
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
    if run and not run.is_fresh_start and latest < run.number:
        held[run.resumed_from].append(f"run {run.number} resumed from it and has no checkpoint yet")
    return held


def carry_out(place: Place, plan: RemovalPlan) -> RemovalPlan:
    """Remove the steps of a plan, as far as it is still valid; return what became of them.

    Other removals, saves and readers may run meanwhile. A step that cannot be removed, e.g. as it
    is immutable, stops no other: they would fill the disk.

    Raises:
        CommitError, LockTimeoutError: as the place; earlier steps of the plan are removed.
    """
    failed: OSError | RemoteError | None = None
    removed: list[StepInfo] = []
    reduced: list[tuple[StepInfo, str]] = []
    spared: list[tuple[StepInfo, str]] = []
    for each, reason in (*((each, "") for each in plan.removed), *plan.reduced):
        find_reason = partial(_find_reason_to_keep, place, each, plan)
        try:
            why = place.remove_step(each, find_reason, reduce=bool(reason))
        except ManifestError as error:
            why = str(error)
        except (OSError, RemoteError) as error:
            why, failed = str(error), failed or error
        if why == GONE:
            continue
        if why:
            logger.info("keeping step %d in %s: %s", each.step, place, why)
            spared.append((each, why))
        elif reason:
            reduced.append((each, reason))
        else:
            removed.append(each)
    done = replace(plan, removed=tuple(removed), reduced=tuple(reduced), spared=tuple(spared))
    return replace(done, error=failed)


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
    needed = [(kind, plan.newest[kind], False) for kind in found.kinds]
    if not found.nonfinite:
        needed += [(kind, plan.healthy[kind], True) for kind in found.kinds]
    for kind, newest, is_healthy in needed:
        successor = place.read_step(newest.step)
        if successor is None or successor.corruption:
            why = successor.corruption if successor else GONE
            return f"the newer step {newest.step} is not valid: {why}"
        if is_healthy and successor.nonfinite:
            return f"the newer step {newest.step} has {successor.nonfinite}"
        if successor.age <= planned.age or kind not in successor.kinds:
            return f"step {newest.step} is no longer newer"
    return ""
