"""The three parts of a stack on one machine: how each is started, and how it is seen to work."""

import json
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import urllib.request
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import certifi

from trinity_sync.errors import StackError
from trinity_sync.fs.atomic import replace_file
from trinity_sync.orchestration.pipeline import INSTALLED, PACKAGES
from trinity_sync.settings import Settings
from trinity_sync.stack import daemon
from trinity_sync.stack.daemon import Daemon
from trinity_sync.stack.ports import free_port

WORKER_MODULE = "trinity_sync.orchestration.worker_main"
SERVER_MODULE = "trinity_sync.stack.prefect_server"

_QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # keep the processes of a save's parallel tasks: starting one costs seconds
    "RAY_num_workers_soft_limit": "8",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "30",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_BATCH_SIZE": "1000",
}

_OF_A_TRAINING = {"RAY_ADDRESS", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR"}
"""What a job of another Ray cluster has in its environment, and passes on to all that it starts."""


@dataclass(frozen=True)
class StackState:
    """Where a stack is. A part that is None is somebody else's, or was not asked for."""

    api_url: str = ""
    api_auth: str = ""
    """``user:password`` that the server asks for, if this stack has made it up."""
    ray_address: str = ""
    ray_folder: str = ""
    """Temporary folder of the Ray node, if it is this stack's."""
    ray_auth: dict[str, str] | None = None
    """Variables by which a process is let into the Ray node, if it is this stack's."""
    host: str = ""
    """Address at which this machine's server and Ray node are reached; "" if it has neither."""
    joined: bool = False
    """Whether the server and the head of the Ray cluster are those of another machine's stack."""
    server: Daemon | None = None
    ray: Daemon | None = None
    worker: Daemon | None = None

    @property
    def daemons(self) -> list[Daemon]:
        """The parts of this stack, those first that depend on others."""
        return [part for part in (self.worker, self.ray, self.server) if part]

    @property
    def lives(self) -> bool:
        """Whether there are daemons and all of them run."""
        return bool(self.daemons) and all(part.lives for part in self.daemons)

    @property
    def environment(self) -> dict[str, str]:
        """What a trainer needs in its environment to use the stack. Its Ray cluster is its own."""
        named = {"PREFECT_API_URL": self.api_url, "PREFECT_API_AUTH_STRING": self.api_auth}
        return {name: value for name, value in named.items() if value}

    def where_named(self, api_url: str, ray_address: str) -> "StackState":
        """The stack with a server or Ray cluster that is named instead of its own; "" for none."""
        state = self
        if api_url not in ("", self.api_url):
            state = replace(state, api_url=api_url, api_auth="", server=None)
        if ray_address not in ("", self.ray_address):
            state = replace(state, ray_address=ray_address, ray_folder="", ray_auth=None, ray=None)
        return state


def make_home(home: Path) -> None:
    """Make the home of a stack, and let nobody else write there.

    It is where its processes are started, so Python looks there first for what they import.

    Raises:
        StackError: it is another user's, or others may write it and that cannot be changed.
        OSError: it cannot be made.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = home.stat()
    if found.st_uid == os.getuid():
        home.chmod(stat.S_IMODE(found.st_mode) & ~0o022)
    elif found.st_uid or found.st_mode & 0o022:
        raise StackError(
            f"others than this user may write home {home} of the stack, and what they put there "
            "would run. Set TRINITY_SYNC_HOME to a folder of your own, such as one below it."
        )


def start_server(settings: Settings, state: StackState) -> StackState:
    """Start a Prefect server, at the URL of ``state`` if its port is free."""
    host = settings.host
    port = free_port(state.api_url, host)
    auth = _server_auth(settings)
    url = f"http://{host}:{port}/api"
    state = replace(state, api_url=url, api_auth=auth, host=host, server=None)
    command = ["-m", SERVER_MODULE, "server", "start", "--host", host, "--port", str(port)]
    env = {**environment(settings, state), **_prefect_home(settings)}
    if auth:
        env["PREFECT_SERVER_API_AUTH_STRING"] = auth
    env.pop("PREFECT_PROFILE", None)  # it is a section of a file in the caller's PREFECT_HOME
    daemon.make_private(Path(env["PREFECT_HOME"]))  # its database
    server = _start("server", command, settings, env)
    daemon.lower_priority(server, settings.nice)
    return replace(state, server=server)


def server_answers(state: StackState) -> bool:
    """Whether the server is ready for requests."""
    try:
        with urllib.request.urlopen(f"{state.api_url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):  # the latter of who has taken its port meanwhile
        return False


def start_ray(
    settings: Settings, state: StackState, *, num_cpus: int | None, object_store_mb: int
) -> StackState:
    """Start a Ray head node, at the port of ``state`` if it is free."""
    port = free_port(state.ray_address, settings.host)
    auth = _ray_auth(settings.home)
    state = replace(state, ray=None, ray_address="", ray_auth=auth, host=settings.host)
    options = ["--head", f"--port={port}"]
    options += [f"--node-ip-address={settings.host}"]
    # any port that is free, so that two nodes on a machine do not meet
    options += [f"--ray-client-server-port={free_port()}", f"--dashboard-port={free_port()}"]
    options += ["--include-dashboard=false", "--no-monitor", "--include-log-monitor=false"]
    return _start_ray_node(options, settings, state, num_cpus, object_store_mb)


def join_ray(
    settings: Settings, state: StackState, *, num_cpus: int | None, object_store_mb: int
) -> StackState:
    """Start a Ray node that joins the cluster at the address of ``state``."""
    options = [f"--address={state.ray_address}"]
    if settings.host != Settings.model_fields["host"].default:  # else Ray finds out
        options += [f"--node-ip-address={settings.host}"]
    return _start_ray_node(options, settings, state, num_cpus, object_store_mb)


def _start_ray_node(
    options: list[str],
    settings: Settings,
    state: StackState,
    num_cpus: int | None,
    object_store_mb: int,
) -> StackState:
    remove_ray_folder(state)
    # the paths of its sockets must be shorter than 108 characters, whatever TMPDIR says
    state = replace(state, ray_folder=tempfile.mkdtemp(prefix="trinity-ray-", dir="/tmp"))
    command = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *options]
    command += [f"--temp-dir={_ray_temp(state)}"]
    command += [f"--node-name={settings.node}"]
    command += [f"--num-cpus={num_cpus or os.cpu_count() or 1}"]
    command += [f"--object-store-memory={object_store_mb * 10**6}"]
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    env = environment(settings, state)
    env["RAY_worker_niceness"] = str(settings.nice)
    return replace(state, ray=_start("ray", command, settings, env))


def ray_has_joined(ray: Daemon) -> bool:
    """Whether a node of `join_ray` is part of the cluster."""
    with Path(ray.log).open("rb") as log:
        log.seek(ray.log_from)
        return b"Ray runtime started" in log.read()


def ray_answers(state: StackState) -> str | None:
    """Address of the Ray node once it is ready, else None."""
    path = _ray_temp(state) / "ray_current_cluster"
    return path.read_text().strip() if path.is_file() else None


def _ray_temp(state: StackState) -> Path:
    """Where its sockets and logs are. Ray lets everybody write there, our folder above nobody."""
    return Path(state.ray_folder) / "ray"


def remove_ray_folder(state: StackState) -> None:
    """Remove what a Ray node of the stack has left on disk."""
    if state.ray_folder:
        shutil.rmtree(state.ray_folder, ignore_errors=True)


def start_worker(settings: Settings, state: StackState) -> StackState:
    """Start the flow worker."""
    env = environment(settings, state)
    worker = _start("worker", ["-m", WORKER_MODULE], settings, env)
    daemon.lower_priority(worker, settings.nice)
    return replace(state, worker=worker)


def environment(settings: Settings, state: StackState) -> dict[str, str]:
    """Environment of the stack's own processes: the caller's, its URLs and all settings.

    What names the caller's Ray cluster, or his job there, is left out.
    """
    env = {**os.environ, **_QUIET, **_history(settings), **state.environment}
    for name in [name for name in env if name in _OF_A_TRAINING]:
        del env[name]
    if state.ray_auth:  # Ray takes a token in the environment before that in a file
        env = {name: value for name, value in env.items() if not name.startswith("RAY_AUTH_")}
        env.update(state.ray_auth)
    for name, value in settings.model_dump(mode="json").items():
        text = value if isinstance(value, str) else json.dumps(value)
        env[f"TRINITY_SYNC_{name.upper()}"] = text
    env["TRINITY_SYNC_RAY_ADDRESS"] = state.ray_address
    env["TRINITY_SYNC_HOME"] = str(settings.home.absolute())
    env["TRINITY_SYNC_SPOOL"] = str(settings.spool.absolute())
    # ours first: the user's may well have a folder named flows or tasks, or a trainer's packages
    paths = [PACKAGES, INSTALLED, *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    if state.server:
        env.update(_prefect_home(settings))
        env.pop("PREFECT_PROFILE", None)
    if state.ray_folder:
        env["RAY_TMPDIR"] = state.ray_folder
    if state.api_url.startswith("http://"):
        env.setdefault("PREFECT_API_SSL_CERT_FILE", str(_one_authority(settings)))
    return env


def _history(settings: Settings) -> dict[str, str]:
    """How long the server remembers: its events are nine tenths of what a save adds to it."""
    return {
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": str(settings.keep_events_h > 0).lower(),
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": f"PT{settings.keep_events_h * 3600 or 1:.0f}S",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(settings.keep_runs_h * 3600),
    }


def _one_authority(settings: Settings) -> Path:
    """A file with one certificate authority, for processes that talk plain HTTP to Prefect.

    Prefect's client reads the file whatever the URL; all authorities take 40 ms a client, of which
    a save makes a dozen.
    """
    path = settings.home.absolute() / "one_authority.pem"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        end = "-----END CERTIFICATE-----\n"
        first = Path(certifi.where()).read_text().partition(end)[0]
        replace_file(path, first + end)
    return path


def accepts_connections(address: str) -> bool:
    """Whether something listens at ``host:port`` or at a URL's; True if there is no telling."""
    try:
        parsed = urlsplit(address if "//" in address else f"//{address}")
        port = parsed.port or {"http": 80, "https": 443}.get(parsed.scheme)
        if parsed.hostname and port:
            socket.create_connection((parsed.hostname, port), timeout=5).close()
    except (OSError, ValueError):
        return False
    return True


def _start(name: str, command: list[str], settings: Settings, env: dict[str, str]) -> Daemon:
    home = settings.home.absolute()
    log = home / "logs" / f"{name}.log"
    return daemon.start([sys.executable, *command], env=env, cwd=home, log=log)


def _prefect_home(settings: Settings) -> dict[str, str]:
    home = settings.home.absolute() / "prefect"
    return {"PREFECT_HOME": str(home), "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui")}


def _ray_auth(home: Path) -> dict[str, str]:
    """A token of the stack's own, unless the caller has decided about tokens already.

    Ray listens on all interfaces, and whoever may join it may run any code.
    """
    if os.environ.get("RAY_AUTH_MODE"):
        return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
    path = _secret(home, "ray_token")
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def _server_auth(settings: Settings) -> str:
    """User and password of the server, where others than this machine reach it.

    Empty where the caller has decided about a password already.
    """
    if settings.host == Settings.model_fields["host"].default:
        return ""
    if os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        return ""
    return f"trinity-sync:{_secret(settings.home, 'server_password').read_text()}"


def _secret(home: Path, name: str) -> Path:
    """A file of the stack's with 64 random digits, which are made up once."""
    path = home.absolute() / name
    if not _is_secret(path):
        replace_file(path, secrets.token_hex(32), mode=0o600)
    return path


def _is_secret(path: Path) -> bool:
    """Whether a file is there that nobody else has been able to read or write."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    alone = found.st_uid == os.getuid() and not found.st_mode & 0o077
    return alone and stat.S_ISREG(found.st_mode) and found.st_size > 0
