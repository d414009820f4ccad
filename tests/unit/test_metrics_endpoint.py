"""What Prometheus reads from a flow worker."""

import os
import socket
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.job import Job
from tests.unit.steps import commit_files
from tests.unit.test_formats import of_another_release
from trinity_sync.client.save_request import SaveRequest
from trinity_sync.errors import StackError
from trinity_sync.orchestration.job_registry import register_job
from trinity_sync.orchestration.metrics import WorkerMetrics
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.stack.ports import free_port
from trinity_sync.storage.save import Persisted

TIMES = {"started_at": 1.7e9, "persisted_at": 1.7e9 + 1, "committed_at": 1.7e9 + 1.25}


def scraped(port: int) -> dict[tuple[str, ...], float]:
    """Values by name and labels, without the job's."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
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


def request(job: Job, step: int, run: int = 1, run_key: str = "") -> SaveRequest:
    return SaveRequest(root=str(job.root), step=step, run=run, run_key=run_key)


def test_saves_seconds_bytes_and_the_newest_step_can_be_scraped(job: Job, tmp_path: Path) -> None:
    metrics, settings = WorkerMetrics(), Settings(home=tmp_path)
    job.stage(4, {"model": {"w": torch.zeros(1000)}})
    written = job.persist(4)
    metrics.count_committed_save(
        request(job, 4),
        [Persisted(written)],
        started_at=written[0].submitted_at + 0.5,
        persisted_at=written[0].submitted_at + 2.5,
        committed_at=written[0].submitted_at + 2.75,
    )
    metrics.count_committed_save(request(job, 3), [], **TIMES)  # late
    metrics.count_failed_save(request(job, 5), "failed")
    found = scraped(metrics.serve(settings, at(free_port())))
    assert found["trinity_sync_saves_total", "checkpoint", "committed"] == 2
    assert found["trinity_sync_saves_total", "checkpoint", "failed"] == 1
    assert found["trinity_sync_phase_seconds_sum", "checkpoint", "write"] == pytest.approx(3.0)
    assert found["trinity_sync_phase_seconds_sum", "checkpoint", "queue"] == pytest.approx(0.5)
    stall = found["trinity_sync_stall_seconds_sum", "checkpoint", "actor"]
    assert stall == pytest.approx(written[0].stall_s)
    assert stall > 0
    assert found["trinity_sync_saved_bytes_total", "checkpoint"] == written[0].record.nbytes
    assert found["trinity_sync_newest_step", "checkpoint"] == 4
    assert found["trinity_sync_newest_step", "state_dict"] == 4
    assert 0 <= found["trinity_sync_newest_commit_age_seconds", "checkpoint"] < 60


def test_a_worker_that_starts_knows_where_the_jobs_of_its_node_stand(
    job: Job, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path)
    job.stage(7, {"model": {"w": torch.zeros(3)}})
    job.commit(7)
    register_job(settings, job.root)
    port = WorkerMetrics().serve(settings, at(free_port()))
    assert newest_step(port) == 7


def test_a_worker_knows_where_the_others_stand_beside_a_job_of_another_release(
    job: Job, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path)
    first = tmp_path / "a"  # is looked up before the other one
    of_another_release(commit_files(first, 9) / "manifest.json")
    commit_files(job.root, 7)
    for root in (first, job.root):
        register_job(settings, root)
    assert newest_step(WorkerMetrics().serve(settings, at(free_port()))) == 7


def test_a_root_that_was_begun_anew_is_not_where_the_old_one_was(job: Job, tmp_path: Path) -> None:
    metrics, settings = WorkerMetrics(), Settings(home=tmp_path)
    metrics.count_committed_save(request(job, 40, 2, "old"), [], **TIMES)
    for step in (3, 2):  # the second is late
        metrics.count_committed_save(request(job, step, 1, "new"), [], **TIMES)
    assert newest_step(metrics.serve(settings, at(free_port()))) == 3


def test_a_root_that_hangs_does_not_hold_up_a_workers_start(job: Job, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    register_job(settings, job.root)
    manifest = job.root / "global_step_7/manifest.json"
    manifest.parent.mkdir()
    os.mkfifo(manifest)  # whoever opens it waits until somebody writes
    metrics = WorkerMetrics()
    port = metrics.serve(settings, at(free_port()))
    metrics.count_committed_save(request(job, 8), [], **TIMES)
    assert newest_step(port) == 8
    with manifest.open("w"):
        manifest.unlink()


def newest_step(port: int) -> float:
    """What is said of checkpoints, once anything is."""
    deadline = time.monotonic() + 30
    while (found := scraped(port).get(("trinity_sync_newest_step", "checkpoint"))) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_a_port_that_is_taken_is_a_sentence(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StackError, match=f"127.0.0.1:{port}"):
            WorkerMetrics().serve(Settings(home=tmp_path), at(port))


def test_a_flow_that_counts_can_be_handed_to_ray() -> None:
    """Prefect hands the flow to every task, pickled with what it refers to."""
    from ray import cloudpickle

    from flows.save import save_step

    assert cloudpickle.loads(cloudpickle.dumps(save_step)).name == "save-step"
