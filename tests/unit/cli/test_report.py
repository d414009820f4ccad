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
from typer.testing import CliRunner

from tests.conftest import environment
from tests.support.job import Job
from tests.support.leases import acquire_lease
from tests.support.steps import commit_files
from trinity_sync.cli.commands import app
from trinity_sync.cli.output import to_json
from trinity_sync.cli.report_html import MAX_BARS, render_report
from trinity_sync.orchestration.quantities import format_bytes
from trinity_sync.orchestration.report.collect import collect_report
from trinity_sync.orchestration.report.facts import FailureGroup, InFlight, JobReport, StepRow
from trinity_sync.retention.prune import plan_prune, prune
from trinity_sync.retention.removal import Rules
from trinity_sync.saves.journal import append
from trinity_sync.saves.save_request import SaveRequest
from trinity_sync.settings import Settings
from trinity_sync.snapshot.job_identity import register_root
from trinity_sync.snapshot.spool import open_job_spool
from trinity_sync.storage.job_settings import JobSettings, write_job_settings
from trinity_sync.storage.metrics import write_metrics
from trinity_sync.storage.pins import pin
from trinity_sync.storage.quarantine import rewind
from trinity_sync.storage.runs import Run, add_run, hold_run
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
    group = FailureGroup(
        "Failed",
        "no rank 1",
        2,
        (33, 34),
        0,
        1.7e9,
        1.7e9,
        "Retry it.",
        "trinity-sync retry /ckpts 34",
        "http://p/runs/1",
    )
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


def test_every_step_is_listed_with_its_state(facts: JobReport) -> None:
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


def test_uses_of_steps_are_named_and_nothing_is_taken_for_markup(facts: JobReport) -> None:
    page = render_report(with_failures(facts))
    uses = table_of(page, "uses")
    assert "the <b>paper</b>'s" in uses["10"]
    assert not re.search("<b>paper|<script>|href='javascript", page)
    assert any(use.name.startswith("reader 7") for use in facts.uses)
    (reader,) = [use for use in facts.uses if use.kind == "reader"]
    assert (reader.name, reader.step, reader.behind) == ("explorer-1", 30, 5)


def test_what_an_ended_synchronizer_knew_holds_for_its_last_change(facts: JobReport) -> None:
    state = read_state(facts.root)
    assert state is not None
    write_state(facts.root, replace(state, written_at=1.7e9 + 90))
    found = read_sync_report(facts.root, 1.8e9)
    assert found is not None
    assert (found.version, found.run, found.running, found.as_of) == (35, 3, False, 1.7e9 + 90)
    assert [reader.stale_s for reader in found.readers] == [90]


def test_a_save_in_memory_is_in_flight(facts: JobReport) -> None:
    (save,) = facts.in_flight
    assert (save.step, save.kind, save.images) == (36, "checkpoint", 1)
    assert "in memory" in save.phase
    assert table_of(render_report(facts), "in-flight")["36"]


def test_the_page_begins_with_the_status(facts: JobReport) -> None:
    assert facts.health.status == "ok"
    assert any("step 20 is corrupted" in problem for problem in facts.health.problems)
    text = text_of(render_report(facts))
    assert text.index("|OK|") < text.index("|In flight|") < text.index("|Failures|")
    assert text.index("|Failures|") < text.index("Steps on disk")


def test_failures_say_what_to_type(facts: JobReport) -> None:
    page = render_report(with_failures(facts))
    rows = table_of(page, "failures")
    assert "trinity-sync retry /ckpts 34" in rows["Failed"]
    assert "33, 34" in rows["Failed"]
    assert "href='http://p/runs/1'" in page


def bars_of(page: str) -> dict[str, list[str]]:
    """Titles of the bars of each chart, by the chart's title; of checkpoints before weights."""
    found: dict[str, list[str]] = {}
    for figure in re.findall(r"<figure>.*?</figure>", page, flags=re.S):
        (title,) = re.findall(r"<figcaption><b>(.*?)</b>", figure)
        found.setdefault(title, re.findall(r"<div title='(.*?)'>", figure))
    return found


def test_charts_show_stall_phases_speed_and_size_of_each_save(facts: JobReport) -> None:
    page = render_report(facts)
    bars = bars_of(page)
    titles = ["Trainer stall", "Submitted to committed", "Write speed", "Size"]
    assert list(bars) == [*titles, "Norm of actor/model", "Disk used by steps"]
    assert [title.partition(":")[0] for title in bars.pop("Disk used by steps")][-1] == "step 35"
    assert bars.pop("Norm of actor/model")[0] == "step 10: 0"
    for titles in bars.values():  # also the step that the rewind removed
        assert [title.partition(":")[0] for title in titles] == [
            f"step {step}" for step in (10, 20, 30, 40)
        ]
    (phases, *_) = bars["Submitted to committed"]
    assert re.fullmatch(r"step 10: queue .+ m?s, write .+ m?s, commit .+ m?s", phases)
    assert {"queue", "write", "commit"} <= set(re.findall(r"</i> (\w+)</span>", page))


