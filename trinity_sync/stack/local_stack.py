"""Run a whole stack on one machine: Prefect server, Ray head node and flow worker, as daemons.

A server or Ray cluster that is configured (``PREFECT_API_URL``,
`ray.address` of the settings) is used as it is, and only the others are started.
``home/stack.json`` records them, so that any later process can inspect or stop them.
``RAY_ADDRESS`` names the Ray cluster of a training and is not read: the stack has its own.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

from trinity_sync.client.prefect_api import PrefectApi, ask_server
from trinity_sync.client.prefect_connection import hide_password
from trinity_sync.client.saver_control import CONNECT_S, LOG, answers, list_savers
from trinity_sync.errors import ConfigError, PrefectApiError, StackError
from trinity_sync.orchestration.package_paths import find_missing_deployments
from trinity_sync.orchestration.quantities import format_bytes
from trinity_sync.settings import CONFIG, LOCAL_HOST, Settings, StackSettings, use_config_file
from trinity_sync.snapshot.spool import list_job_spools
from trinity_sync.stack import daemon, services
from trinity_sync.stack.daemon import Daemon, is_own_address
from trinity_sync.stack.services import StackState, require_refusals
from trinity_sync.stack.state_file import (
    INVITATION,
    lock_home,
    read_invitation,
    read_last_addresses,
    read_state,
    write_invitation,
    write_state,
)

API_URL, RAY_ADDRESS = "PREFECT_API_URL", "ray.address"
NAMES = "server", "ray", "worker"
LOOKS = 60
"""Looks at the processes of a stack for each at its answers."""
LEAST_ROOM = 32_000_000
"""Bytes on the disk of the server below which it may record nothing."""
STOP_S = 20.0
"""Seconds after which a service that was asked to stop is killed."""


ServiceState = Literal[
    "running", "unresponsive", "dead", "unknown", "external", "away", "absent", "not used", "idle"
]


@dataclass(frozen=True)
class ServiceStatus:
    """A service of the stack."""

    name: str
    """``server``, ``ray`` or ``worker``, and each ``saver`` of this node."""
    state: ServiceState
    """``running``, ``unresponsive`` or ``dead`` for the stack's own, ``unknown`` in another PID
    namespace, ``external`` or ``away`` for an external one, otherwise ``absent``, and ``not used``
    where nothing names a stack. A saver that does not run is ``idle``, or ``dead`` while saves wait
    for it."""
    pid: int | None = None
    """Process id."""
    url: str = ""
    """Its address, without a password."""
    log: str = ""
    """File with its output."""


@dataclass(frozen=True)
class WaitingSaves:
    """Saves of a job in the memory of this node that are neither committed nor failed."""

    root: str
    steps: tuple[int, ...]
    """Their steps."""
    since: float
    """Time of the first image."""


@dataclass(frozen=True)
class StackStatus:
    """The stack of this node."""

    home: Path
    """Its folder."""
    pool: str
    """Prefect work pool of the deployments."""
    workers_online: int | None
    """Number of online workers; null if no server answers."""
    waiting_runs: int | None
    """Due flow runs that no worker has acquired; null if no server answers."""
    undeployed: tuple[str, ...]
    """Deployments that the work pool lacks."""
    paused: tuple[str, ...]
    """The work pool and those of its queues that are paused."""
    reason: str
    """Why the server does not answer, or records nothing."""
    changed: tuple[str, ...]
    """Settings that the running stack does not have, as ``server.port: 4200, now 5000``."""
    overrides: tuple[str, ...]
    """A sentence for each service that the environment overrides."""
    services: tuple[ServiceStatus, ...]
    """The services."""
    waiting: tuple[WaitingSaves, ...] = ()
    """Saves in the memory of this node, by job."""


def up(
    settings: Settings,
    stack: StackSettings | None = None,
    *,
    timeout_s: float = 180.0,
    joining: StackState | None = None,
    anew: bool = False,
) -> StackState:
    """Start a stack, and return when all services work.

    A running stack is returned as it is. If only its flow worker is missing or does not answer,
    that is started. If its server or Ray node has died or does not answer, all of it is stopped and
    started again: at the same addresses, with the settings that it was started with. Saves in
    flight are then retried from their images.

    ``stack`` are the settings of a new stack, by default those of the environment and the file.
    ``timeout_s`` is for each service, see `daemon.await_ready`. ``joining`` is the stack of another
    machine that this machine joins. A running stack is started again ``anew``, with these settings.

    Raises:
        StackError: A service did not start or accepts connections without credentials, or an
            external one cannot be reached. Server and Ray node run on once they work; otherwise
            the services that this call started are stopped.
    """
    config = "" if stack else os.environ.get(CONFIG, "")
    stack = stack or StackSettings()
    with lock_home(settings.home):
        before = _read_own(settings) or StackState()
        same = StackState() if anew else before
        joining = before if anew and before.joined else joining
        if joining:
            _require_no_stack(settings, same)
            stack = _with_own_address(stack)
            joining = replace(joining, host=stack.server.host)
        if running := read_running_settings(same):
            stack, config = running, before.config
        _refuse_any_host(stack.server.host)
        external = _find_external(settings, stack, joining or before)
        made_with: Any = {"settings": stack.model_dump(mode="json"), "config": config}
        works = kept = now = same if _serves(same, external) else StackState()
        try:
            if kept.daemons:
                has_ray = now.ray or now.joined or "ray_address" in external
                if has_ray and now.worker and _works(now, "worker"):
                    _deploy(settings, stack, now, timeout_s)
                    return now
                if now.worker:
                    daemon.stop(now.worker, STOP_S)
                if not has_ray:
                    now = _start(services.start_ray, settings, stack, now)
            else:
                _stop(before)
                now = joining or (same if same.daemons else read_last_addresses(settings.home))
                now = replace(now, server=None, ray=None, worker=None, ray_folder="", **made_with)
                now = _start_server_and_ray(settings, stack, now, external, timeout_s)
            require_refusals(stack, replace(now, ray_auth=None))
            works = replace(now, ray=None, ray_folder="", worker=None)
            now, works = _await_ray(now, timeout_s), kept  # a Ray that admits all ends everything
            require_refusals(stack, now)
            works = replace(now, worker=None)
            now = _start_worker(settings, stack, now, timeout_s)
            write_state(settings.home, now)
            write_invitation(settings, now)
        except BaseException as error:
            if isinstance(error, StackError) and works is not kept and works.daemons:
                kept = before = _keep_working(works, stack, error)
            _stop(read_state(settings.home) or StackState(), keep=kept)
            write_state(settings.home, before)
            raise
        _yield_to_trainings(now, stack)
    return now


def _yield_to_trainings(state: StackState, stack: StackSettings) -> None:
    """Lower the priority of services that work: on a busy node a start would take minutes."""
    for each in state.daemons:
        daemon.lower_priority(each, stack.worker.nice)


def _keep_working(works: StackState, stack: StackSettings, error: StackError) -> StackState:
    """Let the services that work run on after a failed start, whose error then names them."""
    names = " and ".join(part for part in ("server", "ray") if getattr(works, part))
    error.hint = f"what works runs on ({names}); trinity-sync up starts the rest"
    _yield_to_trainings(works, stack)
    return works


def keep_up(settings: Settings, state: StackState, **arguments: Any) -> None:
    """Start again what ends or hangs of a stack, as `up` does, until `down` stops it.

    Raises:
        StackError: A service did not start.
    """
    while True:
        looks = count()
        while state.lives and (next(looks) % LOOKS or _works(state)):
            time.sleep(daemon.POLL_S)
        with lock_home(settings.home):  # `down` holds it until it has stopped all
            state = read_state(settings.home) or StackState()
        if not state.daemons:
            return
        if not _works(state):  # otherwise another process has started it
            state = up(settings, **arguments)


def _works(state: StackState, *names: str) -> bool:
    """Return whether the stack's own services, by default all, run and answer."""
    found = (check_service(state, each).state for each in names or NAMES)
    return all(each in ("running", "absent") for each in found)


