"""A job: on the session's stack, or as steps on disk without any training."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.test_tutorials import make_tools
from tests.support.environments import make_environment
from tests.support.job import Job
from tests.support.savers import end_savers
from trinity_sync.stack import PACKAGES


@pytest.fixture
def job(root: Path, spool_folder: Path) -> Iterator[Job]:
    """A job whose real images and files the test makes itself, without Prefect."""
    with closing(Job.open(root, spool_folder)) as job:
        yield job


@pytest.fixture
def tools(tmp_path: Path, spool_folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a user who has installed the client alone, and whose saver ends."""
    made = make_tools(tmp_path)
    own = {"TRINITY_SYNC_HOME": str(tmp_path / "home"), "TRINITY_SYNC_SPOOL": str(spool_folder)}
    refused = f"import sys; sys.modules.update(dict.fromkeys({PACKAGES}))"  # as if not installed
    (tmp_path / "bin/sitecustomize.py").write_text(refused)
    made["PYTHONPATH"] += f":{tmp_path}/bin"
    yield made | own | {"TRINITY_SYNC_SAVER": "auto"}
    end_savers(spool_folder)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What users install, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source, checkout = folder / "source", Path(__file__).parents[2]
    skip = shutil.ignore_patterns(".*", "build", "dist", "demo-output", "__pycache__")
    shutil.copytree(checkout, source, ignore=skip, symlinks=True)
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(
        [sys.executable, "-m", "pip", *map(str, command)], check=True, capture_output=True
    )
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of a trainer's environment, which has what the client needs and nothing else."""
    return make_environment(tmp_path_factory.mktemp("client") / "venv", wheel)


@pytest.fixture(scope="session")
def stack_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of the stack's environment, which has no veRL."""
    return make_environment(tmp_path_factory.mktemp("stack") / "venv", wheel, extra="stack")
