"""The wheel: whole, and neither disturbed by a user's ``tasks.py`` and ``flows/`` nor in their way.

It is installed as users install it, into a virtual environment, and used from a repository whose
``flows`` and ``tasks`` raise when they are imported, with that repository on ``PYTHONPATH``.
"""

import os
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from tests.conftest import left_of
from tests.support.environments import make_environment
from tests.support.waiting import until
from trinity_sync import Settings
from trinity_sync.settings import StackSettings
from trinity_sync.stack import daemon, local_stack
from trinity_sync.stack.daemon import free_port
from trinity_sync.stack.services import StackState

CHECKOUT = Path(__file__).parents[2]
PACKAGES = "trinity_sync/packages/"


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
        for room, below in (("flows", PACKAGES), ("tasks", PACKAGES), ("trinity_sync", ""))
        for path in (CHECKOUT / room).rglob("*.py")
    }
    assert {*rooms, "trinity_sync/py.typed", "trinity_sync/cli/report.html.j2"} <= names
    deployments = content.read(f"{PACKAGES}flows/prefect.yaml")
    assert deployments == (CHECKOUT / "prefect.yaml").read_bytes()


def test_the_wheel_puts_nothing_but_trinity_sync_where_it_is_installed(wheel: Path) -> None:
    at_the_top = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert at_the_top == {
        "trinity_sync",
        f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info",
    }


def test_the_command_of_a_trainers_environment_starts_that_of_the_stack(
    project: Path, stack_environment: Path, client: Path
) -> None:
    path = os.pathsep.join([str(client), str(stack_environment), "/usr/bin", "/bin"])
    for command in ("trinity-sync", client / "trinity-sync"):
        assert "trinity-sync ls ckpts" in run(project, "env", command, "--help", PATH=path)


@pytest.mark.parametrize("order", ["client client", "client other client", "client shim client"])
def test_clients_alone_ask_each_other_once_and_the_first_one_runs_the_command(
    project: Path, wheel: Path, client: Path, order: str
) -> None:
    if "other" in order:
        make_environment(project / "other", wheel)
    shims = project / "shims"  # as pyenv has them: each start puts its own environment first again
    shims.mkdir()
    (shims / "trinity-sync").write_text(
        f'#!/bin/sh\nPATH="{client}:$PATH" exec {client}/trinity-sync "$@"\n'
    )
    (shims / "trinity-sync").chmod(0o755)
    folders = {"client": str(client), "other": "other/bin", "shim": str(shims)}
    path = [*(folders[name] for name in order.split()), "/usr/bin", "/bin"]
    said = run(project, "env", "trinity-sync", "--version", PATH=os.pathsep.join(path))
    assert f"{client / 'python'}\n" in said


def test_the_command_of_the_stack_is_found_before_and_behind_what_cannot_be_run(
    project: Path, stack_environment: Path, client: Path
) -> None:
    (project / "trinity-sync").mkdir()  # a checkout, say, where PATH has the current folder
    broken = project / "broken/trinity-sync"
    broken.parent.mkdir()
    broken.write_text("#!/no/such/python\n")
    broken.chmod(0o755)
    for folders in (["", broken.parent, client, stack_environment], [stack_environment, client]):
        path = os.pathsep.join([*map(str, folders), "/usr/bin", "/bin"])
        said = run(project, client / "trinity-sync", "--help", PATH=path)
        assert "trinity-sync ls ckpts" in said


def test_a_script_that_starts_the_stack_keeps_its_own_flows(
    project: Path, stack_environment: Path, stack: StackState
) -> None:
    script = project / "start.py"
    script.write_text(
        "import sys\n"
        "from trinity_sync import Settings\n"
        "from trinity_sync.stack import local_stack\n"
        # server and Ray are given, so it only starts a worker, which deploys
        "state = local_stack.up(Settings())\n"
        "print(state.api_url, 'flows' in sys.modules, 'ray' in sys.modules)\n"
        "local_stack.down(Settings())\n"
    )
    home = str(project / "home")
    own = {"TRINITY_SYNC_HOME": home, "TRINITY_SYNC_STACK__RAY__ADDRESS": stack.ray_address}
    own |= stack.ray_auth or {}
    assert (
        run(project, stack_environment / "python", script, **own) == f"{stack.api_url} False False"
    )


NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}


