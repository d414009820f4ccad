"""What Prometheus reads from a flow worker."""

import json
import re
import socket
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.job import Job
from tests.support.meanwhile import fail_to_read, hanging_when_opened
from tests.support.steps import MODEL, commit_files
from tests.support.waiting import until
from trinity_sync.errors import StackError
from trinity_sync.layout import ITERATION_FILES
from trinity_sync.orchestration import metrics as node_metrics
from trinity_sync.orchestration.metrics import RootObserver, WorkerMetrics
from trinity_sync.orchestration.on_node import commit_step
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.identity import register_root
from trinity_sync.stack.daemon import free_port
from trinity_sync.storage.discovery import Corruption, mark_corrupted
from trinity_sync.storage.uncommitted import Persisted
from trinity_sync.weights.state_files import SynchronizerState, write_address, write_state
from trinity_sync.weights.versions import Version, VersionRegistry


def scraped(port: int) -> dict[tuple[str, ...], float]:
    """Values by name and labels, without the job's."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=250) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "job")): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


def at(port: int) -> StackSettings:
    return StackSettings(worker={"metrics": f"127.0.0.1:{port}"})


def test_saves_seconds_bytes_and_the_newest_step_can_be_scraped(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, settings = WorkerMetrics(), Settings(home=tmp_path)
    monkeypatch.setenv("TRINITY_SYNC_HOME", str(tmp_path))
    written = {}
    for step in (3, 4):
        job.stage(step, {"model": {"w": torch.zeros(1000)}})
        written[step] = job.persist(step)
    for step in (4, 3):  # the second is late
        (file,) = written[step]
        done = commit_step(
            job.request(step),
            [Persisted([file])],
            job.share,
            file.submitted_at + 0.5,
            file.submitted_at + 2.5,
        )
        done = replace(done, by_saver=step == 3)
        metrics.count_committed_save(job.request(step), done)
    metrics.count_save(job.request(5), "failed", "flow")
    found = scraped(metrics.serve(settings, at(free_port())))
    for by, outcome in (("flow", "committed"), ("saver", "committed"), ("flow", "failed")):
        assert found["trinity_sync_saves_total", by, "checkpoint", outcome] == 1
    assert found["trinity_sync_phase_seconds_sum", "checkpoint", "write"] == pytest.approx(4.0)
    assert found["trinity_sync_phase_seconds_sum", "checkpoint", "queue"] == pytest.approx(1.0)
    stall = found["trinity_sync_stall_seconds_sum", "checkpoint", "actor"]
    assert stall == pytest.approx(sum(file.stall_s for (file,) in written.values()))
    assert stall > 0
    nbytes = sum(file.record.nbytes for (file,) in written.values())
    assert found["trinity_sync_saved_bytes_total", "checkpoint"] == nbytes
    assert found["trinity_sync_newest_step", "checkpoint"] == 4
    assert found["trinity_sync_newest_step", "state_dict"] == 4
    assert 0 <= found["trinity_sync_newest_commit_age_seconds", "checkpoint"] < 60


def test_a_worker_that_starts_knows_where_the_jobs_of_its_node_stand(
    job: Job, settings: Settings
) -> None:
    job.commit_states(7, {"model": {"w": torch.zeros(3)}})
    register_root(settings.home, job.root)
    assert newest_step(WorkerMetrics().serve(settings, at(free_port()))) == 7


def test_a_root_that_hangs_does_not_hold_up_a_workers_start(job: Job, settings: Settings) -> None:
    register_root(settings.home, job.root)
    manifest = job.root / "global_step_7/manifest.json"
    manifest.parent.mkdir()
    (job.root / ITERATION_FILES["checkpoint"]).write_text("7")
    metrics = WorkerMetrics()
    with hanging_when_opened(manifest):
        port = metrics.serve(settings, at(free_port()))
        metrics.update_newest(job.spool.folder.name, "checkpoint", 8, time.time())
        assert newest_step(port) == 8


def newest_step(port: int) -> float:
    """What is said of checkpoints, once anything is."""
    key = "trinity_sync_newest_step", "checkpoint"
    found = until(lambda: [v for k, v in scraped(port).items() if k == key], "word", pause=0.01)
    return found[0]


def test_images_that_wait_and_free_memory_can_be_scraped_also_before_a_save(
    job: Job, tmp_path: Path, settings: Settings
) -> None:
    port = WorkerMetrics().serve(settings, at(free_port()))
    for step in (1, 2, 3):  # two slots, so the first is evicted
        job.stage(step, {"model": {"w": torch.zeros(3)}})
    found = scraped(port)
    assert found["trinity_sync_pending_images",] == 2
    assert 0 < found["trinity_sync_pending_age_seconds",] < 600
    assert found["trinity_sync_spool_free_bytes",] > 0
    job.commit(2)
    job.commit(3)
    found = scraped(port)
    assert found["trinity_sync_pending_images",] == found["trinity_sync_pending_age_seconds",] == 0
    settings = Settings(home=tmp_path, spool=tmp_path / "shm/none")
    port = WorkerMetrics().serve(settings, at(free_port()))
    assert scraped(port)["trinity_sync_spool_free_bytes",] > 0


def test_corrupted_steps_readers_and_other_workers_commits_are_read_from_the_root(
    job: Job, settings: Settings
) -> None:
    metrics = WorkerMetrics()
    metrics.update_newest(job.spool.folder.name, "checkpoint", 2, time.time())  # its own commit
    for step in (1, 2, 7):
        commit_files(job.root, step, at=time.time())
    mark_corrupted(job.root, 1, Corruption({MODEL: "is missing"}, 1.7e9))
    registry = VersionRegistry()
    registry.record(Version(7, 1, "checkpoint", str(job.root)), now=1.7e9)
    registry.set_serving("rollout-0", 2, now=1.7e9, run=1)
    (job.root / ".trinity_sync/weights").mkdir(parents=True)
    write_state(job.root, SynchronizerState("job", registry.state, written_at=1.7e9))
    write_address(job.root, "synchronizer", "weights")
    register_root(settings.home, job.root)
    observer = RootObserver(settings, StackSettings(), metrics.update_newest)
    observer.observe()
    labels = {"job": job.spool.folder.name, "kind": "checkpoint"}
    assert metrics.registry.get_sample_value("trinity_sync_newest_step", labels) == 7
    samples = [sample for family in observer.collect() for sample in family.samples]
    found = {sample.name: sample for sample in samples}
    assert found["trinity_sync_corrupted_steps"].value == 1
    assert found["trinity_sync_root_free_bytes"].value > 0
    lag = found["trinity_sync_reader_lag_steps"]
    assert (lag.labels["reader"], lag.value) == ("rollout-0", 5)


def corrupted_steps(observer: RootObserver) -> dict[str, float]:
    """By job."""
    return {
        sample.labels["job"]: sample.value
        for family in observer.collect()
        for sample in family.samples
        if sample.name == "trinity_sync_corrupted_steps"
    }


def test_corruption_marks_are_looked_up_rarely(
    job: Job, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    register_root(settings.home, job.root)
    name, corruption = job.spool.folder.name, Corruption({MODEL: "is missing"}, 1.7e9)
    observer = RootObserver(settings, StackSettings(), lambda *_: None)
    for step in (1, 2):
        commit_files(job.root, step)
        mark_corrupted(job.root, step, corruption)
        observer.observe()
        assert corrupted_steps(observer) == {name: 1}
    monkeypatch.setattr(node_metrics, "RECHECK_S", 0.0)
    observer.observe()
    assert corrupted_steps(observer) == {name: 2}


def test_a_root_or_registry_that_fails_is_logged_once_and_hides_no_other(
    job: Job, settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = job.spool.folder.name
    register_root(settings.home, job.root)
    commit_files(job.root, 1)
    observer = RootObserver(settings, StackSettings(), lambda *_: None)
    unreadable = job.root / ("x" * 300)  # the file system refuses to look it up
    register_root(settings.home, unreadable)
    for _ in range(2):
        observer.observe()
        assert corrupted_steps(observer) == {name: 0}
    assert caplog.text.count("cannot read") == 1
    with monkeypatch.context() as disk:
        disk.setattr("trinity_sync.storage.discovery.read_uncached", fail_to_read)
        for _ in range(2):
            observer.observe()
            assert corrupted_steps(observer) == {}
    assert caplog.text.count("cannot read") == 2
    (settings.home / "roots/a.json").mkdir()
    for _ in range(2):
        observer.observe()
        assert corrupted_steps(observer) == {}
    assert caplog.text.count("cannot read") == 3
    (settings.home / "roots/a.json").rmdir()
    observer.observe()
    assert corrupted_steps(observer) == {name: 0}


def exported(port: int) -> set[str]:
    """Names of all metrics, also of those without a value yet."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=250) as answer:
        return set(re.findall(r"^# TYPE (\S+)", answer.read().decode(), flags=re.M))


def test_the_alerts_and_the_dashboard_name_metrics_that_are_exported(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "deploy"
    rules = [
        rule
        for group in yaml.safe_load((folder / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    panels = json.loads((folder / "dashboard.json").read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    settings = Settings(home=tmp_path, spool=tmp_path)
    known = exported(WorkerMetrics().serve(settings, at(free_port())))
    used = set()
    for expression in [*(rule["expr"] for rule in rules), *shown]:
        found = re.findall(r"trinity_sync_\w+", expression)
        assert found, expression
        used |= {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}
    assert used <= known, used - known
    assert known <= used | {"trinity_sync_saves_created"}, "nothing shows these"
    for rule in rules:
        assert {"summary"} <= rule["annotations"].keys(), rule["alert"]


def test_a_port_that_is_taken_is_a_sentence(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StackError, match=f"127.0.0.1:{port}"):
            WorkerMetrics().serve(Settings(home=tmp_path), at(port))
