"""What the commands say of saves where no Prefect server is known: what the files say."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from tests.support.command import invoke
from tests.support.disk import no_opens_of
from tests.support.job import Job
from tests.support.steps import commit_files
from tests.unit.cli.test_wait_command import flow_run, serve
from trinity_sync import Checkpoints
from trinity_sync.formats.hf_export import fail_export_request
from trinity_sync.layout import step_folder
from trinity_sync.saves.journal import append
from trinity_sync.saves.save_status import end_images
from trinity_sync.snapshot.identity import job_id, register_root
from trinity_sync.storage import manifest as manifest_files
from trinity_sync.storage.discovery import require_committed
from trinity_sync.storage.manifest import write_manifest
from trinity_sync.storage.rewind import rewind
from trinity_sync.storage.runs import hold_run, open_run
from trinity_sync.storage.steps_in_use import tag


@pytest.fixture
def saves(job: Job) -> Job:
    """A job of a committed save, a failed one, and one that is only in shared memory."""
    for step in (10, 20, 30):
        job.stage(step, {"model": {"w": torch.full((4,), step)}})
        if step == 10:
            job.commit(step)
    end_images(job.spool, job.request(20), "no space left on device")
    return job


@pytest.fixture(autouse=True)
def variables(home: Path, spool_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the node of the job."""
    monkeypatch.setenv("TRINITY_SYNC_SPOOL", str(spool_folder))
    monkeypatch.setenv("TRINITY_SYNC_SAVER", "auto")


def run(*arguments: object, **variables: str) -> Result:
    return invoke(*arguments, env=variables)


def rows_of(done: Result, noun: str) -> list[dict[str, Any]]:
    return json.loads(done.stdout)[noun]


def statuses(done: Result, noun: str) -> dict[int, str]:
    return {row["step"]: row["status"] for row in rows_of(done, noun)}


def test_runs_and_ls_list_committed_failed_and_pending_saves(saves: Job) -> None:
    done = run("runs", saves.root, "-o", "json")
    assert statuses(done, "saves") == {10: "committed", 20: "failed", 30: "pending"}
    done = run("ls", saves.root, "-o", "json")
    assert statuses(done, "steps") == {10: "valid", 20: "failed", 30: "pending"}
    assert f"trinity-sync retry {saves.root} 20" in done.stderr
    for url, code in (("", 0), ("http://127.0.0.1:9/api", 4)):  # a server that does not answer
        done = run("runs", saves.root, "--failed", "-o", "json", PREFECT_API_URL=url)
        assert (done.exit_code, "127.0.0.1:9" in done.stderr) == (code, bool(url))
        (failed,) = rows_of(done, "saves")
        assert (failed["step"], failed["reason"]) == (20, "no space left on device")
        assert failed["flow_run"] is None
    (saves.root / ".trinity_sync/saves.jsonl").unlink()  # the log is bounded
    done = run("runs", saves.root, "-o", "json")
    assert {*statuses(done, "saves")} == {20, 30}  # images of a committed save are not pending


