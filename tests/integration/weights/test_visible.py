"""Reports of the versions that readers serve; and a commit that the Synchronizer notices."""

import asyncio
from pathlib import Path

from tests.integration.test_cli import run
from tests.unit.cli.test_output import check_document
from trinity_sync.client.init_root import open_root
from trinity_sync.weights.registry import AsyncVersionRegistry
from trinity_sync.weights.state_files import write_address
from trinity_sync.weights.versions import Version


def serve_version_5_to_one_reader(root: Path) -> None:
    async def work() -> None:
        write_address(root, "synchronizer-x", "trinity_sync")
        registry = AsyncVersionRegistry(root, "actor", clock=lambda: 1.7e9)
        await registry.record(Version(5, 1, "memory", str(root)))
        registry.versions.set_serving("rollout-0", 5, registry.now(), 1)
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
    shown = check_document("readers", run("readers", root, "-o", "json").stdout)
    assert (shown["version"], shown["readers"][0]["behind"], shown["running"]) == (7, 2, True)
    (root / ".trinity_sync/weights/synchronizer.json").unlink()
    assert "Synchronizer: not running, as of" in run("readers", root).stdout


def test_a_job_without_a_synchronizer_is_reported(root: Path) -> None:
    open_root(root)
    assert "no Synchronizer" in run("readers", root).stderr
    assert run("readers", root, "-o", "json").stdout == '{\n  "schema": 1,\n  "readers": null\n}\n'
