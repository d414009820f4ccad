"""One real stack for the whole test session: Prefect server, Ray node and flow worker.

It is of the tests' own environment, or, where that is a trainer's, of the one that
``TESTS_STACK`` names: the ``bin`` of the stack's environment.
"""

import gc
import logging
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.support.database import lay_tables
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.stack import local_stack
from trinity_sync.stack.services import StackState, build_environment

if TYPE_CHECKING:  # a unit test needs neither, and they take seconds
    from tests.integration.prefect_api import Api
    from trinity_sync.client.coordinator import CheckpointCoordinator

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_WAIT_POLICY": "passive",  # next to other tests, threads that spin take a core
    "TRINITY_SYNC_CONFIG": os.devnull,  # not the user's own file
    "TRINITY_SYNC_STACK__SERVER__PORT": "0",
    # tests on all cores await savers and stacks, which have sessions of their own
    "TRINITY_SYNC_STACK__WORKER__NICE": "0",
    # no test looks at the UI or its blocks, which take a server seconds to copy and to register
    "PREFECT_UI_ENABLED": "false",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "TRINITY_SYNC_SAVER": "stack",  # many tests commit what others save, or nothing does
}
STACK_VARIABLES = {
    "TRINITY_SYNC_STACK__IO__MAX_MB_PER_S": "160",
    # a test that begins at three at night sees no more runs than another
    "TRINITY_SYNC_STACK__MAINTENANCE__SCHEDULES": "false",
}
"""Settings of the session's stack."""
os.environ.update(QUIET)
os.environ["PYTHONFAULTHANDLER"] = "1"  # a process that crashes says where
OURS = ("PREFECT_", "RAY_", "TRINITY_SYNC_")
STACK = os.environ.get("TESTS_STACK", "")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts background jobs so, and the processes that tests interrupt would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """``changes`` instead of all that the caller had set for Prefect, Ray and us."""
    before = _ours(*changes)
    for name in before:
        del os.environ[name]
    os.environ.update(QUIET | changes)
    try:
        yield
    finally:  # what others have set meanwhile stays
        for name in _ours(*changes):
            del os.environ[name]
        os.environ.update(before)


def _ours(*more: str) -> dict[str, str]:
    names = (*OURS, *QUIET, *more)
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


def processes_of(state: StackState) -> list[psutil.Process]:
    """All processes of a stack, and the processes that they started."""
    parts = [psutil.Process(part.pid) for part in state.daemons]
    return [*parts, *(child for part in parts for child in part.children(recursive=True))]


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run on; a zombie does not."""
    return [each for each in processes if _runs(each)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def stack_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of the session's stack: a home and a spool of its own."""
    spool = Path(tempfile.mkdtemp(prefix=SPOOLS, dir="/dev/shm"))
    yield Settings(home=tmp_path_factory.mktemp("home"), spool=spool)
    shutil.rmtree(spool)


DEAD_PROXY = {
    name: "http://127.0.0.1:9"
    for scheme in ("http", "https", "all")
    for name in (f"{scheme}_proxy", f"{scheme}_PROXY".upper())
}
"""A proxy at which nothing listens, which no process of a stack may use for the stack itself."""


@contextmanager
def running_stack(
    settings: Settings, more: dict[str, str] | None = None, *, num_cpus: int = 2
) -> Iterator[StackState]:
    """A stack within the block, which the environment names there, with ``more`` in it."""
    own = {
        "TRINITY_SYNC_HOME": str(settings.home),
        "TRINITY_SYNC_SPOOL": str(settings.spool),
        "PREFECT_HOME": str(settings.home / "prefect"),
        "TRINITY_SYNC_STACK__RAY__CPUS": str(num_cpus),
        **STACK_VARIABLES,
    }
    if not STACK:
        lay_tables(settings)
    with environment(own | (more or {})), stopped_if_killed(settings):
        state = started(settings)
        os.environ.update(state.environment)
        refresh_prefect()
        try:
            yield state
        finally:
            local_stack.down(settings)
    refresh_prefect()


def started(settings: Settings) -> StackState:
    """The stack of this environment, or of the one that is named."""
    if not STACK:
        with pytest.MonkeyPatch.context() as patch:
            for name, proxy in DEAD_PROXY.items():
                patch.setenv(name, proxy)
            return local_stack.up(settings)
    env = build_environment(settings, StackSettings(), StackState())
    del env["PYTHONPATH"]  # with this environment's packages
    subprocess.run([f"{STACK}/trinity-sync", "up"], env=env, check=True, capture_output=True)
    found = local_stack.read_state(settings.home)
    assert found
    return found


def refresh_prefect() -> None:
    """Have Prefect, if it is here, read the environment again."""
    if not STACK:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


