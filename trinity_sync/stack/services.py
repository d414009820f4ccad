"""Start the services of a stack on one machine: Prefect server, Ray node and flow worker.

`require_refusals` proves that services refuse connections without credentials. Both protections are
those of other programs: Ray's token and the Prefect server's password. A version that ignores the
variable with which it is configured would run without it, and whoever reaches a service can run
code as its user.
"""

import fcntl
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from trinity_sync.client.prefect_connection import bypass_proxies, find_other_user
from trinity_sync.errors import StackError
from trinity_sync.fs.atomic import replace_file
from trinity_sync.fs.locks import open_lock_file
from trinity_sync.fs.process import read_process_namespace
from trinity_sync.orchestration.package_paths import INSTALLED, PACKAGES, TASK_PROCESSES
from trinity_sync.settings import LOCAL_HOST, RAY_FOLDER, Settings, StackSettings, stack_variable
from trinity_sync.stack import daemon
from trinity_sync.stack.daemon import Daemon, free_port

WORKER_MODULE = "trinity_sync.orchestration.worker_main"
SERVER_MODULE = "trinity_sync.stack.prefect_server"
RAY_MODULE = "trinity_sync.stack.ray_node"
LOCK_FILE = "stack.lock"
"""File in the home of the stack that `up` or `down` locks, and each daemon, by its bytes."""
PASSWORD_FILE = "server_password"
"""File in the home of the stack with what the Prefect UI asks for, as ``user:password``."""
RAY_ADDRESS = stack_variable("ray", "address")
NO_AUTHORITY = Path(__file__).with_name("no_authority.pem")
"""A certificate whose key was thrown away, for processes that use plain HTTP. Prefect's client
loads a file of authorities nevertheless; all take 40 ms, and a save creates a dozen clients."""

ANSWER_S, HEARTBEAT_S = 5.0, 15.0
"""Seconds in which Ray answers, and within which a worker has a heartbeat: it has one at a poll."""
_OF_RAY = "gcs_server", "raylet"
_QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # others are kept for a minute: each uses 0.5% of a core
    "RAY_num_workers_soft_limit": f"{TASK_PROCESSES}",
    "RAY_idle_worker_killing_time_threshold_ms": "60000",
    "RAY_prestart_worker_first_driver": "0",  # the flow worker starts those that it needs
    "RAY_enable_metrics_collection": "false",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # after `uv run`, each process would be another one
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_COLORS": "false",  # to look for what to color takes half of a line's 0.25 ms
    # one transaction a second for the states of all tasks (Prefect rounds down; 0 is no pause)
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "30",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_BATCH_SIZE": "1000",
}

_OWN_SERVER = {
    # calls that each client of each flow run would make first; a server of the user may need them
    "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false",
    "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
}

