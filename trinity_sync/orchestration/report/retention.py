"""Preview retention policies with the planner that also removes, and predict a full disk."""

from collections.abc import Sequence
from dataclasses import replace

from trinity_sync.errors import ConfigError
from trinity_sync.orchestration.report.facts import PolicyEffect
from trinity_sync.retention.planner import Rules, plan_removals
from trinity_sync.retention.policies import All, StepInfo, parse_policy
from trinity_sync.storage.save_log import LoggedSave

EXAMPLES = ("all", "last=1", "last=3", "last=10", "hourly=24", "daily=7")
"""Policies that are compared with the one in force."""
DAY_S = 86400.0


def preview_policies(
    infos: Sequence[StepInfo], rules: Rules, now: float
) -> tuple[PolicyEffect, ...]:
    """Return what each policy for checkpoints would remove now, the one in force first."""
    in_force = str(rules.checkpoints)
    metrics = sorted({name for info in infos for name in info.metrics})
    names = [*EXAMPLES, *(f"last=1,best=2:{name}:max" for name in metrics[:1])]
    return tuple(
        _preview(infos, rules, policy, now, in_force=policy == in_force)
        for policy in dict.fromkeys([in_force, *names])
    )


def _preview(
    infos: Sequence[StepInfo], rules: Rules, policy: str, now: float, *, in_force: bool
) -> PolicyEffect:
    try:
        wanted = replace(rules, checkpoints=parse_policy(policy))
        plan = plan_removals(infos, wanted, now)
    except ConfigError as error:
        return PolicyEffect(policy, in_force, len(infos), (), 0, str(error))
    removed = tuple(info.step for info in plan.removed)
    return PolicyEffect(policy, in_force, len(plan.kept), removed, plan.nbytes)


def measure_growth(saves: Sequence[LoggedSave], rules: Rules) -> float | None:
    """Return the bytes that saves add to the disk in a day; None if it cannot be told.

    A policy that keeps all steps adds what is written; one with a limit adds nothing in the long
    run, and for other policies (such as one step an hour) it is not predicted. ``saves`` are in
    order of time.
    """
    if not isinstance(rules.checkpoints, All):
        limited = all(
            word.startswith(("last=", "best=")) for word in str(rules.checkpoints).split(",")
        )
        return 0.0 if limited else None
    kept = [
        each for each in saves if each.timing.kind == "checkpoint" or isinstance(rules.syncs, All)
    ]
    if len(kept) < 2:
        return None
    seconds = kept[-1].committed_at - kept[0].committed_at
    return sum(each.timing.nbytes for each in kept[1:]) / seconds * DAY_S if seconds > 0 else None
