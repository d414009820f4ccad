"""The wheel: whole, and not disturbed by a user's own ``tasks.py`` and ``flows/``."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trinity_sync.orchestration.parts import StackState

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    skip = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "build", "dist", "__pycache__")
    shutil.copytree(CHECKOUT, source, ignore=skip, symlinks=True)
    command = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel installs, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    command = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel]
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True, capture_output=True)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's repository that has a ``tasks.py`` and a ``flows/`` of its own."""
    folder = tmp_path / "project"
    (folder / "flows").mkdir(parents=True)
    (folder / "flows/__init__.py").write_text("raise RuntimeError('the flows of the user')\n")
    (folder / "tasks.py").write_text("raise RuntimeError('the tasks of the user')\n")
    return folder


def run(project: Path, installed: Path, *command: str, **env: str) -> str:
    everything = {**os.environ, "PYTHONPATH": str(installed), **env}
    done = subprocess.run(command, cwd=project, env=everything, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_room(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "flows/save.py",
        "flows/prefect.yaml",
        "tasks/persist.py",
        "trinity_sync/py.typed",
        "trinity_sync/snapshot/image.py",
        "trinity_sync/storage/commit.py",
        "trinity_sync/orchestration/worker.py",
        "trinity_sync/fsdp/manager.py",
    } <= names
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/"))]


def test_a_trainer_never_imports_flows_or_tasks(
    project: Path, installed: Path, spool_folder: Path
) -> None:
    script = project / "train.py"
    script.write_text(
        "import sys, torch\n"
        "from trinity_sync.coordinator import CheckpointCoordinator\n"
        "saves = CheckpointCoordinator('ckpts')\n"
        "staged = saves.save(1, {'model': {'w': torch.ones(3)}})\n"
        "saves.close(timeout=0.1)\n"
        "print(staged.components, 'flows' in sys.modules, 'tasks' in sys.modules)\n"
    )
    said = run(
        project, installed, sys.executable, str(script), TRINITY_SYNC_SPOOL=str(spool_folder)
    )
    assert said.strip() == "('model',) False False"


def test_a_worker_started_in_the_users_folder_imports_the_installed_flows_on_ray_too(
    project: Path, installed: Path, stack: StackState, tmp_path: Path
) -> None:
    script = tmp_path / "bin" / "worker"
    script.parent.mkdir()
    script.write_text(
        "import os\n"
        "from trinity_sync.settings import Settings\n"
        "os.chdir(Settings().home)\n"  # as the command `trinity-sync worker` does
        "import flows, ray\n"
        "ray.init(address=os.environ['RAY_ADDRESS'], log_to_driver=False)\n"
        "def where():\n"
        "    import flows.save, tasks.persist\n"
        "    return flows.__file__, tasks.persist.__file__\n"
        "print(flows.__file__, *ray.get(ray.remote(num_cpus=0)(where).remote()))\n"
    )
    for place in run(project, installed, sys.executable, str(script)).split():
        assert str(project) not in place


def test_the_command_starts_from_the_wheel(project: Path, installed: Path) -> None:
    said = run(project, installed, sys.executable, "-m", "trinity_sync.cli", "--help")
    assert "trinity-sync" in said or "Usage" in said