def test_the_disk_is_drawn_before_and_after_what_was_removed(job: Job, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        job.commit_states(step, {"model": {"w": torch.zeros(step << 8)}})
        prune(job.root, plan_prune(job.root, Rules.of_job(JobSettings(keep="last=1")), 0.0))
    commit_files(job.root, 9, at=4e9)  # not by a save
    with environment({}):
        report = collect_report(Settings(home=tmp_path, spool=tmp_path / "none"), job.root)
    one, two, three = (each.timing.nbytes for each in report.saves)
    bars = bars_of(render_report(report))["Disk used by steps"]
    found = {bar.partition(":")[0]: bar.partition(": ")[2] for bar in bars}
    kept, gone = format_bytes(two), format_bytes(one)
    assert found["step 1"] == f"kept {gone}, removed after the save 0 B"
    assert found["step 2"] == f"kept {kept}, removed after the save {gone}"
    assert found["step 3"] == f"kept {format_bytes(three)}, removed after the save {kept}"
    assert set(found) == {"step 1", "step 2", "step 3", "step 9"}


def test_charts_leave_out_what_is_not_finite(facts: JobReport) -> None:
    (save, *_) = facts.saves
    timing = replace(save.timing, nbytes=10**9, write_s=5e-324)  # an infinite speed
    infinite = replace(save, step=7, timing=timing)
    bars = bars_of(render_report(replace(facts, saves=(infinite, *facts.saves))))
    assert len(bars["Size"]) == len(bars["Write speed"]) + 1
    assert not any(title.startswith("step 7:") for title in bars["Write speed"])
    alone = bars_of(render_report(replace(facts, saves=(infinite,))))
    assert "Write speed" not in alone


def test_many_steps_are_not_drawn_and_listed_one_by_one(facts: JobReport) -> None:
    (save, *_) = facts.saves
    saves = tuple(replace(save, step=step, committed_at=1.7e9 + step) for step in range(1000))
    steps = tuple(
        StepRow(step, "valid", "", 1, ("checkpoint",), nbytes=9, committed_at=1.7e9 + step)
        for step in range(2000)
    )
    page = render_report(replace(facts, saves=saves, steps=steps))
    bars = bars_of(page)["Size"]
    assert len(bars) <= MAX_BARS
    assert bars[0].startswith("steps 0 to 8: ")
    assert len(table_of(page, "steps")) == 21
    assert "480 older steps" in page
    assert "1500 still older steps" in page


def test_it_says_that_no_training_runs(job: Job, tmp_path: Path) -> None:
    job.commit_states(4, {"model": {"w": torch.zeros(9)}})
    add_run(job.root, Run(1, "one", 0))
    settings = Settings(home=tmp_path, spool=job.spool.folder.parent)
    with environment({}):
        assert "no training runs" in collect_report(settings, job.root).health.sentence
        with hold_run(job.root, 1):
            assert "no training runs" not in collect_report(settings, job.root).health.sentence


def test_without_a_root_all_jobs_of_the_node_have_a_row_and_a_page(
    tmp_path: Path, spool_folder: Path
) -> None:
    settings = Settings(home=tmp_path / "home", spool=spool_folder)
    one, two, gone = (tmp_path / name for name in ("a/x/ckpts", "b/x/ckpts", "gone"))
    commit_files(one, 7, nbytes=5000)
    (one / ".trinity_sync").mkdir()
    Job(two, open_job_spool(spool_folder, two)).stage(3, {"model": {"w": torch.zeros(9)}})
    for root in (one, gone):
        register_root(settings.home, root)
    append(SaveRequest(root=str(one), step=8, run=1), "failed", "the disk is <full>")
    env = {**settings.to_variables(), "PREFECT_API_URL": ""}
    page = tmp_path / "pages/all.html"
    page.parent.mkdir()
    done = CliRunner().invoke(app, ["report", "--html", str(page)], env=env)
    assert done.exit_code == 0, done.output
    rows = table_of(page.read_text(), "jobs")
    assert set(rows) == {"job", "a/x/ckpts", "b/x/ckpts", "gone"}
    assert "FAILED" in rows["a/x/ckpts"]
    assert re.search(r"\|7\|.* ago\|5.0 kB\|.* ago: the disk is <full>", rows["a/x/ckpts"])
    assert "nothing is committed" in rows["b/x/ckpts"]
    assert f"trinity-sync jobs forget {gone}" in rows["gone"]
    links = re.findall(r"href='(.*?)'", page.read_text())
    assert len(links) == 3
    assert str(one) in (page.parent / links[0]).read_text()
    printed = CliRunner().invoke(app, ["report", "-o", "json"], env=env)
    found = json.loads(printed.stdout)["reports"]
    health = {each["root"]: each["health"]["status"] for each in found}
    assert health == {str(one): "failed", str(two): "empty", str(gone): "failed"}


def test_two_jobs_are_shown_side_by_side_on_one_scale(tmp_path: Path, spool_folder: Path) -> None:
    settings = Settings(home=tmp_path / "home", spool=spool_folder)
    jobs = []
    for name, size in (("small", 5), ("large", 500_000)):
        job = Job(tmp_path / name, open_job_spool(spool_folder, tmp_path / name))
        job.commit_states(7, {"model": {"w": torch.ones(size)}})
        write_metrics(job.root, 1, 7, {"reward": size / 10})
        jobs.append(job)
    write_job_settings(jobs[0].root, {"keep": "last=3"})
    page = tmp_path / "both.html"
    command = ["report", *(str(job.root) for job in jobs), "--html", str(page)]
    done = CliRunner().invoke(app, command, env={**settings.to_variables(), "PREFECT_API_URL": ""})
    assert done.exit_code == 0, done.output
    figures = table_of(page.read_text(), "figures")
    assert figures["keep"].endswith("last=3|all")
    assert figures["reward at step 7"].endswith("0.5|5e+04")
    charts = page.read_text().partition("<h3>Checkpoints: Size</h3>")[2].partition("<h3>")[0]
    heights = [float(each) for each in re.findall(r"height:([0-9.]+)%", charts)]
    assert (len(heights), heights[1]) == (2, 100.0)
    assert 0 < heights[0] < 10


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
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert '<div title="step 10: ' in shown.stdout, shown.stderr
    assert "global_step_40" in shown.stdout
    assert not re.search(r"\bsrc=|@import|url\(|<link|<script", shown.stdout)
