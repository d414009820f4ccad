"""Trainers of another release next to a job of this release, on one real stack.

The other release is a copy of the package in which a format is one less or one more.
"""

import os
import re
import shutil
from pathlib import Path

import torch

import trinity_sync
from tests.integration.prefect_api import until
from tests.support.forked import Program
from tests.support.job import Job
from trinity_sync import CheckpointCoordinator, Settings
from trinity_sync.snapshot.spool import JobSpool, open_job_spool
from trinity_sync.storage.discovery import iter_committed_steps
from trinity_sync.storage.manifest import read_manifest

STATE = {"model": {"w": torch.arange(5000.0)}}
TRAINER = """
import os, sys, torch
os.chdir(sys.argv[2])
sys.path.insert(0, sys.argv[2])
from trinity_sync import CheckpointCoordinator, SaveFailedError

saves = CheckpointCoordinator(sys.argv[1])
saves.save(5, {"model": {"w": torch.arange(5000.0)}})
try:
    saves.wait_all(90)
except SaveFailedError as error:
    print(error)
saves.close()
"""


def other_release(folder: Path, constant: str, change: int) -> Path:
    """A copy of the package with another value of a format."""
    shutil.copytree(Path(trinity_sync.__file__).parent, folder / "trinity_sync")
    layout = folder / "trinity_sync/layout.py"
    text, found = re.subn(
        rf"^{constant} = 1$", f"{constant} = {1 + change}", layout.read_text(), flags=re.MULTILINE
    )
    assert found == 1
    layout.write_text(text)
    return folder


def trains(release: Path, root: Path) -> str:
    """What a trainer of a release that saves step 5 says of it."""
    env = {**os.environ, "PYTHONPATH": str(release)}
    torch_alone = ["torch.distributed.tensor"]
    return Program(TRAINER, root, release, env=env, preloaded=torch_alone).end()


def images(spool: JobSpool) -> dict[str, bytes]:
    """What waits in the memory of a job: images and their tickets."""
    paths = [*spool.folder.glob("*.slot"), *spool.folder.glob("*.ticket")]
    return {path.name: path.read_bytes() for path in paths}


OLDER = {
    ("SPOOL_FORMAT", -1): "the trainer's environment",
    ("SPOOL_FORMAT", 1): "the stack's environment",
    ("ROOT_FORMAT", -1): "the environment that wrote it",
    ("ROOT_FORMAT", 1): "this environment",
}


def test_a_trainer_of_another_release_is_told_what_to_upgrade_and_its_neighbour_goes_on(
    saves: CheckpointCoordinator, stack_settings: Settings, root: Path, tmp_path: Path
) -> None:
    kept = {}
    for number, ((constant, change), older) in enumerate(OLDER.items()):
        release = other_release(tmp_path / f"release{number}", constant, change)
        theirs = tmp_path / f"theirs{number}"
        told = trains(release, theirs)
        wanted = rf"has format {1 + change}, .* reads format 1: upgrade trinity-sync in {older}"
        assert re.search(wanted, told), told
        (spool,) = stack_settings.spool.glob(f"{theirs.name}-*")
        kept[spool] = images(JobSpool(spool))
        assert sorted(path.rpartition(".")[2] for path in kept[spool]) == ["slot", "ticket"]
        assert read_manifest(theirs, 5) is None

    for step in (1, 2, 3):  # next to them, saves are committed and older steps removed
        saves.save(step, STATE, keep=1)
        saves.wait_all(90)
    until(lambda: [m.step for m in iter_committed_steps(root)] == [3], "the retention")
    other = Job(tmp_path / "other", open_job_spool(stack_settings.spool, tmp_path / "other"))
    other.root.mkdir()
    other.stage(7, STATE)  # by a trainer that dies before it asks: the worker's sweep finds it
    until(lambda: read_manifest(other.root, 7), "the commit of what was swept")
    other.stagers[0].close()
    assert {folder: images(JobSpool(folder)) for folder in kept} == kept
