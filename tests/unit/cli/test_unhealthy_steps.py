"""Where a user sees that a step is unhealthy: ls, show, the report, the page of its run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.save import FlowDriver
from tests.support.command import invoke
from tests.support.job import Job
from trinity_sync.cli.report import render_report
from trinity_sync.orchestration import step_events
from trinity_sync.orchestration.metrics import WorkerMetrics
from trinity_sync.orchestration.on_node import commit_step
from trinity_sync.orchestration.report.collect import collect_report
from trinity_sync.settings import Settings
from trinity_sync.storage.uncommitted import Persisted

BAD = "2 non-finite values in actor/model of rank 0 (layer.bias)"
SAME = "actor/optim has not changed since step 10"


def states(step: int) -> dict[str, Any]:
    model = {"layer.weight": torch.full((4, 4), float(step)), "layer.bias": torch.zeros(4)}
    if step == 20:
        model["layer.bias"][1:3] = float("nan")
    return {"model": model, "optim": {"exp_avg": torch.ones(8)}}


@pytest.fixture
def root(job: Job) -> Path:
    """A job of two steps, the second with NaN in its weights and an optimizer that did not step."""
    for step in (10, 20):
        job.stage(step, states(step))
        job.commit(step, "model", "optim")
    return job.root


def test_ls_show_and_report_say_what_is_wrong_with_which_step(root: Path, tmp_path: Path) -> None:
    bad, good = invoke("ls", root).stdout.splitlines()
    assert BAD in bad
    assert SAME in bad
    assert "actor" not in good
    rows = json.loads(invoke("ls", root, "-o", "json").stdout)["steps"]
    assert [row["status"] for row in rows] == ["valid", "valid"]
    model, optim = rows[0]["health"]
    assert (model["component"], model["nonfinite"], model["nonfinite_ranks"]) == ("model", 2, [0])
    assert optim["unchanged_since"] == 10
    shown = invoke("show", root, 20).stdout
    assert "actor\tmodel\t2\t80\t20\t2\t" in shown
    assert f"warn: {BAD}\nwarn: {SAME}\n" in shown
    assert "warn" not in invoke("show", root, "healthy").stdout
    assert "step 10 of run 1" in invoke("show", root, "healthy").stdout
    assert "has no healthy checkpoint" not in invoke("show", root, "healthy~1").stdout
    assert invoke("show", root, "healthy~1").exit_code == 1
    assert "choose another tag" in invoke("pin", root, 10, "--name", "healthy").stderr
    report = collect_report(Settings(home=tmp_path, spool=tmp_path), root)
    assert f"step 20: {BAD}" in report.health.problems
    assert f"<span class=bad>{BAD}</span>" in render_report(report)


def test_the_run_of_a_save_tells_it_by_its_page_a_metric_and_an_event(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, sent = WorkerMetrics(), []
    for step in (10, 20):
        job.stage(step, states(step))
        written, request = Persisted(job.persist(step, "model", "optim")), job.request(step)
        done = commit_step(request, [written], job.share, 0.0, 0.0)
        metrics.count_committed_save(request, done)
        assert (BAD in done.page) == (BAD in done.summary) == (step == 20)
        assert f"norm actor/model {4 * step}, actor/optim 2.828" in done.page
        labels = {"job": request.job, "kind": "checkpoint"}
        counted = metrics.registry.get_sample_value("trinity_sync_unhealthy_saves_total", labels)
        assert counted == (step == 20)
    monkeypatch.setattr(step_events, "emit_event", lambda **event: sent.append(event))
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        FlowDriver(request)._report("unhealthy", problems=[*done.alarms])
    (event,) = sent
    assert event["event"] == "trinity_sync.step.unhealthy"
    assert event["payload"]["problems"] == [BAD, SAME]
