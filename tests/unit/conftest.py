"""Jobs for tests: a root in a temporary folder, a spool in real shared memory."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.job import Job
from trinity_sync.snapshot.spool import open_job_spool


@pytest.fixture
def job(tmp_path: Path, spool_folder: Path) -> Iterator[Job]:
    root = tmp_path / "ckpts"
    root.mkdir()
    made = Job(root, open_job_spool(spool_folder, root))
    yield made
    for stager in made.stagers.values():
        stager.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
