"""Judge a job: is it saved now, what failed and what to type. Pure functions of what was read."""

import re
import shlex
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from statistics import median

from trinity_sync.layout import Kind
from trinity_sync.orchestration.quantities import format_duration
from trinity_sync.orchestration.report.facts import Failure, FailureGroup, Health, InFlight, StepRow
from trinity_sync.storage.save_timing import LoggedSave

LATE_FACTOR = 3.0
"""Late is a job without a commit for this many of its usual intervals."""
LATE_MIN_S = 60.0
RECENT = 20
"""Saves whose median interval is the usual one."""

Committed = Set[tuple[int, int, Kind]]
"""Run, step and kind of saves that are committed, and what follows their commit has not failed."""
Lacking = Mapping[tuple[int | None, int], Sequence[str]]
"""Roles whose model was not exported, by run and step."""


def judge_health(
    saves: Sequence[LoggedSave],
    steps: Sequence[StepRow],
    failures: Sequence[FailureGroup],
    in_flight: Sequence[InFlight],
    now: float,
    *,
    is_running: bool | None = True,
    retention: Sequence[str] = (),
) -> Health:
    """Return whether a job is saved now, measured by its own interval, if its training runs.

    ``saves`` are the committed ones, in order of time; ``is_running`` is None if it is not known.
    ``retention`` is what is wrong with it.
    """
    corrupted = [row for row in steps if row.status == "corrupted"]
    problems = [*retention, *(f"step {row.step} is corrupted: {row.reason}" for row in corrupted)]
    last = max(saves, key=lambda each: each.committed_at, default=None)
    loadable = [row for row in steps if row.is_loadable and row.committed_at]
    if last is None and not loadable:
        failed = [each for each in failures if each.is_open]
        if failed:
            text = f"nothing is committed, and {_count_saves(failed)} failed: {failed[0].message}"
            return Health("failed", text, None, tuple(problems))
        return Health("empty", "nothing is committed", None, tuple(problems))
    newest = max(loadable, key=lambda row: row.committed_at or 0.0, default=None)
    problems += [f"step {newest.step}: {alarm}" for alarm in newest.alarms] if newest else []
    if last is not None:
        step, committed_at = last.step, last.committed_at
    else:
        assert newest
        step, committed_at = newest.step, newest.committed_at or 0.0
    interval = measure_interval(saves)
    age = max(now - committed_at, 0.0)
    what = f"step {step} committed {format_duration(age)} ago"
    if newest is None:
        return Health("failed", f"{what}; no step is left to load", interval, tuple(problems))
    if newest.step != step and (newest.committed_at or 0.0) < committed_at:
        what += f"; the newest that is left to load is step {newest.step}"
    usual = f"a save every {format_duration(interval)}" if interval else ""
    since = [each for each in failures if each.is_open and each.last_at > committed_at]
    if since:
        text = f"{_count_saves(since)} failed since {what}: {since[0].message}"
        return Health("failed", text, interval, tuple(problems))
    if is_running is False and not in_flight:
        return Health("ok", f"{what}; no training runs", interval, tuple(problems))
    if interval and age > max(LATE_FACTOR * interval, LATE_MIN_S):
        idle = "" if in_flight else "; no save is in flight"
        idle += "; this user cannot see whether a training runs" * (is_running is None)
        text = f"nothing committed for {format_duration(age)}, usually {usual}; {what}{idle}"
        return Health("late", text, interval, tuple(problems))
    return Health("ok", ", ".join(filter(None, (what, usual))), interval, tuple(problems))


def measure_interval(saves: Sequence[LoggedSave]) -> float | None:
    """Return the median seconds between recent commits of a run; None for fewer than three.

    ``saves`` are in order of time.
    """
    recent = [each for each in saves if each.run == saves[-1].run][-RECENT:] if saves else []
    times = sorted({each.committed_at for each in recent})
    if len(times) < 3:
        return None
    return median(after - before for before, after in pairwise(times))


