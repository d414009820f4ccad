"""The wheel: whole, and not disturbed by a user's own ``tasks.py`` and ``flows/``.

It is installed as users install it, into a virtual environment, and used from a repository whose
``flows`` and ``tasks`` raise when they are imported, with that repository on ``PYTHONPATH``.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path

import pytest

from trinity_sync.orchestration import stack as stack_module
from trinity_sync.orchestration.parts import StackState
from trinity_sync.settings import Settings
from trinity_sync.storage.steps import require_committed

CHECKOUT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    skip = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "demo-output", "__pycache__")
    shutil.copytree(CHECKOUT, source, ignore=skip, symlinks=True)
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run([*PIP, *map(str, command)], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with the wheel, and the packages that it needs from here."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    binaries, python = folder / "bin", folder / "bin/python"
    command = ["--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run([*PIP, *map(str, command)], check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    here = sysconfig.get_paths()["purelib"]
    (site / "needed.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return binaries


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's repository that has a ``tasks.py`` and a ``flows/`` of its own."""
    folder = tmp_path / "project"
    (folder / "flows").mkdir(parents=True)
    (folder / "flows/__init__.py").write_text("raise RuntimeError('the flows of the user')\n")
    (folder / "tasks.py").write_text("raise RuntimeError('the tasks of the user')\n")
    return folder


def environment(project: Path, **changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(project), **changes}


def run(project: Path, *command: str | Path, **changes: str) -> str:
    env = environment(project, **changes)
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_the_wheel_holds_every_room_and_the_deployments(wheel: Path) -> None:
    content = zipfile.ZipFile(wheel)
    names = set(content.namelist())
    rooms = [
        path.relative_to(CHECKOUT).as_posix()
        for room in ("flows", "tasks", "trinity_sync")
        for path in (CHECKOUT / room).rglob("*.py")
    ]
    assert {*rooms, "trinity_sync/py.typed"} <= names
    assert content.read("flows/prefect.yaml") == (CHECKOUT / "prefect.yaml").read_bytes()
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/"))]


def test_the_command_starts_from_the_wheel(project: Path, installed: Path) -> None:
    assert "trinity-sync ls ckpts" in run(project, installed / "trinity-sync", "--help")


def test_a_training_saves_and_never_imports_flows_or_tasks(
    project: Path, installed: Path, stack: StackState
) -> None:
    script = project / "train.py"
    script.write_text(
        "import sys, torch\n"
        "from trinity_sync.coordinator import CheckpointCoordinator\n"
        "with CheckpointCoordinator('ckpts') as saves:\n"
        "    saves.save(1, {'model': {'w': torch.ones(3)}})\n"
        "print(CheckpointCoordinator.__module__, 'flows' in sys.modules, 'tasks' in sys.modules)\n"
    )
    said = run(project, installed / "python", script)
    assert said == "trinity_sync.coordinator False False"
    assert require_committed(project / "ckpts", 1).run == 1


def test_a_script_that_starts_the_stack_keeps_its_own_flows(
    project: Path, installed: Path, stack: StackState
) -> None:
    script = project / "start.py"
    script.write_text(
        "import sys\n"
        "from trinity_sync.orchestration import stack\n"
        "state = stack.up(worker=False)\n"  # server and Ray are given, so it only deploys
        "print(state.api_url, 'flows' in sys.modules, 'ray' in sys.modules)\n"
    )
    home = str(project / "home")
    said = run(project, installed / "python", script, TRINITY_SYNC_HOME=home)
    assert said == f"{stack.api_url} False False"


def test_deploying_takes_the_installed_flows(
    project: Path, installed: Path, stack: StackState
) -> None:
    said = run(project, installed / "trinity-sync", "deploy")
    assert "save-step/save-step in work pool trinity-sync" in said.splitlines()


def test_a_worker_takes_the_installed_flows_here_and_on_ray(
    project: Path, installed: Path, stack: StackState, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path / "home", work_pool="packaging")
    own = {"TRINITY_SYNC_HOME": str(settings.home), "TRINITY_SYNC_WORK_POOL": "packaging"}
    log = tmp_path / "worker.log"
    command = [installed / "python", "-m", "trinity_sync.orchestration.serve"]
    with log.open("w") as output:
        worker = subprocess.Popen(
            command, cwd=project, env=environment(project, **own), stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + 90
        while not stack_module.status(settings).workers_online:
            assert worker.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(30)