_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray replaces 127.0.0.1 by another address of the machine and listens on all, unless told so."""

_RAY_JOB_VARIABLES = "RAY_ADDRESS", "RAY_NAMESPACE", "RAY_JOB_CONFIG", "RAY_RUNTIME_ENV_HOOK"
"""How variables begin that are for jobs of another Ray cluster, and what these start."""


@dataclass(frozen=True)
class StackState:
    """Addresses and daemons of a stack. A daemon is None if it is external or was not requested."""

    api_url: str = ""
    api_auth: str = ""
    """``user:password`` of the server, if this stack generated it."""
    ray_address: str = ""
    ray_folder: str = ""
    """Temporary folder of the Ray node, if this stack started it."""
    ray_auth: dict[str, str] | None = None
    """Environment variables that a connection to the Ray node needs, if this stack started it."""
    host: str = ""
    """Address of this machine's server and Ray node; "" if it has neither."""
    settings: dict[str, Any] | None = None
    """Settings that the stack was started with, by section and key."""
    config: str = ""
    """Path of the file that ``--config`` or ``TRINITY_SYNC_CONFIG`` named for them; "" if neither
    did."""
    joined: bool = False
    """Whether the server and the Ray head node belong to the stack of another machine."""
    server: Daemon | None = None
    ray: Daemon | None = None
    worker: Daemon | None = None
    namespace: str = field(default_factory=read_process_namespace)
    """Machine, boot and PID namespace in which the daemons have their pids."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs where this process sees no pids, as in another container."""
        return self.namespace != read_process_namespace()

    @property
    def daemons(self) -> list[Daemon]:
        """The daemons of this stack, in the order in which they are stopped."""
        return [part for part in (self.worker, self.ray, self.server) if part]

    @property
    def lives(self) -> bool:
        """Whether there are daemons, and all of them run."""
        return bool(self.daemons) and all(part.lives for part in self.daemons)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a trainer needs to use the stack, without those of its Ray cluster."""
        variables = {"PREFECT_API_URL": self.api_url, "PREFECT_API_AUTH_STRING": self.api_auth}
        return {name: value for name, value in variables.items() if value}

    def with_external(self, api_url: str, ray_address: str) -> "StackState":
        """Return the stack with an external server or Ray cluster; "" keeps its own."""
        state = self
        if api_url not in ("", self.api_url):
            state = replace(state, api_url=api_url, api_auth="", server=None)
        if ray_address not in ("", self.ray_address):
            state = replace(state, ray_address=ray_address, ray_folder="", ray_auth=None, ray=None)
        return state


def make_home(home: Path) -> None:
    """Create the home of a stack, and let only this user write there.

    The stack's processes start in it, so Python imports from it first.

    Raises:
        StackError: It belongs to another user who does not protect it, or is in another user's
            folder of a folder that everyone may write, such as ``/var/tmp``.
        OSError: It cannot be created.
    """
    home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    above = home.parent.lstat()
    if home.parent.parent.stat().st_mode & 0o002 and above.st_uid not in (0, os.getuid()):
        raise StackError(
            f"{home.parent} belongs to another user, who could run code in home {home} of the "
            "stack. Set TRINITY_SYNC_HOME to a folder of your own."
        )
    home.mkdir(mode=0o700, exist_ok=True)
    found = home.stat()
    if found.st_uid == os.getuid():
        home.chmod(stat.S_IMODE(found.st_mode) & ~0o022)
    elif found.st_uid or found.st_mode & 0o022:
        raise StackError(
            f"others than this user may write home {home} of the stack, and could run code there. "
            "Set TRINITY_SYNC_HOME to a folder of your own, such as one below it."
        )


def start_server(settings: Settings, stack: StackSettings, state: StackState) -> StackState:
    """Start a Prefect server, and return the stack with it; it may not be ready yet.

    The port of the URL in ``state`` is used again if it is one of the settings' ports (see
    `free_port`) and free.
    """
    host = stack.server.host
    port = free_port(state.api_url, host, first=stack.server.port)
    url = f"http://{host}:{port}/api"
    auth = _server_auth(settings, stack, state)
    state = replace(state, api_url=url, api_auth=auth, host=host, server=None)
    command = ["-m", SERVER_MODULE, "server", "start", "--host", host, "--port", str(port)]
    env = {**build_environment(settings, stack, state), **_prefect_home(settings)}
    if auth:
        env["PREFECT_SERVER_API_AUTH_STRING"] = auth
    # a profile of the caller's PREFECT_HOME, the path of a server behind a proxy, and its pages
    for key in ("PROFILE", "SERVER_API_BASE_PATH", "SERVER_API_DEFAULT_LIMIT", "API_DEFAULT_LIMIT"):
        env.pop(f"PREFECT_{key}", None)
    daemon.make_private_folder(Path(env["PREFECT_HOME"]))  # its database
    server = _start("server", command, settings, env)
    return replace(state, server=server)


def is_server_ready(state: StackState) -> bool:
    """Return whether the server is ready for requests."""
    try:  # it speaks HTTP: loading authorities at each poll took 0.1 of a core from its start
        answer = httpx.get(f"{state.api_url}/health", timeout=5, trust_env=False, verify=False)
    except httpx.HTTPError:  # also if another server uses its port
        return False
    port = urlsplit(state.api_url).port
    ours = daemon.list_addresses(state.server.pid) if state.server else [("", port)]
    return answer.status_code == 200 and port in (each[1] for each in ours)


def start_ray(settings: Settings, stack: StackSettings, state: StackState) -> StackState:
    """Start a Ray head node, and return the stack with it; it may not be ready yet.

    The port of the Ray address in ``state`` is used again if it is free.
    """
    host = stack.server.host
    port = free_port(state.ray_address, host)
    auth = _ray_auth(settings.home) | (_LOOPBACK if host == LOCAL_HOST else {})
    state = replace(state, ray=None, ray_address="", ray_auth=auth, host=host)
    options = ["--head", f"--port={port}", f"--node-ip-address={host}"]
    # free ports, should another release start these servers: nodes of a machine do not conflict
    options += [f"--ray-client-server-port={free_port()}", f"--dashboard-port={free_port()}"]
    options += ["--include-dashboard=false", "--no-monitor", "--include-log-monitor=false"]
    return _start_ray_node(options, settings, stack, state)


def join_ray(settings: Settings, stack: StackSettings, state: StackState) -> StackState:
    """Start a Ray node that joins the cluster of ``state``, and return the stack with it.

    It may not have joined yet.
    """
    options = [f"--address={state.ray_address}"]
    if stack.server.host != LOCAL_HOST:  # otherwise Ray detects it
        options += [f"--node-ip-address={stack.server.host}"]
    return _start_ray_node(options, settings, stack, state)


def _start_ray_node(
    options: list[str], settings: Settings, stack: StackSettings, state: StackState
) -> StackState:
    remove_ray_folder(state)
    # the paths of its sockets must be shorter than 108 characters, whatever TMPDIR says
    state = replace(state, ray_folder=tempfile.mkdtemp(prefix=RAY_FOLDER, dir="/tmp"))
    command = ["-m", RAY_MODULE, "start", "--block", "--disable-usage-stats", *options]
    command += [f"--temp-dir={_ray_temp(state)}", f"--node-name={settings.node}"]
    command += [f"--num-cpus={stack.ray.cpus or os.cpu_count() or 1}"]
    command += [f"--object-store-memory={stack.ray.object_store_mb * 10**6}"]
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    env = build_environment(settings, stack, state)
    env["RAY_worker_niceness"] = str(stack.worker.nice)
    ray = _start("ray", command, settings, env)
    return replace(state, ray=ray)


_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a gRPC client sends first; the server then sends its settings."""