OF_STACKS = ("integration", "faults", "e2e")
"""Suites whose tests start and end parts of stacks."""
FILES = pytest.StashKey[set[Path]]()
"""Those with tests that ask for the session's stack, which run first."""
ENDING = pytest.StashKey[ExitStack]()
"""Ends the session's stack."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without collections of garbage, a third of the time, and leave that out."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order files: those of the stack, all others, and unit tests, of which none is long.

    ``FILES_SEED`` puts each group in another order.
    """
    if seed := os.environ.get("FILES_SEED"):
        paths = sorted({item.path for item in items})
        random.Random(seed).shuffle(paths)
        items.sort(key=lambda item: paths.index(item.path))
    files = {item.path for item in items if "stack" in getattr(item, "fixturenames", ())}
    config.stash[FILES], config.stash[ENDING] = files, ExitStack()
    unit = Path(__file__).parent / "unit"
    items.sort(key=lambda item: (item.path not in files, item.path.is_relative_to(unit)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have one worker begin with the files of the stack, and the others with the last ones.

    So there is one stack, and what waits for it leaves a core to what computes.
    """
    from xdist.scheduler import LoadFileScheduling

    class FromBothEnds(LoadFileScheduling):
        def _assign_work_unit(self, node: Any) -> None:
            if node is not self.nodes[0]:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return FromBothEnds(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the stack before the first file without it: idle, it takes a tenth of a core."""
    if item.path not in item.config.stash[FILES]:
        item.config.stash[ENDING].close()


@pytest.fixture(scope="session")
def stack(stack_settings: Settings, pytestconfig: pytest.Config) -> Iterator[StackState]:
    """The session's stack; from its start to its end, the environment names it."""
    with pytestconfig.stash[ENDING] as ending:
        yield ending.enter_context(_stack(stack_settings))


@contextmanager
def _stack(settings: Settings) -> Iterator[StackState]:
    with running_stack(settings) as state:
        yield state
        now = local_stack.read_state(settings.home) or state
        processes = processes_of(now) if now.lives else []
    assert not left_of(processes)
    assert not Path(now.ray_folder).exists()


STOP = """
import shutil, sys
if not sys.stdin.read():
    from trinity_sync.stack import local_stack
    from trinity_sync.settings import Settings
    home, spool = sys.argv[1:]
    try:
        local_stack.down(Settings(home=home, spool=spool))
    finally:
        shutil.rmtree(spool, ignore_errors=True)
"""


@contextmanager
def stopped_if_killed(settings: Settings) -> Iterator[None]:
    """A process that stops the stack should this one be killed, which would leave it to live on.

    It waits at a pipe for a word that all is well, or for its end without one.
    """
    watchdog = subprocess.Popen(
        [sys.executable, "-c", STOP, str(settings.home), str(settings.spool)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[1],
        start_new_session=True,
    )
    try:
        yield
    finally:
        watchdog.communicate(b"all is well")


@pytest.fixture
def api(stack: StackState) -> "Api":
    from tests.integration.prefect_api import Api

    return Api()


@pytest.fixture
def saves(
    stack: StackState, stack_settings: Settings, root: Path
) -> "Iterator[CheckpointCoordinator]":
    """A job on the session's stack."""
    from trinity_sync.client.coordinator import CheckpointCoordinator

    coordinator = CheckpointCoordinator(root, settings=stack_settings)
    yield coordinator
    coordinator.close()


SPOOLS = f"trinity_sync-test-{os.getpid()}-"
"""Begins the names of this process's folders in shared memory."""
SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Children that serve all tests."""
PARTS = re.compile(r" -m (trinity_sync\.(saver|stack|orchestration)|ray\.scripts)\b")
"""Parts of a stack."""
OF_PACKAGES = ("PYTEST_CURRENT_TEST", "RAY_CLIENT_MODE", "RAY_ENABLE_UV_RUN_RUNTIME_ENV")
"""Variables that pytest sets for each test, and Ray and veRL when they are imported."""
ENDS_S = 30.0
"""Seconds in which what a test has stopped has ended."""


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves behind what the next one would find.

    New variables with other names than ours are set by imports. Processes and spools that tests of
    stacks leave behind are looked for when their stack ends: its parts come and go with them. torch
    gets its number of threads again.
    """
    of_stack = any(Path(__file__).parent / suite in request.path.parents for suite in OF_STACKS)
    variables, modules, settings = dict(os.environ), dict(sys.modules), _read_settings()
    living = set() if of_stack else _find_living()
    torch = "torch.distributed" in sys.modules and sys.modules["torch"]
    threads = torch and torch.get_num_threads()
    yield
    if torch:
        torch.set_num_threads(threads)
    names = [name for name in os.environ.keys() - variables.keys() if name.startswith(OURS)]
    names += [name for name, value in variables.items() if os.environ.get(name) != value]
    changed = sorted({*names}.difference(OF_PACKAGES))
    for name in changed:
        os.environ.pop(name, None)
        os.environ.update({name: variables[name]} if name in variables else {})
    left = [f"variable {name}" for name in changed]
    now = _read_settings()
    left += [f"{name} {now[name]}" for name in settings if now[name] != settings[name]]
    replaced = [name for name in modules if sys.modules.get(name) is not modules[name]]
    # transformers replaces its own ones at the first use of a name
    left += [f"module {name}" for name in replaced if name.partition(".")[0] != "transformers"]
    os.chdir(str(settings["current folder"]))
    end = time.monotonic() + ENDS_S
    more: list[str] = []
    while not of_stack and (more := _describe(_find_living() - living, living)):
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    assert not left + more


def _read_settings() -> dict[str, object]:
    """Return what is set for all that runs in this process."""
    found: dict[str, object] = {
        "current folder": str(Path.cwd()),
        "umask": re.findall(r"Umask:\s*(\d+)", Path("/proc/self/status").read_text()),
        "time-out of sockets": socket.getdefaulttimeout(),
        "start method": multiprocessing.get_start_method(allow_none=True) or "fork",
        # Ray's import puts a folder of its own first, and a deployment then PACKAGES once more
        "sys.path": [each for each in dict.fromkeys(sys.path) if "site-packages" not in each],
        "disabled logging": logging.root.manager.disable,
    }
    # pytest's own time-out has the one, and torch's loaders, once in a process, the other
    of_tests = {*signal.Signals} - {signal.SIGALRM, signal.SIGCHLD}
    found |= {each.name: signal.getsignal(each) for each in of_tests}
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    found |= {name: resource.getrlimit(getattr(resource, name)) for name in limits}
    if "torch.distributed" in sys.modules:
        torch = sys.modules["torch"]
        found["torch"] = torch.get_default_dtype(), torch.distributed.is_initialized()
    return found


def _find_living() -> set[object]:
    """Return this process's spools, threads that run functions of tests, and ids of children."""
    found: set[object] = {path.name for path in Path("/dev/shm").glob(f"{SPOOLS}*")}
    for thread in threading.enumerate():  # pools, libraries and parts of a worker have others
        if str(getattr(getattr(thread, "_target", None), "__module__", "")).startswith("test"):
            found.add(thread)
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # of a thread that has ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _describe(left: set[object], before: set[object]) -> list[str]:
    """Return what is left and runs on, processes by their commands."""
    found = [str(each) for each in left if not isinstance(each, int)]
    for pid in left:
        with suppress(psutil.Error):
            process = psutil.Process(pid) if isinstance(pid, int) else None
            command = " ".join(process.cmdline()) if process else ""  # empty while it starts
            if not process or not left_of([process]) or any(each in command for each in SERVERS):
                continue
            spools = [each for each in before if isinstance(each, str)]
            about = command + process.environ().get("TRINITY_SYNC_SPOOL", "")
            if not (PARTS.search(command) and any(each in about for each in spools)):
                found.append(command or str(process))
    return found


@pytest.fixture(autouse=True)
def no_stack_unless_asked_for(
    request: pytest.FixtureRequest, nothing_is_left_behind: None
) -> Iterator[None]:
    """A test that does not ask for the session's stack does not find it in its environment."""
    if "stack" in request.fixturenames or "PREFECT_API_URL" not in os.environ:
        yield
        return
    with environment({}):
        refresh_prefect()
        yield
    refresh_prefect()


@pytest.fixture(autouse=True)
def no_run_key_of_another_test(nothing_is_left_behind: None) -> Iterator[None]:
    """veRL's checkpoint engine sets the key of a start for all that its process starts later."""
    yield
    os.environ.pop("TRINITY_SYNC_RUN_KEY", None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty folder for a job's files."""
    made = tmp_path / "ckpts"
    made.mkdir()
    return made


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], Callable[[], None]]]:
    """Lets a folder be read and not written, until the test ends or calls what this returns."""
    with ExitStack() as all_of_them:

        def make(folder: Path) -> Callable[[], None]:
            undo = all_of_them.enter_context(ExitStack())
            if os.getuid():
                for path in [folder, *folder.rglob("*")]:
                    mode = path.stat().st_mode
                    path.chmod(mode & ~0o222)
                    undo.callback(path.chmod, mode)
                return undo.close
            for options in (["--bind", str(folder)], ["-o", "remount,ro,bind"]):
                made = subprocess.run(["mount", *options, str(folder)], capture_output=True)
                if made.returncode:
                    pytest.skip(f"cannot mount a folder: {made.stderr.decode().strip()}")
                if "--bind" in options:
                    undo.callback(subprocess.run, ["umount", str(folder)], check=True)
            return undo.close

        yield make


@pytest.fixture
def spool_folder() -> Iterator[Path]:
    """A folder in shared memory."""
    folder = Path(tempfile.mkdtemp(prefix=SPOOLS, dir="/dev/shm"))
    yield folder
    # a training that has failed closes no coordinator, whose thread would make the folder again
    slots = sys.modules.get("trinity_sync.snapshot.slot_pool")
    for memory in [*slots._living] if slots else ():
        if memory._folder.is_relative_to(folder):
            memory.close()
    shutil.rmtree(folder)
