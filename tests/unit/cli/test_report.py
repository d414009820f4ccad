"""The report of a job: one page, complete in itself, that a browser shows; and the same as JSON."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import environment
from tests.support.job import Job
from tests.support.leases import acquire_lease
from trinity_sync.cli.output import to_json
from trinity_sync.cli.report import render_report
from trinity_sync.orchestration.report.collect import collect_report
from trinity_sync.orchestration.report.facts import FailureGroup, InFlight, JobReport, StepRow
from trinity_sync.settings import Settings
from trinity_sync.storage.job_settings import write_job_settings
from trinity_sync.storage.metrics import write_metrics
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import Run, add_run, hold_run
from trinity_sync.storage.steps_in_use import pin
from trinity_sync.weights.state_files import (
    SynchronizerState,
    read_state,
    read_sync_report,
    write_state,
)
from trinity_sync.weights.versions import Version, VersionRegistry


@pytest.fixture
def facts(job: Job, tmp_path: Path) -> Iterator[JobReport]:
    """A job with a step of each sort, seen while one of them is read."""
    for step in (10, 20, 30, 40):
        job.commit_states(step, {"model": {"w": torch.zeros(9)}})
        write_metrics(job.root, 1, step, {"reward": step / 7, "odd <name>": float("nan")})
    rewind(job.root, 30)
    job.commit_states(35, {"model": {"w": torch.zeros(9)}}, run=3, kind="state_dict")
    job.stage(36, {"model": {"w": torch.zeros(9)}}, run=3)
    (job.root / "global_step_20/actor/model_world_size_1_rank_0.pt").unlink()
    (job.root / "global_step_50").mkdir()
    pin(job.root, 10, "the <b>paper</b>'s")
    registry = VersionRegistry()
    registry.record(Version(35, 3, "checkpoint", str(job.root)), now=1.7e9)
    registry.set_serving("explorer-1", 30, now=1.7e9, run=1)
    (job.root / ".trinity_sync/weights").mkdir()
    write_state(job.root, SynchronizerState("job", registry.state, written_at=1.7e9))
    spool = job.spool.folder.parent
    with environment({}), acquire_lease(job.root, 30, "reader 7"):
        yield collect_report(Settings(home=tmp_path, spool=spool), job.root)


def with_failures(facts: JobReport) -> JobReport:
    """As if a Prefect server had answered; the integration tests query a real one."""
    command, url = "trinity-sync retry /ckpts 34", "http://p/runs/1"
    what = ("Failed", "no rank 1", 2, (33, 34), 0, 1.7e9, 1.7e9, "Retry it.")
    group = FailureGroup(*what, command, url)
    evil = replace(group, cause="Superseded", message="<script>", command="", url="javascript:x")
    return replace(facts, failures=(group, evil), server_error="")


def text_of(page: str) -> str:
    """What a reader sees, row by row."""
    without = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    dense = re.sub(r">\s+<", "><", without)  # as a browser ignores it
    return html.unescape(re.sub(r"<[^>]+>", "|", dense.replace("</tr>", "\n")))


def table_of(page: str, name: str) -> dict[str, str]:
    """Rows of a table by their first cell."""
    table = re.search(rf"<table id='{name}'>.*?</table>", page, flags=re.S)
    assert table, name
    rows = [re.sub(r"\|+", "|", row).strip("|") for row in text_of(table[0]).splitlines()]
    return {row.partition("|")[0]: row for row in rows if row}


def test_the_page_has_status_saves_in_flight_and_each_step_with_its_state(facts: JobReport) -> None:
    page = render_report(facts)
    rows = table_of(page, "steps")
    for step, words in {
        "10": ("1", "checkpoint", "valid"),
        "20": ("corrupted",),
        "30": ("valid", "latest checkpoint"),
        "35": ("3", "state_dict", "latest state_dict"),
        "50": ("not committed",),
    }.items():
        assert all(word in rows[step] for word in words), rows[step]
    assert "global_step_40" in text_of(page)  # in quarantine
    assert "reward 4.286, odd <name> nan" in rows["30"].replace("|", "")
    assert "policy for checkpoints: |all|" in text_of(page)
    (save,) = facts.in_flight
    assert (save.step, save.kind, save.images) == (36, "checkpoint", 1)
    assert "in memory" in save.phase
    assert table_of(page, "in-flight")["36"]
    assert facts.health.status == "ok"
    assert any("step 20 is corrupted" in problem for problem in facts.health.problems)
    order = ("|OK|", "|In flight|", "|Failures|", "Steps on disk")
    places = [text_of(page).index(heading) for heading in order]
    assert places == sorted(places)


def test_failures_say_what_to_type_and_nothing_is_taken_for_markup(facts: JobReport) -> None:
    page = render_report(with_failures(facts))
    failed = table_of(page, "failures")["Failed"]
    assert "trinity-sync retry /ckpts 34" in failed
    assert "33, 34" in failed
    assert "href='http://p/runs/1'" in page
    assert "the <b>paper</b>'s" in table_of(page, "uses")["10"]
    assert not re.search("<b>paper|<script>|href='javascript", page)
    assert any(use.name.startswith("reader 7") for use in facts.uses)
    (reader,) = [use for use in facts.uses if use.kind == "reader"]
    assert (reader.name, reader.step, reader.behind) == ("explorer-1", 30, 5)


def test_what_an_ended_synchronizer_knew_holds_for_its_last_change(facts: JobReport) -> None:
    state = read_state(facts.root)
    write_state(facts.root, replace(state, written_at=1.7e9 + 90))
    found = read_sync_report(facts.root, 1.8e9)
    assert (found.version, found.run, found.running, found.as_of) == (35, 3, False, 1.7e9 + 90)
    assert [reader.stale_s for reader in found.readers] == [90]


def test_of_many_steps_the_newest_are_listed(facts: JobReport) -> None:
    steps = tuple(
        StepRow(step, "valid", "", 1, ("checkpoint",), nbytes=9, committed_at=1.7e9 + step)
        for step in range(2000)
    )
    page = render_report(replace(facts, steps=steps))
    assert len(table_of(page, "steps")) == 21
    assert "480 older steps" in page
    assert "1500 still older steps" in page


def test_retention_that_fails_is_a_problem(job: Job, settings: Settings) -> None:
    for step in range(1, 8):
        job.commit_states(step, {"model": {"w": torch.full((9,), float(step))}})
    found = {"last=3": [], "last=2": ["5 steps", "1 to 5"], "last=1,best=1:up": ["up"]}
    for keep, words in found.items():
        write_job_settings(job.root, {"keep": keep})
        with environment({}):
            problems = " ".join(collect_report(settings, job.root).health.problems)
        assert bool(problems) == bool(words), problems
        assert all(word in problems for word in words), problems


def test_it_says_that_no_training_runs(job: Job, settings: Settings) -> None:
    job.commit_states(4, {"model": {"w": torch.zeros(9)}})
    add_run(job.root, Run(1, "one", 0))
    with environment({}):
        assert "no training runs" in collect_report(settings, job.root).health.sentence
        with hold_run(job.root, 1):
            assert "no training runs" not in collect_report(settings, job.root).health.sentence


def test_a_time_that_is_unknown_is_null_in_json(facts: JobReport) -> None:
    (save,) = facts.in_flight
    unknown = replace(with_failures(facts), in_flight=(replace(save, since=0.0),), verified_at=1e15)
    found = to_json(unknown)
    assert (found["in_flight"][0]["since"], found["verified_at"]) == (None, None)
    assert json.dumps(found, allow_nan=False)  # metrics too


def test_a_browser_shows_it_and_loads_nothing_else(facts: JobReport, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium here: apt-get install chromium")
    page = tmp_path / "report.html"
    in_flight = InFlight(60, "checkpoint", "writing", facts.created_at, 1, "", "")
    page.write_text(render_report(replace(with_failures(facts), in_flight=(in_flight,))))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{page}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert "global_step_40" in shown.stdout, shown.stderr
    assert not re.search(r"\bsrc=|@import|url\(|<link|<script", shown.stdout)