def answers(state: StackState, name: str) -> bool:
    """Return whether a service of the stack answers, or has a heartbeat."""
    if name == "server":
        return is_server_ready(state)
    try:
        if name == "worker" and state.worker:
            return abs(time.time() - Path(state.worker.log).stat().st_mtime) < HEARTBEAT_S
        assert state.ray
        for folder in ("logs", "sockets"):  # without which it runs no task
            (_ray_temp(state) / "session_latest" / folder).stat()
        parts = {each.name(): each.pid for each in daemon.find_family(state.ray)}
        of_ray = [parts.get(name) for name in (_OF_RAY[1:] if state.joined else _OF_RAY)]
        if None in of_ray:  # `ray start` outlives a raylet that its agent has ended
            return False
        for address in chain.from_iterable(map(daemon.list_addresses, filter(None, of_ray))):
            with socket.create_connection(address, ANSWER_S) as call:
                call.sendall(_HTTP2)
                call.recv(1)
    except (TimeoutError, FileNotFoundError):
        return False
    except (OSError, psutil.NoSuchProcess):  # of TLS, or of what ends
        pass
    return True


def has_ray_joined(ray: Daemon) -> bool:
    """Return whether a node of `join_ray` is part of the cluster."""
    with Path(ray.log).open("rb") as log:
        log.seek(ray.log_from)
        return b"Ray runtime started" in log.read()


def find_ray_address(state: StackState) -> str:
    """Return the address of the Ray node; empty until it is ready."""
    path = _ray_temp(state) / "ray_current_cluster"
    return path.read_text().strip() if path.is_file() else ""


def _ray_temp(state: StackState) -> Path:
    """Return the folder of its sockets and logs, which Ray makes writable for all users."""
    return Path(state.ray_folder) / "ray"


def remove_ray_folder(state: StackState) -> None:
    """Remove the temporary folder of the stack's Ray node."""
    if state.ray_folder:
        shutil.rmtree(state.ray_folder, ignore_errors=True)


def start_worker(settings: Settings, stack: StackSettings, state: StackState) -> StackState:
    """Start the flow worker, and return the stack with it; it may not be online yet.

    It deploys, unless the stack is that of another machine.
    """
    env = build_environment(settings, stack, state)
    command = ["-m", WORKER_MODULE, *([] if state.joined else ["--deploy"])]
    worker = _start("worker", command, settings, env)
    return replace(state, worker=worker)


