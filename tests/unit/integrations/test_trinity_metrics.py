"""What an explorer of Trinity logs, as metrics; ``make trinity`` has its monitor."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.support.job import Job
from trinity_sync import Checkpoints
from trinity_sync.integrations.trinity.metrics import ExplorerLog
from trinity_sync.integrations.trinity.switch import PLUGINS
from trinity_sync.integrations.verl.driver import open_metrics
from trinity_sync.storage.runs import open_run


def test_what_was_measured_of_the_step_that_a_run_resumed_from_is_of_the_run_that_committed_it(
    job: Job,
) -> None:
    open_run(job.root, "first", 0)
    for step in (10, 20):
        job.commit_states(step, {"model": {"w": torch.ones(3)}})
    open_run(job.root, "second", 10, 1)
    trainer = SimpleNamespace(save_interval=10, total_steps=100)
    log = ExplorerLog(SimpleNamespace(checkpoint_job_dir=str(job.root), trainer=trainer))
    for version in (10, 20):  # the second is of the weights that this run made
        log.note_logged(1, {"rollout/model_version": version, "eval/accuracy": version / 100})
    open_metrics(job.root.resolve()).close()
    job.commit_states(20, {"model": {"w": torch.zeros(3)}}, run=2)
    found = {step: Checkpoints(job.root).metrics(step) for step in (10, 20)}
    assert {step: each["eval/accuracy"] for step, each in found.items()} == {10: 0.1, 20: 0.2}


SAY = """
import runpy, sys
runpy.run_path(sys.argv[1])
print("trinity_sync.integrations.trinity.switch" in sys.modules)
"""


def switches_on(plugin: Path) -> str:
    command = [sys.executable, "-c", SAY, str(plugin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_copy_that_trinity_made_of_the_plugin_does_nothing(tmp_path: Path) -> None:
    (plugin,) = [path for path in PLUGINS.glob("*.py") if not path.name.startswith("__")]
    copy = Path(shutil.copy2(plugin, tmp_path))
    assert (switches_on(plugin), switches_on(copy)) == ("True", "False")