def _serves(state: StackState, external: Mapping[str, Any]) -> bool:
    """Return whether the stack's server and Ray node answer, and external ones are those of now."""
    is_same = all(getattr(state, name) == address for name, address in external.items())
    return is_same and _works(state, "server", "ray")


def _read_own(settings: Settings) -> StackState | None:
    state = read_state(settings.home)
    if state and state.is_elsewhere:
        raise StackError(
            f"the stack in {settings.home} runs in another PID namespace (a container), or on "
            "another machine. Start and stop it there, or set TRINITY_SYNC_HOME to another folder"
        )
    return state


def _require_no_stack(settings: Settings, before: StackState) -> None:
    if before.daemons:
        raise StackError(
            f"home {settings.home} has a stack already. Run trinity-sync down first, or set "
            "TRINITY_SYNC_HOME to another folder of this machine"
        )


def _with_own_address(stack: StackSettings) -> StackSettings:
    """Return settings for a machine that joins, whose file may be that of the first machine."""
    if is_own_address(stack.server.host):
        return stack
    server = stack.server.model_copy(update={"host": LOCAL_HOST})  # Ray detects the address
    return stack.model_copy(update={"server": server})


def join(settings: Settings, invitation: Path, **arguments: Any) -> StackState:
    """Join the stack of another machine: start a Ray node and a flow worker here.

    ``invitation`` is a copy of the other machine's `INVITATION`. ``home`` of the settings has no
    stack yet. The other arguments are those of `up`.

    Raises:
        StackError: This machine has a stack already, the file is not an invitation, or a service
            did not start.
    """
    try:
        joining = read_invitation(invitation)
    except (OSError, ValueError) as error:
        raise StackError(
            f"{invitation} is not an invitation of a stack ({error}). Pass a copy of {INVITATION} "
            "in the home of the stack that this machine joins"
        ) from error
    return up(settings, joining=joining, **arguments)


