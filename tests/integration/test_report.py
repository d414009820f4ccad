"""The report of a job whose saves a real Prefect server has seen."""

from pathlib import Path

import pytest
import torch

from tests.waiting import until
from trinity_sync import CheckpointCoordinator, SaveFailedError, Settings
from trinity_sync.orchestration.report import JobReport, collect_report
from trinity_sync.stack.services import StackState


def test_durations_and_failures_come_from_the_server(
    stack: StackState, stack_settings: Settings, root: Path
) -> None:
    def fail() -> None:
        raise RuntimeError("the adapter is gone")

    with CheckpointCoordinator(root, settings=stack_settings) as saves:
        saves.attach("position", b"17", step=4)
        saves.save(4, {"model": {"w": torch.zeros(9)}})
        saves.wait_all(90)
        saves.save_async("lora", fail, 5)
        saves.save(5, {"model": {"w": torch.zeros(9)}})
        with pytest.raises(SaveFailedError):
            saves.wait_all(90)
        assert saves.attachment(4, "position") == b"17"

    def told() -> JobReport | None:
        facts = collect_report(stack_settings, root)
        both = len(facts.runs) == 2 and all(run.tasks.get("commit") for run in facts.runs)
        return facts if both else None

    facts = until(told, "two runs and their tasks")
    bad, good = facts.runs
    assert (
        good.tags["step"],
        good.failed,
        {"persist-model", "persist-attachments"} <= {*good.tasks},
    ) == (
        "4",
        False,
        True,
    )
    assert good.seconds >= good.tasks["commit"] > 0
    assert (bad.tags["step"], bad.failed) == ("5", True)
    assert "the adapter is gone" in bad.message
