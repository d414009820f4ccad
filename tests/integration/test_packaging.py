"""The wheel: whole, and neither disturbed by a user's ``tasks.py`` and ``flows/`` nor in their way.

It is installed as users install it, into a virtual environment, and used from a repository whose
``flows`` and ``tasks`` raise when they are imported, with that repository on ``PYTHONPATH``.
"""

import os
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
PIPELINE = "trinity_sync/pipeline/"
PIP = [sys.executable, "-m", "pip"]


def install(wheel: Path, folder: Path) -> Path:
    """The ``bin`` of a new environment with the wheel alone."""
    venv.create(folder, symlinks=True)
    command = ["--python", folder / "bin/python", "install", "--no-deps", "--no-index", wheel]
    subprocess.run([*PIP, *map(str, command)], check=True, capture_output=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def without_stack(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment that has none of the stack's packages."""
    return install(wheel, tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with the wheel, and the packages that it needs from here."""
    folder = tmp_path_factory.mktemp("installed")
    binaries = install(wheel, folder)
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
    rooms = {
        f"{below}{path.relative_to(CHECKOUT).as_posix()}"
        for room, below in (("flows", PIPELINE), ("tasks", PIPELINE), ("trinity_sync", ""))
        for path in (CHECKOUT / room).rglob("*.py")
    }
    assert {*rooms, "trinity_sync/py.typed"} <= names
    deployments = content.read(f"{PIPELINE}flows/prefect.yaml")
    assert deployments == (CHECKOUT / "prefect.yaml").read_bytes()


def test_the_wheel_puts_nothing_but_trinity_sync_where_it_is_installed(wheel: Path) -> None:
    at_the_top = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert at_the_top == {
        "trinity_sync",
        f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info",
    }


def test_the_command_starts_from_the_wheel(project: Path, installed: Path) -> None:
    assert "trinity-sync ls ckpts" in run(project, installed / "trinity-sync", "--help")


def test_the_command_of_a_trainers_environment_gives_way_to_that_of_the_stack(
    project: Path, installed: Path, without_stack: Path
) -> None:
    path = os.pathsep.join([str(without_stack), str(installed), "/usr/bin", "/bin"])
    for command in ("trinity-sync", without_stack / "trinity-sync"):
        assert "trinity-sync ls ckpts" in run(project, "env", command, "--help", PATH=path)


def test_without_a_stack_the_command_says_how_to_install_one(
    project: Path, without_stack: Path
) -> None:
    path = os.pathsep.join([str(without_stack), str(without_stack), "/usr/bin", "/bin"])
    done = subprocess.run(
        ["env", "trinity-sync", "ls", "ckpts"],
        env=environment(project, PATH=path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "has the client alone" in done.stderr
    assert 'uv tool install "trinity-sync[stack]"' in done.stderr
    assert "Traceback" not in done.stderr


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
    own = {"TRINITY_SYNC_HOME": home, "TRINITY_SYNC_RAY_ADDRESS": stack.ray_address}
    said = run(project, installed / "python", script, **own)
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
    own = {
        "TRINITY_SYNC_HOME": str(settings.home),
        "TRINITY_SYNC_WORK_POOL": "packaging",
        "TRINITY_SYNC_RAY_ADDRESS": stack.ray_address,
        **(stack.ray_auth or {}),
    }
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