def down(settings: Settings) -> bool:
    """Stop the services that `up` started, and return whether there was a stack.

    Ray's temporary folder is removed. Database and logs stay in ``home``, and images that are not
    persisted yet in the spool. A service is killed after `STOP_S`.
    """
    if read_state(settings.home) is None:
        return False
    with lock_home(settings.home):
        state = _read_own(settings)
        if state:
            _stop(state)
        write_state(settings.home, StackState())
    return state is not None


def status(settings: Settings, stack: StackSettings | None = None) -> StackStatus:
    """Return the status of each service, and of the work pool on the Prefect server."""
    state = read_state(settings.home) or StackState()
    changed = find_changes(state, stack)
    stack = read_running_settings(state) or stack or StackSettings()
    pool, api_url = stack.worker.pool, state.api_url or os.environ.get(API_URL, "")
    urls = api_url, state.ray_address or stack.ray.address, ""
    found = tuple(map(partial(check_service, state), NAMES, urls))
    online = waiting = None
    undeployed, paused = list[str](), list[str]()
    is_alone = not uses_stack(settings, stack)
    reason = "" if is_alone else describe_lack_of_room(settings.home)
    if found[0].state not in ("dead", "unresponsive", "absent"):

        async def ask(api: PrefectApi) -> tuple[int, int, list[str], list[str]]:
            online, waiting = await api.read_workers(pool), await api.count_waiting_runs(pool)
            missing = await find_missing_deployments(api, pool)
            paused = await api.list_paused(pool) if await api.read_work_pool(pool) else []
            return len(online), waiting, missing, paused

        try:
            online, waiting, undeployed, paused = ask_server(settings, ask, api_url)
        except PrefectApiError as error:
            reason = str(error)
    lists = tuple(undeployed), tuple(paused), reason, changed, tuple(_list_overrides(state, stack))
    if is_alone:
        found = tuple(replace(each, state="not used") for each in found)
    found = (*found, *check_savers(settings, is_alone=is_alone))
    saves = tuple(list_waiting_saves(settings.spool))
    return StackStatus(settings.home, pool, online, waiting, *lists, found, saves)


def describe_lack_of_room(home: Path) -> str:
    """Return why the server records nothing; empty if its disk has room."""
    if not home.is_dir() or (free := shutil.disk_usage(home).free) >= LEAST_ROOM:
        return ""
    return f"{format_bytes(free)} free in {home}: the server records nothing. Make room on its disk"


def list_waiting_saves(spool: Path) -> Iterator[WaitingSaves]:
    """Yield what waits for its commit in the memory of this node, by job."""
    for job in list_job_spools(spool):
        if waiting := [image.ticket for image in job.tickets()[0] if not image.failed]:
            steps = tuple(sorted({each.step for each in waiting}))
            yield WaitingSaves(waiting[0].root, steps, min(each.sealed_at for each in waiting))


