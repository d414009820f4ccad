"""Whether a job is healthy, why saves failed and what to type."""

from dataclasses import replace

import pytest

from trinity_sync.orchestration.report.facts import Failure, InFlight, StepRow
from trinity_sync.orchestration.report.health import group_failures, judge_health, measure_interval
from trinity_sync.storage.save_timing import LoggedSave, SaveTiming

NOW = 1.7e9


def saved(step: int, at: float, run: int = 1) -> LoggedSave:
    timing = SaveTiming("checkpoint", ("actor",), (), at, 0.0, 1.0, 0.0, 100, 1, 1)
    return LoggedSave(run, step, at, timing)


def row_of(step: int, status: str, reason: str = "", at: float = NOW) -> StepRow:
    return StepRow(step, status, reason, 1, ("checkpoint",), nbytes=9, committed_at=at)


EVERY_100_S = [saved(step, NOW - 10 * (100 - step)) for step in range(10, 101, 10)]
STEPS = [row_of(100, "valid")]


def ended(step: int, name: str, message: str, at: float = NOW) -> Failure:
    retry = f"trinity-sync retry /ckpts {step}"
    return Failure(name, message, at, "http://its/page", (1, step, "checkpoint"), retry=retry)


def test_a_job_is_late_by_its_own_interval_without_the_time_between_two_runs() -> None:
    assert measure_interval(EVERY_100_S) == pytest.approx(100)
    in_time = judge_health(EVERY_100_S, STEPS, [], [], NOW + 250)
    assert (in_time.status, in_time.sentence) == (
        "ok",
        "step 100 committed 4 min ago, a save every 2 min",
    )
    late = judge_health(EVERY_100_S, STEPS, [], [], NOW + 840)
    assert late.status == "late"
    assert "nothing committed for 14 min" in late.sentence
    assert "no save is in flight" in late.sentence
    ended = judge_health(EVERY_100_S, STEPS, [], [], NOW + 840, is_running=False)
    assert (ended.status, ended.sentence) == (
        "ok",
        "step 100 committed 14 min ago; no training runs",
    )
    unknown = judge_health(EVERY_100_S, STEPS, [], [], NOW + 840, is_running=None)
    assert unknown.sentence.endswith("cannot see whether a training runs")
    submitted = InFlight(110, "checkpoint", "writing", NOW, 1, "")
    assert "in flight" not in judge_health(EVERY_100_S, STEPS, [], [submitted], NOW + 840).sentence
    resumed = [*EVERY_100_S, *(saved(100 + n, NOW + 9e4 + n, run=2) for n in range(3))]
    assert measure_interval(resumed) == pytest.approx(1)
    assert measure_interval(EVERY_100_S[:2]) is None


def test_a_failure_since_the_last_commit_makes_a_job_failed_unless_it_was_superseded() -> None:
    failures = group_failures("/ckpts", [ended(110, "Failed", "disk full", NOW + 5)], [], set())
    health = judge_health(EVERY_100_S, STEPS, failures, [], NOW + 10)
    assert (health.status, health.sentence) == (
        "failed",
        "1 save failed since step 100 committed 10 s ago: disk full",
    )
    recovered = [*EVERY_100_S, saved(120, NOW + 8)]
    assert judge_health(recovered, STEPS, failures, [], NOW + 10).status == "ok"
    failures = group_failures("/ckpts", [ended(110, "Superseded", "", NOW + 5)], [], set())
    assert not failures[0].is_open
    assert judge_health(EVERY_100_S, STEPS, failures, [], NOW + 10).status == "ok"


def test_a_model_that_was_not_exported_is_open_until_it_is_although_its_step_is_committed() -> None:
    row, run = row_of(100, "valid"), ended(100, "Failed", "no config", NOW + 5)
    (group,) = group_failures("/ckpts", [run], [replace(row, failed_exports=("critic",))], set())
    assert (group.is_open, group.command) == (
        True,
        "trinity-sync export hf /ckpts 100 --role critic",
    )
    (group,) = group_failures("/ckpts", [run], [row], {(1, 100, "checkpoint")})
    assert (group.is_open, group.remedy) == (False, "Nothing: committed since.")


def test_a_corrupted_step_is_a_problem_with_a_command_and_it_says_what_is_left_to_load() -> None:
    row = row_of(40, "corrupted", "model has other bytes")
    (group,) = group_failures("/my ckpts", [], [row], set())
    assert group.command == "trinity-sync verify '/my ckpts' 40"
    health = judge_health(EVERY_100_S, [row, *STEPS], [group], [], NOW)
    assert (health.status, health.problems) == (
        "ok",
        ("step 40 is corrupted: model has other bytes",),
    )
    left = [row_of(90, "valid", at=NOW - 100), row_of(100, "corrupted")]
    health = judge_health(EVERY_100_S, left, [], [], NOW + 10, is_running=False)
    assert health.sentence == (
        "step 100 committed 10 s ago; the newest that is left to load is step 90; no training runs"
    )
    for none in ([], left[1:]):
        health = judge_health(EVERY_100_S, none, [], [], NOW + 10, is_running=False)
        assert (health.status, health.sentence) == (
            "failed",
            "step 100 committed 10 s ago; no step is left to load",
        )


def test_failures_are_grouped_by_cause_and_those_that_were_retried_are_done() -> None:
    runs = [
        ended(10, "Failed", "step 10 is not committed: disk full"),
        ended(20, "Failed", "step 20 is not committed: disk full", NOW + 1),
        ended(30, "Failed", "no rank 1 within 60 s", NOW + 2),
        ended(40, "Evicted", "gone", NOW + 3),
        ended(50, "Crashed", "no heartbeat", NOW + 4),
    ]
    committed = {(1, 20, "checkpoint"), (1, 30, "checkpoint")}
    groups = group_failures("/ckpts", runs, [], committed)  # type: ignore[arg-type]
    by_step = {group.steps: group for group in groups}
    full = by_step[10, 20]
    assert (full.count, full.saved_since, full.first_at, full.last_at) == (2, 1, NOW, NOW + 1)
    assert full.message == "step 20 is not committed: disk full"
    assert full.command == "trinity-sync retry /ckpts 10"
    assert not by_step[(30,)].is_open
    assert by_step[(40,)].command == by_step[(50,)].command == "trinity-sync status"
    assert [group.is_open for group in groups] == [True, True, True, False]