def build_environment(
    settings: Settings, stack: StackSettings, state: StackState
) -> dict[str, str]:
    """Return the environment of the stack's own processes.

    It is the caller's environment without variables of a Ray job, and with the addresses of the
    stack and all settings, so these processes read no file.
    """
    env = {**os.environ, **_QUIET, **_retention_variables(stack), **state.environment}
    env = {name: each for name, each in env.items() if not name.startswith(_RAY_JOB_VARIABLES)}
    if state.ray_auth:  # Ray takes a token in the environment before that in a file
        env = {name: value for name, value in env.items() if not name.startswith("RAY_AUTH_")}
        env.update(state.ray_auth)
    env.update(settings.to_variables())
    env.update(stack.to_variables())
    env[RAY_ADDRESS] = state.ray_address
    # first: the caller's PYTHONPATH may have other flows or tasks, or a trainer's packages
    paths = [PACKAGES, INSTALLED, *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    if state.server:
        env.update(_OWN_SERVER | _prefect_home(settings))
        env.pop("PREFECT_PROFILE", None)
        if csrf := env.get("PREFECT_SERVER_CSRF_PROTECTION_ENABLED"):  # of the caller's servers
            env["PREFECT_CLIENT_CSRF_SUPPORT_ENABLED"] = csrf
    if state.ray_folder:
        env["RAY_TMPDIR"] = state.ray_folder
    bypass_proxies(
        env,
        *([state.api_url] if state.server or state.joined else []),
        *([state.ray_address] if state.ray or state.joined else []),
        *([state.host] if state.host else []),
    )
    if state.api_url.startswith("http://"):
        env.setdefault("PREFECT_API_SSL_CERT_FILE", str(NO_AUTHORITY))
    return env


def _retention_variables(stack: StackSettings) -> dict[str, str]:
    """Return how long the server keeps events and flow runs; events take 90% of the space."""
    events_s, runs_s = (
        kept.total_seconds() for kept in (stack.server.keep_events, stack.server.keep_runs)
    )
    return {
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": str(events_s > 0).lower(),
        "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": f"PT{events_s or 1:.0f}S",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(runs_s),
    }


def accepts_connections(address: str) -> bool:
    """Return whether a server listens at ``host:port`` or a URL; True if neither names a port."""
    with suppress(OSError, ValueError):
        parsed = urlsplit(address if "//" in address else f"//{address}")
        port = parsed.port or {"http": 80, "https": 443}.get(parsed.scheme)
        if parsed.hostname and port:
            socket.create_connection((parsed.hostname, port), timeout=5).close()
        return True
    return False


def _start(name: str, command: list[str], settings: Settings, env: dict[str, str]) -> Daemon:
    log = settings.home / "logs" / f"{name}.log"
    with open_lock_file(settings.home / LOCK_FILE) as lock:  # `has_daemons` tries it for a moment
        lock.wait(lambda: lock.try_acquire_range(fcntl.F_RDLCK), TIMEOUT_S)
        command = [sys.executable, *command]
        return daemon.start(command, env=env, cwd=settings.home, log=log, fds=[lock.fd])


def has_daemons(home: Path) -> bool:
    """Return whether a daemon of a home lives, also in other containers."""
    with suppress(OSError), open_lock_file(home / LOCK_FILE) as lock:
        return not lock.try_acquire_range(fcntl.F_WRLCK)
    return True  # it cannot be told


def _prefect_home(settings: Settings) -> dict[str, str]:
    home = settings.home / "prefect"
    return {"PREFECT_HOME": str(home), "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(home / "ui")}


def _ray_auth(home: Path) -> dict[str, str]:
    """Return the variables of a token of the stack, unless the caller configures one.

    Any process that joins can run code. A caller who disables tokens does so for a training.
    """
    if os.environ.get("RAY_AUTH_MODE", "disabled") not in ("", "disabled"):
        return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
    # the token itself: processes that Ray starts later need no file
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _secret(home, "ray_token")}


def _server_auth(settings: Settings, stack: StackSettings, state: StackState) -> str:
    """Return ``user:password`` for the server: as before, since trainers may have it.

    Empty if it asks for none, or the caller configures a password. It is a new one if another user
    has the port, who may have been told the old one.
    """
    if stack.server.password == "none" or os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        return ""
    if find_other_user(state.api_url or f"http://{stack.server.host}:{stack.server.port}"):
        (settings.home / PASSWORD_FILE).unlink(missing_ok=True)
        state = replace(state, api_auth="")
    return state.api_auth or _secret(settings.home, PASSWORD_FILE, user="trinity-sync:")


def _secret(home: Path, name: str, *, user: str = "") -> str:
    """Return 64 random digits after ``user``, from a file of the stack that is created once."""
    path = home / name
    if not _is_secret(path):
        make_home(home)
        replace_file(path, user + secrets.token_hex(32), mode=0o600)
    return path.read_text()


def _is_secret(path: Path) -> bool:
    """Return whether a file exists that only this user can read and write."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        private = found.st_uid == os.getuid() and not found.st_mode & 0o077
        return private and stat.S_ISREG(found.st_mode) and found.st_size > 0
    return False


TIMEOUT_S = 30.0
TASK = f"""
import sys, ray
ray.init(sys.argv[1], namespace="prefect", log_to_driver=False, logging_level="ERROR")
ray.get(ray.remote(num_cpus=0, max_retries=0)(lambda: None).remote(), timeout={TIMEOUT_S})
"""


def try_task(settings: Settings, stack: StackSettings, state: StackState) -> str:
    """Have Ray run a task that does nothing, and return why it cannot; "" if it can."""
    return _try(TASK, state.ray_address, build_environment(settings, stack, state))


def _try(program: str, address: str, env: dict[str, str] | None = None) -> str:
    """Run a program, and return why it fails, as the last line that it writes; "" if it does not.

    It is a process of its own, so that the caller may fork later, which gRPC does not support.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, address],
            env=env,
            cwd="/",  # not what lies in the caller's folder
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2 * TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return "DEADLINE_EXCEEDED"
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return said[-1] if done.returncode else ""