def uses_stack(settings: Settings, stack: StackSettings) -> bool:
    """Return whether a stack is used: a setting, an address or the file of a stack says so."""
    named = os.environ.get(API_URL) or stack.ray.address or settings.saver == "stack"
    return bool(named) or read_state(settings.home) is not None


def check_savers(settings: Settings, *, is_alone: bool) -> list[ServiceStatus]:
    """Return the status of each saver of this node that lives, or that none does.

    It is dead if saves wait for it, and ``is_alone`` says that no stack takes them.
    """
    log = str(settings.home / LOG)
    if living := list_savers(settings.spool):
        states: dict[bool, ServiceState] = {True: "running", False: "unresponsive"}
        found = ((pid, states[answers(settings.spool, name)]) for name, pid in living.items())
        return [ServiceStatus("saver", state, pid or None, log=log) for pid, state in found]
    before = time.time() - CONNECT_S  # one may have just been started
    waits = any(each.since < before for each in list_waiting_saves(settings.spool))
    return [ServiceStatus("saver", "dead" if is_alone and waits else "idle", log=log)]


def find_changes(state: StackState, stack: StackSettings | None = None) -> tuple[str, ...]:
    """Return what differs between the settings and those of a stack, see `StackStatus.changed`.

    The settings are by default those of the environment and of the file that the stack was started
    with.
    """
    running = read_running_settings(state)
    if running is None:
        return ()
    try:
        with use_config_file(state.config):
            return tuple((stack or StackSettings()).list_changes(running))
    except ConfigError as error:
        return tuple(str(error).splitlines())


def read_running_settings(state: StackState | None) -> StackSettings | None:
    """Return the settings that a stack was started with; None if none of its daemons runs."""
    if state is None or not state.settings or not any(part.lives for part in state.daemons):
        return None
    return StackSettings(**state.settings)


def _refuse_any_host(host: str) -> None:
    if host in ("0.0.0.0", "::"):
        raise StackError(
            f"server.host is {host}, which other machines cannot connect to. Set it to an address "
            "of this machine; hostname -I lists them"
        )


def _start(
    start: Callable[[Settings, StackSettings, StackState], StackState],
    settings: Settings,
    stack: StackSettings,
    state: StackState,
) -> StackState:
    """Start a service, and record it in ``home``, or stop it if that fails."""
    now = start(settings, stack, state)
    try:
        write_state(settings.home, now)
    except BaseException:
        _stop(now, keep=state)
        raise
    return now


def _start_server_and_ray(
    settings: Settings,
    stack: StackSettings,
    state: StackState,
    external: Mapping[str, Any],
    timeout_s: float,
) -> StackState:
    """Start the server and the Ray node that are not external; Ray may not be ready yet."""
    if state.joined:
        return _start(services.join_ray, settings, stack, state)
    now = replace(state, **external)
    if "api_url" not in external:
        now = _start(services.start_server, settings, stack, now)
    if "ray_address" not in external:
        now = _start(services.start_ray, settings, stack, now)
    return _await_server(settings, stack, now, timeout_s)


def _await_server(
    settings: Settings, stack: StackSettings, state: StackState, timeout_s: float
) -> StackState:
    """Wait until the server is ready; it starts at another port if another process was faster."""
    while server := state.server:
        try:
            is_ready = partial(services.is_server_ready, state)
            daemon.await_ready("the Prefect server", server, is_ready, timeout_s)
            break
        except StackError:
            if server.lives or not services.accepts_connections(state.api_url):
                raise
        state = _start(services.start_server, settings, stack, state)
    return state


def _await_ray(state: StackState, timeout_s: float) -> StackState:
    """Wait until the Ray node is ready, and return the stack with its address."""
    ray = state.ray
    if ray is None:
        return state
    if state.joined:
        daemon.await_ready("the Ray node", ray, partial(services.has_ray_joined, ray), timeout_s)
        return state
    find_address = partial(services.find_ray_address, state)
    daemon.await_ready("the Ray node", ray, find_address, timeout_s)
    return replace(state, ray_address=find_address())


