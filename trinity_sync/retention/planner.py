"""Removal plan: which steps of a root may be removed, and why the others are kept.

A plan is computed from values alone, so it can be tested on any history; `prune` reads the values
from a root and carries the plan out.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trinity_sync.errors import ConfigError
from trinity_sync.layout import KINDS, Kind
from trinity_sync.retention.policies import ALL, Policy, StepInfo, parse_policy
from trinity_sync.storage.job_settings import JobSettings
from trinity_sync.storage.manifest import Manifest


@dataclass(frozen=True)
class Rules:
    """The policies of a job."""

    checkpoints: Policy
    """Policy for steps that a training can resume from."""
    syncs: Policy
    """Policy for steps with weights only, which the next sync supersedes."""
    quarantine: Policy = ALL
    """Policy for folders in quarantine, each of which counts as a step of the time when it was
    created, and for steps of both types that a run which began at step 0 superseded. Its user may
    have forgotten to load them, so they do not count among the others."""

    @classmethod
    def of_job(
        cls, job: JobSettings, *, keep: str = "", keep_weights: str = "", keep_quarantine: str = ""
    ) -> "Rules":
        """Return the policies of a job; the short forms that are not empty replace them.

        Raises:
            ConfigError: a policy is invalid.
        """
        return cls(
            parse_policy(keep or job.keep),
            parse_policy(keep_weights or job.keep_weights),
            parse_policy(keep_quarantine or job.keep_quarantine),
        )

    @classmethod
    def of_remote(cls, job: JobSettings, url: str) -> "Rules":
        """Return the policies for the copies at ``url``: all stay, unless it is the job's remote.

        Raises:
            ConfigError: the policy of the job is invalid.
        """
        return cls(parse_policy(job.remote_keep if url.rstrip("/") == job.remote else "all"), ALL)


@dataclass(frozen=True)
class RemovalPlan:
    """The steps to remove, and the others with reasons; carried out, what became of them."""

    kept: tuple[tuple[StepInfo, str], ...]
    """Steps and reasons, oldest first."""
    removed: tuple[StepInfo, ...]
    """Oldest first."""
    newest: dict[Kind, StepInfo]
    """Steps that must be valid before older steps are removed."""
    spared: tuple[tuple[StepInfo, str], ...] = ()
    """Steps that were planned for removal and kept when the plan was carried out, with reasons."""
    quarantine: tuple[str, ...] = ()
    """Names of the folders in quarantine to remove, oldest first."""

    @property
    def nbytes(self) -> int:
        """Bytes that the plan frees, including those kept as spare files."""
        return sum(each.nbytes for each in self.removed)

    @property
    def steps(self) -> list[tuple[StepInfo, str]]:
        """All steps, oldest first, and why each is kept; empty for a removed step."""
        removed = [(each, "") for each in self.removed]
        return sorted([*self.kept, *self.spared, *removed], key=lambda each: each[0].age)


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
        metrics or {},
        tuple(held),
        corruption,
    )


def plan_removals(steps: Sequence[StepInfo], rules: Rules, now: float) -> RemovalPlan:
    """Return the steps to remove, and why the others are kept; ``now`` is seconds since the epoch.

    These steps are kept whatever the policies say: the newest valid step of each kind, which a
    training resumes from and a reader loads, steps in use, and corrupted steps.

    Raises:
        ConfigError: a policy by itself keeps no step of its type, or names an unknown metric.
    """
    steps = sorted(steps, key=lambda each: each.age)
    valid = [each for each in steps if not each.corruption]
    newest = {kind: each for each in valid for kind in each.kinds}
    why: dict[int, list[str]] = defaultdict(list)
    for each in steps:
        why[each.step] += [f"newest {kind}" for kind in KINDS if newest.get(kind) is each]
        why[each.step] += each.held
        if each.corruption:
            why[each.step].append(f"corrupted, so no policy applies: {each.corruption}")
    for step, reason in rules.quarantine.keeps([s for s in valid if s.superseded_by], now).items():
        why[step].append(f"{reason} (steps superseded by a run that began at step 0)")
    ours = [each for each in valid if not each.superseded_by]
    checkpoints = [each for each in ours if "checkpoint" in each.kinds]
    syncs = [each for each in ours if "checkpoint" not in each.kinds]
    for policy, candidates in ((rules.checkpoints, checkpoints), (rules.syncs, syncs)):
        keeps = policy.keeps(candidates, now)
        if not keeps and any(not why[each.step] for each in candidates):
            raise ConfigError(
                f"retention policy {str(policy)!r} keeps none of its {len(candidates)} steps; "
                "nothing was removed. Add last=1 or more to it."
            )
        for step, reason in keeps.items():
            why[step].append(reason)
    return RemovalPlan(
        kept=tuple((each, "; ".join(why[each.step])) for each in steps if why[each.step]),
        removed=tuple(each for each in steps if not why[each.step]),
        newest=newest,
    )
