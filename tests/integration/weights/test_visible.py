"""Reports of the versions that readers serve; and a commit that the Synchronizer notices."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.test_cli import run
from tests.unit.cli.test_output import check_document
from trinity_sync import Settings
from trinity_sync.stack.services import StackState
from trinity_sync.weights.registry import AsyncVersionRegistry
from trinity_sync.weights.state_files import write_address
from trinity_sync.weights.versions import Version

TRAINING = """
import sys, ray, torch
from trinity_sync import CheckpointCoordinator, Synchronizer

root = sys.argv[1]
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)  # not the stack's
synchronizer = Synchronizer.get_actor(root=root)
ray.get(synchronizer.set_serving.remote("rollout-0", 0))
waiting = synchronizer.wait_newer.remote(0, 60.0)
with CheckpointCoordinator(root) as saves:
    saves.save(4, {"model": {"w": torch.ones(3)}})
found = ray.get(waiting)
print(found.step, found.run, found.source)
ray.kill(synchronizer)
"""


def test_a_commit_of_the_flow_wakes_a_wait_for_weights(
    stack: StackState, stack_settings: Settings, root: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(root)],
        env={**os.environ, "TRINITY_SYNC_SPOOL": str(stack_settings.spool)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4 1 checkpoint"]


def serve_version_5_to_one_reader(root: Path) -> None:
    async def work() -> None:
        write_address(root, "synchronizer-x", "trinity_sync")
        registry = AsyncVersionRegistry(root, "actor", clock=lambda: 1.7e9)
        await registry.record(Version(5, 1, "memory", str(root)))
        registry.versions.set_serving("rollout-0", 5, registry.now())
        await registry.record(Version(7, 1, "checkpoint", str(root)))

    asyncio.run(work())


def test_the_versions_that_readers_serve_are_shown_without_ray(root: Path) -> None:
    serve_version_5_to_one_reader(root)
    done = run("readers", root)
    assert done.returncode == 0, done.stderr
    assert "newest version: 7 of run 1, from checkpoint" in done.stdout
    (row,) = (line for line in done.stdout.splitlines() if "rollout-0" in line)
    assert row.split("\t")[:4] == ["rollout-0", "5", "1", "2"]
    assert "Synchronizer: running" in done.stdout


def test_the_json_output_has_the_same_report(root: Path) -> None:
    serve_version_5_to_one_reader(root)
    shown = check_document("readers", run("readers", root, "-o", "json").stdout)
    assert shown["version"] == 7
    assert shown["readers"][0]["behind"] == 2
    assert shown["running"] is True


def test_a_dead_synchronizer_is_reported(root: Path) -> None:
    serve_version_5_to_one_reader(root)
    (root / ".trinity_sync/weights/synchronizer.json").unlink()
    assert "Synchronizer: not running, as of" in run("readers", root).stdout


def test_a_job_without_a_synchronizer_is_reported(root: Path) -> None:
    assert "no Synchronizer" in run("readers", root).stderr
    assert run("readers", root, "-o", "json").stdout == '{\n  "schema": 1,\n  "readers": null\n}\n'