def _deploy(settings: Settings, stack: StackSettings, state: StackState, timeout_s: float) -> None:
    """Apply deployments that a stack that works lacks; otherwise its worker does at its start.

    It is done in a separate process: the caller may be a user's script with other packages
    ``flows`` and ``tasks``, and must not import Ray before it has the token of the stack's cluster.
    """
    find = partial(find_missing_deployments, pool=stack.worker.pool)
    if state.joined or not ask_server(settings, find, state.api_url, answer_s=timeout_s):
        return
    env = services.build_environment(settings, stack, state)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trinity_sync", "deploy"],
            env=env,
            cwd=settings.home,
            capture_output=True,
            text=True,
            errors="replace",  # the output may have any bytes
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise StackError(
            f"the deployments were not registered at {state.api_url} within {timeout_s:g} s. Look "
            "into the server's log, or try again with a longer time-out."
        ) from None
    if done.returncode:
        raise StackError(done.stderr.strip().removeprefix("error: "))


def _start_worker(
    settings: Settings, stack: StackSettings, state: StackState, timeout_s: float
) -> StackState:
    def read_online() -> set[str]:
        find = partial(PrefectApi.read_workers, pool=stack.worker.pool)
        return ask_server(settings, find, state.api_url, answer_s=timeout_s)

    before = read_online()
    now = _start(services.start_worker, settings, stack, state)
    assert now.worker is not None  # just started
    daemon.await_ready(
        "the flow worker",
        now.worker,
        lambda: bool(read_online() - before),  # each start has a new name
        timeout_s,
    )
    return now


def _stop(state: StackState, *, keep: StackState | None = None) -> None:
    """Stop the daemons of ``state`` that are not in ``keep``."""
    for service in state.daemons:
        if keep is None or service not in keep.daemons:
            daemon.stop(service, STOP_S)
    if keep is None or state.ray_folder != keep.ray_folder:
        services.remove_ray_folder(state)


def _find_external(settings: Settings, stack: StackSettings, state: StackState) -> dict[str, Any]:
    """Return the addresses of the external services that are configured, by field of the state.

    Raises:
        StackError: Nothing answers there, or at the addresses of the stack that this machine has
            joined; or the stack has a service of its own at another address.
    """
    if state.joined:
        _require_joined_stack(state)
        return {}
    found = {}
    for name, value, own, field in (
        (API_URL, os.environ.get(API_URL, ""), state.server, "api_url"),
        (RAY_ADDRESS, stack.ray.address, state.ray, "ray_address"),
    ):
        address = getattr(state, field)
        if own and value not in ("", address):
            raise StackError(
                f"{name} is {value}, but the stack in {settings.home} has its own at "
                f"{address}. Unset {name}, or run trinity-sync down first."
            )
        if own or not value:
            continue
        if not services.accepts_connections(value):
            raise StackError(
                f"nothing answers at {name}={hide_password(value)}. Start it there, or unset "
                f"{name} to start one here."
            )
        found[field] = value
    return found


def _require_joined_stack(state: StackState) -> None:
    for what, there in (("Prefect server", state.api_url), ("Ray cluster", state.ray_address)):
        if not services.accepts_connections(there):
            raise StackError(
                f"the {what} of the stack that this machine has joined does not answer at {there}. "
                f"Start that stack, or leave it (trinity-sync down) and join with its current "
                f"{INVITATION}"
            )


def _list_overrides(state: StackState, stack: StackSettings) -> Iterator[str]:
    """Yield a sentence for each service of the stack that the settings override."""
    for name, override, url in (
        (API_URL, os.environ.get(API_URL, ""), state.api_url),
        (RAY_ADDRESS, stack.ray.address, state.ray_address),
    ):
        if url and override and override.rstrip("/") != url:
            yield (
                f"{name} is {hide_password(override)}, so processes started from this environment "
                f"use it instead of {url} of this stack. Unset it, or run trinity-sync down."
            )


def check_service(state: StackState, name: str, url: str = "") -> ServiceStatus:
    """Return the status of a service of the stack, or of an external one at ``url``."""
    process: Daemon | None = getattr(state, name)
    shown = hide_password(url)
    if process is None:
        there = url and services.accepts_connections(url)
        return ServiceStatus(name, "external" if there else "away" if url else "absent", url=shown)
    now: ServiceState = "unknown"
    if not state.is_elsewhere:
        now = daemon.check(name, process, partial(services.answers, state, name))
    return ServiceStatus(name, now, process.pid, shown, process.log)