CALL = f"""
import sys, grpc
with grpc.insecure_channel(sys.argv[1], [("grpc.enable_http_proxy", 0)]) as channel:
    try:
        channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout={TIMEOUT_S})
    except grpc.RpcError as error:
        sys.exit(error.code().name)
"""
"""A call to a Ray cluster, with neither a token nor a certificate."""


def require_refusals(stack: StackSettings, state: StackState) -> list[str]:
    """Check that the stack's own server and Ray cluster refuse connections without credentials.

    Return the names of those that refused. A server with the password ``none`` and services that
    the stack did not start are not checked.

    Raises:
        StackError: A service accepts such a connection, or does not answer.
    """
    refused = []
    if state.server and stack.server.password != "none":
        if accepts_requests(state.api_url):
            raise StackError(
                f"the Prefect server at {state.api_url} accepts requests without its password, so "
                "any user of this machine could run code. Run trinity-sync doctor, which names "
                "unsupported packages; install supported ones, and start the stack again"
            )
        refused.append("server")
    if state.ray_auth:
        if accepts_calls(state.ray_address):
            raise StackError(
                f"the Ray cluster at {state.ray_address} accepts connections without its token, so "
                "whoever reaches it could run code as this user. Run trinity-sync down, install "
                '"ray[default]>=2.56" into the environment of the stack, and start it again'
            )
        refused.append("Ray")
    return refused


def accepts_requests(api_url: str) -> bool:
    """Return whether a Prefect server answers a request without credentials.

    Raises:
        StackError: It does not answer at all.
    """
    try:
        answer = httpx.get(f"{api_url}/admin/version", timeout=TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise StackError(
            f"cannot check that the Prefect server at {api_url} requires its password: {error!r}. "
            "Look into its log, and start the stack again"
        ) from error
    return answer.status_code not in (401, 403)


def accepts_calls(address: str) -> bool:
    """Return whether a Ray cluster answers a call without a token.

    Raises:
        StackError: It neither answers nor refuses the call.
    """
    if not (why := _try(CALL, address)):
        return True
    # with TLS, a connection without a certificate of the cluster does not get as far as the token
    if why == "UNAUTHENTICATED" or (why == "UNAVAILABLE" and os.environ.get("RAY_USE_TLS") == "1"):
        return False
    raise StackError(
        f"cannot check that the Ray cluster at {address} requires its token: {why}. Look into its "
        "log, and start the stack again"
    )
