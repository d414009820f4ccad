"""The report of a job whose saves a real Prefect server has seen."""

from pathlib import Path

import pytest
import torch

from tests.integration.prefect_api import Api, kind_of
from tests.support.waiting import until
from trinity_sync import CheckpointCoordinator, SaveFailedError, Settings
from trinity_sync.client.prefect_api import ask_server
from trinity_sync.orchestration.report.collect import collect_report
from trinity_sync.orchestration.report.facts import JobReport
from trinity_sync.orchestration.step_events import JOB_RESOURCE
from trinity_sync.snapshot.identity import job_id
from trinity_sync.stack.services import StackState


def test_failures_pages_and_tasks_come_from_the_server(
    stack: StackState, stack_settings: Settings, root: Path
) -> None:
    def fail() -> None:
        raise RuntimeError("the adapter is gone")

    with CheckpointCoordinator(root, settings=stack_settings) as saves:
        saves.attach("position", b"17", step=4)
        saves.save(4, {"model": {"w": torch.zeros(9)}})
        saves.wait_all(250)
        saves.save_async("lora", fail, 5)
        saves.save(5, {"model": {"w": torch.zeros(9)}})
        with pytest.raises(SaveFailedError):
            saves.wait_all(250)
        assert saves.attachment(4, "position") == b"17"

    def find() -> JobReport | None:
        report = collect_report(stack_settings, root)
        return report if report.failures and report.steps[0].urls else None

    report = until(find, "both runs")
    assert report.health.status == "failed"
    assert "the adapter is gone" in report.health.sentence
    (group,) = report.failures
    assert (group.steps, group.command) == ((5,), f"trinity-sync retry {root} 5")
    assert "/runs/flow-run/" in group.url
    (save,) = report.saves
    assert save.timing.longest_stall
    assert save.timing.write_s > 0

    bad, good = ask_server(stack_settings, lambda api: api.read_job_runs(job_id(root)))
    assert (bad.step, bad.state.type) == (5, "FAILED")

    def find_tasks() -> set[str] | None:
        tasks = {kind_of(task) for task in Api().tasks_of(Api().run_of(good.key))}
        return tasks if "commit" in tasks else None

    tasks = until(find_tasks, "the tasks of the good run")
    assert {"persist-model", "persist-attachments", "commit"} <= tasks

    def find_events() -> dict[str, int] | None:
        found = Api().events_of(JOB_RESOURCE + saves.spool.folder.name)
        return found if len(found) == 2 else None

    events = until(find_events, "an event for each save")
    assert events == {"trinity_sync.step.committed": 4, "trinity_sync.step.failed": 5}