def test_status_writes_gauges_for_a_node_exporter(saves: Job, home: Path, tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    from trinity_sync.orchestration.metrics import METRICS

    register_root(home, saves.root)
    METRICS.update_newest("other", "checkpoint", 1, 0.0)  # of a worker in this process
    Checkpoints(saves.root).record_metrics(10, {"age_max": 3.0})
    done = run("status", "--prometheus", tmp_path / "node.prom")
    assert (done.exit_code, done.stdout) == (0, "")
    families = parser.text_string_to_metric_families((tmp_path / "node.prom").read_text())
    found = {each.name: each.samples[0] for each in families if each.samples}
    assert found["trinity_sync_newest_step"].labels == {
        "job": job_id(saves.root),
        "kind": "checkpoint",
    }
    values = {name.removeprefix("trinity_sync_"): each.value for name, each in found.items()}
    assert values.keys() == {
        "newest_step", "newest_commit_age_seconds", "pending_images", "pending_age_seconds",
        "spool_free_bytes", "root_free_bytes", "corrupted_steps", "failed_saves", "step_metric",
    }  # fmt: skip
    counts = [values[n] for n in ("newest_step", "pending_images", "failed_saves", "step_metric")]
    assert counts == [10, 2, 1, 3]
    assert found["trinity_sync_step_metric"].labels["metric"] == "age_max"
    saves.commit(30)
    run("status", "--prometheus", tmp_path / "node.prom")
    assert re.search(r"trinity_sync_failed_saves\{.*\} 0.0", (tmp_path / "node.prom").read_text())


def test_what_the_saver_saves_is_listed_and_waited_for_if_a_server_knows_nothing_of_it(
    saves: Job,
) -> None:
    with serve(lambda _: [flow_run(20, 1, "checkpoint", "RUNNING")]) as url:
        done = run("runs", saves.root, "-o", "json", PREFECT_API_URL=url)
        late = run("wait", saves.root, "--timeout", 0, PREFECT_API_URL=url)
    assert statuses(done, "saves") == {10: "committed", 20: "writing", 30: "pending"}
    assert late.exit_code == 1


def test_a_step_that_was_removed_is_not_waited_for(saves: Job) -> None:
    saves.commit_states(40, {"model": {"w": torch.zeros(4)}})
    run("prune", saves.root, "--keep", "last=1", "--yes")
    done = run("wait", saves.root, 10, "--timeout", 5)
    assert (done.exit_code, "has been removed since" in done.stderr) == (1, True)
    open_run(saves.root, "first", 0)
    later = open_run(saves.root, "second", 5)
    with hold_run(saves.root, later.number):  # a trainer, which may save it again
        late = run("wait", saves.root, 10, "--timeout", 0.2)
    assert (late.exit_code, "is not committed after 0.2 s" in late.stderr) == (1, True)


def test_a_step_that_was_rewound_is_waited_for_until_a_later_run_has_ended(saves: Job) -> None:
    saves.commit_states(40, {"model": {"w": torch.zeros(4)}})
    rewind(saves.root, 10)
    waiting = run("wait", saves.root, 40, "--timeout", 0.2)
    assert (waiting.exit_code, "is not committed after 0.2 s" in waiting.stderr) == (1, True)
    open_run(saves.root, "second", 10)  # its process has ended
    done = run("wait", saves.root, 40, "--timeout", 60)
    assert (done.exit_code, "has been removed since" in done.stderr) == (1, True)


def test_ls_shows_a_committed_step_next_to_the_save_that_failed_to_replace_it(saves: Job) -> None:
    open_run(saves.root, "first", 0)
    open_run(saves.root, "second", 5)
    tag(saves.root, 10, "best")
    saves.stage(10, {"model": {"w": torch.zeros(4)}}, run=2)
    end_images(saves.spool, saves.request(10, run=2), "no space left on device")
    rows = rows_of(run("ls", saves.root, "-o", "json"), "steps")
    assert [(row["run"], row["status"], row["tags"]) for row in rows if row["step"] == 10] == [
        (2, "failed", []),
        (1, "superseded", ["best"]),
    ]


def test_wait_ends_with_the_reason_of_a_failed_save(saves: Job) -> None:
    done = run("wait", saves.root, 20)
    assert done.exit_code == 1
    assert "no space left on device" in done.stderr
    late = run("wait", saves.root, "--timeout", 0)
    assert (late.exit_code, "step 30" in late.stderr) == (1, True)


PAGE = "http://127.0.0.1:9/runs/flow-run/00000000-0000-0000-0000-000000000007"


@pytest.fixture
def journal(saves: Job) -> Job:
    """Saves whose images are no longer in memory, and one that is in work."""
    append(saves.request(30), "begun")
    for step, url in ((40, ""), (50, PAGE), (60, "")):
        append(saves.request(step), "failed", f"{step} does not fit", url=url)
    commit_files(saves.root, 60)  # meanwhile
    append(saves.request(40, attempt=2), "failed", "it does not fit either")
    return saves


@pytest.mark.parametrize("server", ["", "http://127.0.0.1:9/api"])
def test_failures_of_the_journal_are_shown_by_ls_and_wait(journal: Job, server: str) -> None:
    done = run("ls", journal.root, "-o", "json", PREFECT_API_URL=server)
    shown = {row["step"]: (row["status"], row["reason"]) for row in rows_of(done, "steps")}
    assert (shown[30][0], shown[60][0]) == ("writing", "valid")
    assert shown[40] == ("failed", "it does not fit either")
    assert shown[50] == ("failed", "50 does not fit")
    step = 50 if server else 20  # its stack has its flow run; the memory of this node its images
    assert f"trinity-sync retry {journal.root} {step}" in done.stderr
    failed = run("wait", journal.root, 50, PREFECT_API_URL=server)
    assert (failed.exit_code, f"50 does not fit ({PAGE})" in failed.stderr) == (1, True)


def test_failures_of_the_journal_are_shown_by_runs_and_report_unless_superseded(
    journal: Job,
) -> None:
    rows = rows_of(run("runs", journal.root, "--failed", "-o", "json"), "saves")
    assert {row["step"]: row["reason"] for row in rows} == {
        20: "no space left on device",
        40: "it does not fit either",
        50: "50 does not fit",
    }
    assert {row["step"]: row["url"] for row in rows}[50] == PAGE
    done = run("report", journal.root, "-o", "json")
    groups = {group["message"]: group for group in json.loads(done.stdout)["report"]["failures"]}
    assert groups["it does not fit either"]["steps"] == [40]
    assert groups["it does not fit either"]["command"] == f"trinity-sync doctor {journal.root}"
    assert groups["50 does not fit"]["command"] == f"trinity-sync doctor {journal.root}"
    command = f"trinity-sync retry {journal.root} 20"
    assert groups["no space left on device"]["command"] == command
    open_run(journal.root, "first", 0)
    open_run(journal.root, "second", 30)
    done = run("report", journal.root, "-o", "json")
    found = json.loads(done.stdout)["report"]["failures"]
    # by its images, as in `runs`
    assert [each["steps"] for each in found if each["cause"] == "Failed"] == [[20]]
    assert {each["command"] for each in found if each["cause"] == "Superseded"} == {None}


def test_the_checkpoint_of_an_earlier_run_is_not_taken_for_that_of_a_run_that_has_synced_its_step(
    saves: Job,
) -> None:
    open_run(saves.root, "first", 0)
    open_run(saves.root, "second", 10)
    for kind in ("state_dict", "checkpoint"):
        saves.stage(10, {"model": {"w": torch.full((4,), 10)}}, run=2, kind=kind)
        if kind == "state_dict":
            assert saves.commit(10, run=2, kind=kind).kinds == ("state_dict",)
    assert require_committed(saves.root, 10).checkpoint_run == 1
    rows = rows_of(run("runs", saves.root, "-o", "json"), "saves")
    shown = {(row["run"], row["kind"]): row["status"] for row in rows if row["step"] == 10}
    assert shown == {
        (1, "checkpoint"): "committed",
        (2, "state_dict"): "committed",
        (2, "checkpoint"): "pending",
    }
    done = run("report", saves.root, "-o", "json")
    in_flight = json.loads(done.stdout)["report"]["in_flight"]
    assert {(each["step"], each["kind"]) for each in in_flight} >= {(10, "checkpoint")}
    late = run("wait", saves.root, "--timeout", 0)
    assert (late.exit_code, "step 10" in late.stderr) == (1, True)


def test_a_model_that_was_not_exported_is_shown_although_its_step_is_committed(saves: Job) -> None:
    fail_export_request(saves.root, 1, 10, "actor")
    append(saves.request(10), "failed", "it has no config")
    failed = run("runs", saves.root, "--failed", "-o", "json")
    assert {row["step"]: row["reason"] for row in rows_of(failed, "saves")} == {
        10: (why := "the step is committed, and not exported: it has no config"),
        20: "no space left on device",
    }
    rows = rows_of(run("ls", saves.root, "-o", "json"), "steps")
    shown = {row["step"]: (row["status"], row["failed_exports"]) for row in rows}
    assert shown[10] == ("valid", ["actor"])
    assert "model of actor not exported" in run("ls", saves.root).stdout
    done = run("report", saves.root, "-o", "json")
    groups = {group["message"]: group for group in json.loads(done.stdout)["report"]["failures"]}
    command = f"trinity-sync export hf {saves.root} 10 --role actor"
    assert groups[why]["command"] == command
    found = require_committed(saves.root, 10)
    write_manifest(saves.root, replace(found, failed_exports=()))  # as an export does
    failed = run("runs", saves.root, "--failed", "-o", "json")
    assert {row["step"] for row in rows_of(failed, "saves")} == {20}


def test_saves_are_listed_while_the_files_of_a_step_cannot_be_read(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_files, "PART_FILES", 1)
    states = {"model": {"w": torch.zeros(4)}, "optim": {"lr": 0.1}}
    requested = replace(job.commit_states(10, states), exports={"actor": "hf_model"})
    write_manifest(job.root, requested)
    append(job.request(10), "failed", "its node died")

    def list_saves() -> dict[int, str]:
        return statuses(run("runs", job.root, "-o", "json"), "saves")

    assert list_saves() == {10: "failed"}  # the model is missing
    with no_opens_of(next(step_folder(job.root, 10).glob("manifest-*.json"))):
        assert list_saves() == {10: "committed"}


def test_where_all_is_well_no_command_is_red_or_speaks_of_a_stack(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job.commit_states(10, {"model": {"w": torch.zeros(4)}})
    lines = ["doctor", "status", "ls {}", "runs {}", "show {} 10", "wait {}", "report {}"]
    for line in (*lines, "jobs ls", "verify {}", "reconcile {}", "readers {}"):
        done = run(*line.format(job.root).split())
        assert done.exit_code == 0, done.output
        assert not re.search("Prefect|flow run|worker|Ray", done.output), done.output
    assert "in memory" not in run("status").output
    page = (tmp_path / "report.html").read_text()
    assert not re.search("Prefect|flow run|worker", page.partition("<h1>")[2])


def test_jobs_ls_lists_the_jobs_that_have_saved_on_this_node(
    job: Job, home: Path, tmp_path: Path
) -> None:
    registered, gone = tmp_path / "registered", tmp_path / "gone"
    commit_files(registered, 7, nbytes=5000)
    commit_files(registered, 9, nbytes=5000)
    job.stage(3, {"model": {"w": torch.zeros(4)}})  # no saver has registered its root yet
    for root in (registered, gone):
        register_root(home, root)
    rows = rows_of(run("jobs", "ls", "-o", "json"), "jobs")
    found = {row["root"]: (row["steps"], row["newest"]) for row in rows}
    assert found == {str(registered): (2, 9), str(job.root): (0, None)}
