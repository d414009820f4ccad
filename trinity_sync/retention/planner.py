"""Plan which steps go and why the others stay, from policies and values.

Nothing on disk is looked at and nothing is touched, so a plan can be tried on any history; `prune`
makes the values from a root and carries a plan out.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trinity_sync.errors import ConfigError
from trinity_sync.layout import KINDS, Kind
from trinity_sync.retention.policies import All, Policy, StepInfo
from trinity_sync.storage.manifest import Manifest


@dataclass(frozen=True)
class Rules:
    """The policies of the two sorts of steps."""

    checkpoints: Policy
    """For steps that a training can resume from."""
    syncs: Policy
    """For steps that hold weights only, which the next one supersedes."""
    superseded: Policy = field(default_factory=All)
    """For steps of both sorts that a run which began at step 0 did not go on from: whoever started
    it may have forgotten to load, so they do not count among the others."""
    quarantine: Policy = field(default_factory=All)
    """For folders in quarantine; each counts as a step of the time when it was made."""


@dataclass(frozen=True)
class RemovalPlan:
    """What would be removed, and why the rest stays."""

    kept: tuple[tuple[StepInfo, str], ...]
    """Steps and reasons, oldest first."""
    removed: tuple[StepInfo, ...]
    """Oldest first."""
    newest: dict[Kind, StepInfo]
    """What has to be valid before anything older goes."""

    @property
    def nbytes(self) -> int:
        """Bytes that carrying it out frees."""
        return sum(each.nbytes for each in self.removed)


@dataclass
class Removal:
    """What came of a plan."""

    removed: list[StepInfo] = field(default_factory=list)
    spared: list[tuple[StepInfo, str]] = field(default_factory=list)
    """Steps that are in use after all, with the reason."""

    @property
    def nbytes(self) -> int:
        """Bytes that it freed, those of spare files included."""
        return sum(each.nbytes for each in self.removed)


@dataclass(frozen=True)
class StepOutcome:
    """What becomes of a step."""

    step: StepInfo
    state: Literal["kept", "removed", "would be removed"]
    why: str = ""
    """Why it is kept."""


def list_outcomes(plan: RemovalPlan, removal: Removal | None) -> list[StepOutcome]:
    """Return what becomes of every step, oldest first.

    Args:
        plan: of a root.
        removal: what came of it; None if it was not carried out.
    """
    found = [StepOutcome(each, "kept", why) for each, why in plan.kept]
    if removal is None:
        found += [StepOutcome(each, "would be removed") for each in plan.removed]
    else:
        found += [StepOutcome(each, "removed") for each in removal.removed]
        found += [StepOutcome(each, "kept", why) for each, why in removal.spared]
    return sorted(found, key=lambda each: each.step.age)


def describe_step(
    manifest: Manifest,
    *,
    metrics: dict[str, float] | None = None,
    held: Sequence[str] = (),
    corruption: str = "",
    superseded_by: int = 0,
) -> StepInfo:
    """Return what policies know of the step of a manifest.

    Args:
        manifest: of the step.
        metrics: values by name.
        held: why nobody may remove it, in words.
        corruption: what is wrong with its files; empty for a valid step.
        superseded_by: number of the run that superseded it; 0 for none.
    """
    return StepInfo(
        manifest.step,
        manifest.run,
        manifest.kinds,
        manifest.committed_at,
        manifest.nbytes,
        metrics or {},
        tuple(held),
        corruption,
        superseded_by,
    )


def plan_removals(steps: Sequence[StepInfo], rules: Rules, now: float) -> RemovalPlan:
    """Return which steps may go, and why the others stay.

    Whatever the policies say, these stay: the newest valid step of each kind, which is what a
    training resumes from and a reader loads, what is in use, and what is corrupted.

    Args:
        steps: of a root, as `prune.survey` returns them.
        rules: what to keep in addition.
        now: seconds since the epoch.

    Raises:
        ConfigError: a policy keeps none of several steps by itself, or names an unknown metric.
    """
    steps = sorted(steps, key=lambda each: each.age)
    valid = [each for each in steps if not each.corruption]
    newest = {kind: each for each in valid for kind in each.kinds}
    why: dict[int, list[str]] = defaultdict(list)
    for each in steps:
        why[each.step] += [f"newest {kind}" for kind in KINDS if newest.get(kind) is each]
        why[each.step] += each.held
        if each.corruption:
            why[each.step].append(f"not judged: {each.corruption}")
    for step, reason in rules.superseded.keeps([s for s in valid if s.superseded_by], now).items():
        why[step].append(f"{reason} that a run which began at step 0 did not go on from")
    ours = [each for each in valid if not each.superseded_by]
    checkpoints = [each for each in ours if "checkpoint" in each.kinds]
    syncs = [each for each in ours if "checkpoint" not in each.kinds]
    for policy, sort in ((rules.checkpoints, checkpoints), (rules.syncs, syncs)):
        keeps = policy.keeps(sort, now)
        if not keeps and any(not why[each.step] for each in sort):
            raise ConfigError(
                f"retention policy {str(policy)!r} keeps none of the {len(sort)} steps that it is "
                "for; nothing was removed. Add last=1 or more to it."
            )
        for step, reason in keeps.items():
            why[step].append(reason)
    return RemovalPlan(
        kept=tuple((each, "; ".join(why[each.step])) for each in steps if why[each.step]),
        removed=tuple(each for each in steps if not why[each.step]),
        newest=newest,
    )