@contextmanager
def ray_of_another_environment(
    folder: Path, *, ray: str = "", auth: Mapping[str, str] = NO_TOKEN
) -> Iterator[str]:
    """Address of a Ray node whose environment has no trinity_sync, but ``ray``, if it is named."""
    venv.create(folder, symlinks=True, with_pip=bool(ray))
    python = folder / "bin/python"
    if ray:
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", ray], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_paths()["purelib"])  # not what its .pth name
    scratch = tempfile.mkdtemp(prefix="trinity-ray-", dir="/tmp")
    address = f"127.0.0.1:{free_port()}"
    command = [str(python), "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += ["--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}"]
    command += [f"--temp-dir={scratch}", "--num-cpus=1", "--object-store-memory=80000000"]
    command += ["--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
    command += ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
    env = {**os.environ, **auth, "PYTHONPATH": ""}  # it may name this checkout
    node = daemon.start(command, env=env, cwd=folder, log=folder / "logs/ray.log")
    try:
        until(lambda: "Ray runtime started" in Path(node.log).read_text(), "the Ray node")
        yield address
    finally:
        daemon.stop(node, 10)
        shutil.rmtree(scratch, ignore_errors=True)


def worker_on(address: str, stack_environment: Path, project: Path, **own: str) -> str:
    """Why a worker of the installed stack does not start on a Ray cluster."""
    done = subprocess.run(
        [stack_environment / "python", "-m", "trinity_sync.orchestration.worker_main"],
        env=environment(project, TRINITY_SYNC_STACK__RAY__ADDRESS=address, **NO_TOKEN, **own),
        cwd=project,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_ray_cluster_of_another_environment_runs_tasks_with_the_stacks_python(
    project: Path, stack_environment: Path, stack: StackState, tmp_path: Path
) -> None:
    with ray_of_another_environment(tmp_path / "theirs") as address:
        why = worker_on(address, stack_environment, project, TRINITY_SYNC_HOME=str(tmp_path))
        assert "No module named 'trinity_sync'" in why
        assert "Set ray.python" in why
        settings = Settings(home=tmp_path / "home")
        own = {
            "TRINITY_SYNC_HOME": str(settings.home),
            "TRINITY_SYNC_STACK__WORKER__POOL": "another-ray",
            "TRINITY_SYNC_STACK__RAY__ADDRESS": address,
            "TRINITY_SYNC_STACK__RAY__PYTHON": str(stack_environment / "python"),
            **NO_TOKEN,
        }
        await_online(settings, stack_environment, project, own, tmp_path / "worker.log")


@pytest.mark.slow
def test_a_ray_cluster_of_another_version_is_refused_and_both_versions_are_named(
    project: Path, stack_environment: Path, stack: StackState, tmp_path: Path
) -> None:
    with ray_of_another_environment(tmp_path / "theirs", ray="ray==2.59.0") as address:
        why = worker_on(address, stack_environment, project, TRINITY_SYNC_HOME=str(tmp_path))
    assert "2.59.0" in why
    assert version("ray") in why
    assert address in why


def test_a_worker_takes_the_installed_flows_here_and_on_ray(
    project: Path, stack_environment: Path, stack: StackState, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path / "home")
    own = {
        "TRINITY_SYNC_HOME": str(settings.home),
        "TRINITY_SYNC_STACK__WORKER__POOL": "packaging",
        "TRINITY_SYNC_STACK__RAY__ADDRESS": stack.ray_address,
        **(stack.ray_auth or {}),
    }
    await_online(settings, stack_environment, project, own, tmp_path / "worker.log")


def await_online(
    settings: Settings, stack_environment: Path, project: Path, own: dict[str, str], log: Path
) -> None:
    """Start a worker of the installed stack, and end it by Ctrl-C once the server knows it."""
    command = [stack_environment / "trinity-sync", "worker"]
    with log.open("w") as output:
        worker = subprocess.Popen(
            command, cwd=project, env=environment(project, **own), stdout=output, stderr=output
        )
    try:
        pool = StackSettings(worker={"pool": own["TRINITY_SYNC_STACK__WORKER__POOL"]})
        until(
            lambda: local_stack.status(settings, pool).workers_online or worker.poll() is not None,
            "the worker to be online",
        )
        assert worker.poll() is None, log.read_text()
        family = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
    finally:
        worker.send_signal(signal.SIGINT)
        worker.wait(250)
    assert not left_of(family)
