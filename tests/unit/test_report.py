"""The report of a job: one page, whole in itself, that a browser shows."""

import html
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import environment
from tests.unit.job import Job
from trinity_sync.cli.report_html import render_report
from trinity_sync.orchestration.prefect_queries import FlowRunSummary
from trinity_sync.orchestration.report import JobReport, collect_report
from trinity_sync.settings import Settings
from trinity_sync.storage.leases import acquire_lease
from trinity_sync.storage.pins import pin
from trinity_sync.storage.rewind import rewind
from trinity_sync.weights.registry.versions import VersionRegistry
from trinity_sync.weights.state_files import write_state


@pytest.fixture
def facts(job: Job, tmp_path: Path) -> Iterator[JobReport]:
    """A job with a step of each sort, seen while one of them is read."""
    for step in (10, 20, 30, 40):
        job.stage(step, {"model": {"w": torch.zeros(9)}})
        job.commit(step)
    rewind(job.root, 30)
    job.stage(35, {"model": {"w": torch.zeros(9)}}, run=3, kind="state_dict")
    job.commit(35, run=3, kind="state_dict")
    (job.root / "global_step_20/actor/model_world_size_1_rank_0.pt").unlink()
    (job.root / "global_step_50").mkdir()
    pin(job.root, 10, "the <b>paper</b>'s")
    registry = VersionRegistry()
    registry.set_serving("explorer-1", 30, now=1.7e9, run=1)
    (job.root / ".trinity_sync/weights").mkdir()
    write_state(job.root, {"registry": registry.to_json()})
    with environment({}), acquire_lease(job.root, 30, "reader 7"):
        yield collect_report(Settings(home=tmp_path), job.root)


def with_runs(facts: JobReport) -> JobReport:
    """As if a Prefect server had answered; the integration tests ask a real one."""
    run = {"began": 1.7e9, "tags": {"step": "30", "run": "1", "kind": "checkpoint"}, "url": ""}
    good = FlowRunSummary(
        "save actor step 30", "Completed", 1.7e9, 1.5, {"commit": 0.25}, run["tags"], False, "", ""
    )
    bad = FlowRunSummary(
        "save actor step 33", "Failed", 1.7e9, 2.0, {}, {}, True, "no rank 1", "http://p/runs/1"
    )
    kept = {"step": 10, "run": 1, "kinds": "checkpoint", "state": "kept", "why": "pinned"}
    found = {**vars(facts), "runs": [bad, good], "retention": [kept], "server_error": ""}
    return JobReport(**found)


def text_of(page: str) -> str:
    """What a reader sees, row by row."""
    without = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    dense = re.sub(r">\s+<", "><", without)  # as a browser ignores it
    return html.unescape(re.sub(r"<[^>]+>", "|", dense.replace("</tr>", "\n")))


def row_of(page: str, first: str) -> str:
    return next(line for line in text_of(page).splitlines() if line.strip("|").startswith(first))


def test_every_step_is_there_with_its_state(facts: JobReport) -> None:
    page = render_report(facts)
    for step, words in {
        "10|": ("1", "checkpoint", "valid"),
        "20|": ("corrupted",),
        "30|": ("valid", "latest checkpoint"),
        "35|": ("3", "state_dict", "latest state_dict"),
        "50|": ("not committed",),
    }.items():
        assert all(word in row_of(page, step) for word in words), row_of(page, step)
    assert "global_step_40" in text_of(page)  # set aside
    assert sorted(map(int, re.findall(r"data-step='(\d+)'", page))) == [10, 20, 30, 35]


def test_who_needs_a_step_is_named_and_nothing_is_taken_for_markup(facts: JobReport) -> None:
    seen = text_of(render_report(facts))
    assert "the <b>paper</b>'s" in seen
    assert "<b>paper" not in render_report(facts)
    assert "reader 7" in seen
    assert "explorer-1" in seen


def test_without_a_server_it_says_what_it_does_not_know(facts: JobReport) -> None:
    assert "no Prefect server is known" in text_of(render_report(facts))


def test_durations_failures_and_retention_are_shown_where_they_are_known(facts: JobReport) -> None:
    page = render_report(with_runs(facts))
    assert "1.50 s (commit 0.25)" in row_of(page, "30|")
    assert "no rank 1" in row_of(page, "save actor step 33|")
    assert "href='http://p/runs/1'" in page
    assert "pinned" in text_of(page).partition("Retention")[2]


def test_an_empty_job_is_a_page_too(tmp_path: Path) -> None:
    with environment({}):
        page = render_report(collect_report(Settings(home=tmp_path), tmp_path))
    assert "nothing is committed" in page


def test_a_browser_shows_it_and_loads_nothing_else(facts: JobReport, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no Chromium here: apt-get install chromium")
    page = tmp_path / "report.html"
    page.write_text(render_report(with_runs(facts)))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"file://{page}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.stdout.count("<circle") == 4, shown.stderr
    assert "global_step_40" in shown.stdout
    assert not re.search(r"\bsrc=|@import|url\(|<link|<script", shown.stdout)