def group_failures(
    root: str, failures: Sequence[Failure], steps: Sequence[StepRow], committed: Committed
) -> tuple[FailureGroup, ...]:
    """Return the failures by cause, those with something to do first, then the newest first."""
    groups: dict[tuple[str, str], list[Failure]] = {}
    for each in failures:
        groups.setdefault((each.cause, _normalize(each.message)), []).append(each)
    lacking = {(row.run, row.step): row.failed_exports for row in steps if row.failed_exports}
    found = [_describe(root, group, committed, lacking) for group in groups.values()]
    if corrupted := [row for row in steps if row.status == "corrupted"]:
        found.append(_describe_corrupted(root, corrupted))
    return tuple(sorted(found, key=lambda group: (not group.is_open, -group.last_at)))


def _describe(
    root: str, failures: Sequence[Failure], committed: Committed, lacking: Lacking
) -> FailureGroup:
    ordered = sorted(failures, key=lambda each: each.at)
    newest, saves = ordered[-1], [(each, each.save) for each in ordered if each.save]
    unsaved = [(each, save) for each, save in saves if save not in committed]
    target, save = (unsaved or saves)[-1] if saves else (None, None)
    roles = lacking.get(save[:2], ()) if save else ()
    remedy, command = _find_remedy(root, newest, target, bool(unsaved), roles)
    return FailureGroup(
        cause=newest.cause,
        message=newest.message,
        count=len(failures),
        steps=tuple(sorted({step for _, (_, step, _) in saves})),
        saved_since=len(saves) - len(unsaved),
        first_at=ordered[0].at,
        last_at=newest.at,
        remedy=remedy,
        command=command,
        url=newest.url or "",
    )


def _find_remedy(
    root: str, newest: Failure, target: Failure | None, is_open: bool, not_exported: Sequence[str]
) -> tuple[str, str]:
    """Return what to do about a group, and the command."""
    quoted, state = shlex.quote(root), newest.cause
    if state == "Superseded":
        return "Nothing: a later run of the job went on from an earlier step.", ""
    if state == "Evicted":
        return "Lost. Find out why saves are slow or were not taken.", "trinity-sync status"
    if target is None or target.save is None:
        what = newest.name.rpartition(": ")[2].partition("-")[0] or "flow run"
        return f"Open the page of the {what} run; its log says more.", "trinity-sync doctor"
    if not is_open:
        return "Nothing: committed since.", ""
    step = target.save[1]
    if not_exported:
        return (
            "Committed, but not exported. Remove the cause, then export it.",
            f"trinity-sync export hf {quoted} {step} --role {not_exported[0]}",
        )
    if not target.retry:
        return "Remove the cause. Later saves are unaffected.", f"trinity-sync doctor {quoted}"
    if state == "Cancelled":
        return "Cancelled by a user. Retry it, or cancel no saves.", target.retry
    if state == "Crashed":
        return (
            "Its worker or node died; a worker retries it. Is one running?",
            "trinity-sync status",
        )
    return "Remove the cause, then retry while its images are in memory.", target.retry


def _describe_corrupted(root: str, rows: Sequence[StepRow]) -> FailureGroup:
    newest = max(rows, key=lambda row: (row.run or 0, row.step))
    times = [row.committed_at or 0.0 for row in rows]
    return FailureGroup(
        cause="Corrupted",
        message=newest.reason,
        count=len(rows),
        steps=tuple(row.step for row in rows),
        saved_since=0,
        first_at=min(times),
        last_at=max(times),
        remedy="Restore the files from a copy and verify the step again, or remove it.",
        command=f"trinity-sync verify {shlex.quote(root)} {newest.step}",
        url="",
    )


def _count_saves(groups: Sequence[FailureGroup]) -> str:
    count = sum(group.count - group.saved_since for group in groups)
    return f"{count} save{'s' * (count != 1)}"


def _normalize(message: str) -> str:
    """Return a message without what differs between saves that fail for the same reason."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", message)
