"""A whole stack on one machine: Prefect server, Ray head node and flow worker, as daemons.

What is named already (``PREFECT_API_URL``, ``TRINITY_SYNC_RAY_ADDRESS``) is used and never touched;
only what is missing is started. ``home/stack.json`` says what was, so that any later process can
look at it, mend it or stop it. ``RAY_ADDRESS`` names the cluster of a training, which has nothing
to do with the stack's: neither gets the other's.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trinity_sync.errors import StackError
from trinity_sync.settings import Settings
from trinity_sync.stack import daemon, services
from trinity_sync.stack.daemon import Daemon, Patience
from trinity_sync.stack.services import StackState
from trinity_sync.stack.state_file import (
    INVITATION,
    lock_home,
    read_invitation,
    read_last_addresses,
    read_state,
    write_invitation,
    write_state,
)

API_URL, RAY_ADDRESS = "PREFECT_API_URL", "TRINITY_SYNC_RAY_ADDRESS"
WORKER_S = 60.0
"""Seconds that the flow worker has at least: on a busy machine, server and Ray use up the rest."""


@dataclass(frozen=True)
class Part:
    """What `status` found out about one part."""

    name: str
    state: Literal["running", "dead", "external", "away", "absent"]
    """Of our own: running or dead; of somebody else's: external if it answers, or away."""
    url: str = ""
    pid: int | None = None
    log: str = ""


@dataclass(frozen=True)
class StackStatus:
    """All parts, and what Prefect says of the work pool."""

    parts: tuple[Part, ...]
    pool: str
    workers_online: int | None
    """None if there is no Prefect server that answers."""
    waiting_runs: int | None
    """Runs of the pool that no worker has taken yet; None as above."""
    problem: str = ""
    """Why the Prefect server does not answer."""
    elsewhere: tuple[str, ...] = ()
    """A sentence for each part in whose place this environment names another."""


def up(
    settings: Settings | None = None,
    *,
    num_cpus: int | None = None,
    object_store_mb: int = 80,
    worker: bool = True,
    timeout_s: float = 180.0,
    joining: StackState | None = None,
) -> StackState:
    """Start what is missing, and return when all of it works.

    A living stack is returned as it is; a part of it that died is started again, the server at its
    old URL. Deployments are applied whenever anything was started.

    Args:
        settings: ``home`` holds database, logs and state file; the worker gets all of them.
        num_cpus: CPUs of the Ray node; all of the machine's by default. Saves take none of them.
        object_store_mb: MB of shared memory for Ray's objects; saves need next to nothing.
        worker: whether to start the flow worker, too.
        timeout_s: seconds that all of it may take; the flow worker, which is last, has 60 of its
            own if less is left.
        joining: the stack of another machine that this one takes part in from now on.

    Raises:
        StackError: a part did not start, or one that was given cannot be reached. What this call
            had started is stopped again.
    """
    settings = settings or Settings()
    patience = Patience(timeout_s)
    with lock_home(settings.home):
        before = now = read_state(settings.home) or StackState()
        if joining:
            if before.daemons:
                raise StackError(
                    f"home {settings.home} has a stack already. Run trinity-sync down first, or "
                    "set TRINITY_SYNC_HOME to a folder of this machine's own"
                )
            now = replace(joining, host=settings.host)
        settings = _where_it_is(settings, now)
        try:
            if now.joined:
                now = _join_ray(settings, now, num_cpus, object_store_mb, patience)
            else:
                now = _start_both(settings, now, num_cpus, object_store_mb)
                if now == before and now.lives and _works(now):
                    return now
                now = _await_both(settings, now, patience)
            moved = any(
                getattr(now, name) != getattr(before, name)
                for name in ("api_url", "ray_address", "ray_auth", "ray")
            )
            if worker and (moved or not before.worker or not before.worker.lives):
                _end(before.worker)
                now = _start_worker(settings, now, patience)
            write_state(settings.home, now)
            write_invitation(settings, now)
        except BaseException:
            for started in (read_state(settings.home), now):
                _stop(started or StackState(), keep=before)
            write_state(settings.home, before)
            raise
    return now


def join(settings: Settings, invitation: Path, **arguments: Any) -> StackState:
    """Have this machine take part in the stack of another one: a Ray node and a flow worker.

    Further ``arguments`` go to `up`, which starts them, now and whenever it is called again.

    Args:
        settings: of this machine; its ``home`` has no stack yet.
        invitation: a copy of `INVITATION` of the other machine's home.

    Raises:
        StackError: as `up`; or there is a stack here, or the file is no invitation.
    """
    try:
        joining = read_invitation(invitation)
    except (OSError, ValueError) as error:
        raise StackError(
            f"{invitation} is no invitation of a stack ({error}). Pass a copy of {INVITATION} in "
            "the home of the stack that this machine is to join"
        ) from error
    return up(settings, joining=joining, **arguments)


def down(settings: Settings | None = None, *, timeout_s: float = 20.0) -> bool:
    """Stop what `up` started, and remove Ray's temporary folder; True if there was anything.

    Only daemons of this stack are ended, known by pid and start time. Database and logs stay in
    ``home``, images that are not saved yet in the spool. May be repeated.
    """
    settings = settings or Settings()
    if find(settings) is None:
        return False
    with lock_home(settings.home):
        state = read_state(settings.home)
        if state:
            _stop(state, timeout_s=timeout_s)
        write_state(settings.home, StackState())
    return state is not None


def status(settings: Settings | None = None) -> StackStatus:
    """How each part is, seen from here and from the Prefect server."""
    settings = settings or Settings()
    state = find(settings) or StackState()
    found = (
        _part("server", state.server, state.api_url or _named_server()),
        _part("ray", state.ray, state.ray_address or settings.ray_address),
        _part("worker", state.worker, ""),
    )
    online = waiting = None
    problem = ""
    if found[0].state in ("running", "external", "away"):
        from trinity_sync.orchestration.prefect_queries import (
            count_waiting_runs,
            open_client,
            read_heartbeats,
        )

        try:
            with open_client(found[0].url, state.api_auth) as client:
                online = len(read_heartbeats(client, settings.work_pool))
                waiting = count_waiting_runs(client, settings.work_pool)
        except StackError as error:
            problem = str(error)
    elsewhere = tuple(_named_elsewhere(state, settings))
    return StackStatus(found, settings.work_pool, online, waiting, problem, elsewhere)


def find(settings: Settings | None = None) -> StackState | None:
    """The stack that `up` left in ``home``, running or not; None if there is none.

    Raises:
        StackError: its state file is damaged, or not this user's alone.
    """
    return read_state((settings or Settings()).home)


@contextmanager
def running(settings: Settings | None = None, **arguments: Any) -> Iterator[StackState]:
    """A stack for the length of a ``with`` block; one that ran before is used and left running.

    Further ``arguments`` go to `up`. The caller's environment is left alone; see
    `StackState.environment` for what to put there.
    """
    settings = settings or Settings()
    before = find(settings)
    ours = before is None or not before.lives
    state = up(settings, **arguments)
    try:
        yield state
    finally:
        if ours:
            down(settings)


def _end(part: Daemon | None) -> None:
    """End a part before the next one of its kind, and all that it has left if it was killed.

    Ray's workers outlive a raylet that was killed, and ask the next one, at the same address, for
    their place again and again: six of them took a core and a half.
    """
    if part:
        daemon.stop(part, 15.0)


def _where_it_is(settings: Settings, state: StackState) -> Settings:
    """The settings, with the host at which the stack has been reached so far, if there is one.

    Raises:
        StackError: they name another, or none at which a machine can be reached.
    """
    if settings.host in ("0.0.0.0", "::"):
        raise StackError(
            f"TRINITY_SYNC_HOST is {settings.host}, where other machines would look for the stack "
            "on themselves. Set it to an address of this one; hostname -I lists them"
        )
    if not state.host:
        return settings
    if settings.host not in (state.host, Settings.model_fields["host"].default):
        raise StackError(
            f"TRINITY_SYNC_HOST is {settings.host}, but the stack in {settings.home} is reached at "
            f"{state.host}. Unset it, or run trinity-sync down first"
        )
    return settings.model_copy(update={"host": state.host})


def _start_both(
    settings: Settings, before: StackState, num_cpus: int | None, object_store_mb: int
) -> StackState:
    """Start server and Ray node, unless they run or are given."""
    now = before if before.daemons else read_last_addresses(settings.home)
    url = _given(API_URL, _named_server(), before.server, before.api_url, settings)
    address = _given(RAY_ADDRESS, settings.ray_address, before.ray, before.ray_address, settings)
    if url:
        now = replace(now, api_url=url)
    elif not before.server or not before.server.lives:
        _end(before.server)
        now = services.start_server(settings, now)
        _note(settings.home, now)
    if address:
        now = replace(now, ray_address=address)
    elif not before.ray or not before.ray.lives:
        _end(before.ray)
        now = services.start_ray(settings, now, num_cpus=num_cpus, object_store_mb=object_store_mb)
        _note(settings.home, now)
    return now


def _join_ray(
    settings: Settings,
    before: StackState,
    num_cpus: int | None,
    object_store_mb: int,
    patience: Patience,
) -> StackState:
    """Start a Ray node of another machine's cluster, unless it runs."""
    for what, there in (("Prefect server", before.api_url), ("Ray cluster", before.ray_address)):
        if not services.accepts_connections(there):
            raise StackError(
                f"the {what} of the stack that this machine has joined does not answer at {there}. "
                f"Start that stack, or leave it (trinity-sync down) and join with its {INVITATION} "
                "of now"
            )
    if before.ray and before.ray.lives:
        return before
    _end(before.ray)
    now = services.join_ray(settings, before, num_cpus=num_cpus, object_store_mb=object_store_mb)
    _note(settings.home, now)
    ray = now.ray
    assert ray is not None  # just started
    daemon.await_ready("the Ray node", ray, lambda: services.ray_has_joined(ray), patience)
    return now


def _works(state: StackState) -> bool:
    return bool(state.server and state.ray and state.worker) and services.server_answers(state)


def _await_both(settings: Settings, state: StackState, patience: Patience) -> StackState:
    """Until server and Ray work and the deployments are there; returns their final URLs."""
    if state.server:
        daemon.await_ready(
            "the Prefect server", state.server, lambda: services.server_answers(state), patience
        )
    _deploy(settings, state, patience)
    if state.ray:
        daemon.await_ready(
            "the Ray node", state.ray, lambda: bool(services.ray_answers(state)), patience
        )
        return replace(state, ray_address=services.ray_answers(state) or "")
    return state


def _deploy(settings: Settings, state: StackState, patience: Patience) -> None:
    """Apply prefect.yaml in a process of its own.

    The caller may be a user's script, with a ``flows`` and ``tasks`` of its own; and it must not
    have imported Ray before it knows the token of the stack's.
    """
    command = [sys.executable, "-m", "trinity_sync.cli", "deploy"]
    env = services.environment(settings, state)
    try:
        with patience.spent_on("the deployments"):
            done = subprocess.run(
                command,
                env=env,
                cwd=settings.home,
                capture_output=True,
                text=True,
                errors="replace",  # libraries write what they are given
                timeout=patience.left,
            )
    except subprocess.TimeoutExpired:
        raise StackError(
            f"the deployments were not registered at {state.api_url} in time "
            f"({patience.in_words()}); look at that server, or try again with a longer time-out."
        ) from None
    if done.returncode:
        raise StackError(done.stderr.strip().removeprefix("trinity-sync: "))


def _start_worker(settings: Settings, state: StackState, patience: Patience) -> StackState:
    from trinity_sync.orchestration.prefect_queries import open_client, read_heartbeats

    with open_client(state.api_url, state.api_auth) as client:
        before = read_heartbeats(client, settings.work_pool).keys()

        def is_online() -> bool:  # each start has a name of its own
            return bool(read_heartbeats(client, settings.work_pool).keys() - before)

        state = services.start_worker(settings, state)
        _note(settings.home, state)
        assert state.worker is not None  # just started
        daemon.await_ready(
            "the flow worker", state.worker, is_online, patience, at_least_s=WORKER_S
        )
    return state


def _stop(state: StackState, *, keep: StackState | None = None, timeout_s: float = 20.0) -> None:
    """Stop the daemons of ``state`` that are not in ``keep``."""
    for part in state.daemons:
        if keep is None or part not in keep.daemons:
            daemon.stop(part, timeout_s)
    if keep is None or state.ray_folder != keep.ray_folder:
        services.remove_ray_folder(state)


def _named_server() -> str:
    return os.environ.get(API_URL, "")


def _given(
    variable: str, value: str, own: Daemon | None, url: str, settings: Settings
) -> str | None:
    """What a variable says to use instead of a part of our own.

    Raises:
        StackError: nothing answers there, or there is one of our own that is another.
    """
    if value and own and value != url:
        raise StackError(
            f"{variable} is {value}, but the stack in {settings.home} has one of its own at {url}. "
            f"Unset {variable}, or run trinity-sync down first."
        )
    if not value or own:
        return None
    if not services.accepts_connections(value):
        raise StackError(
            f"nothing answers at {variable}={value}. Start it there, or unset {variable} to have "
            "one started here."
        )
    return value


def _named_elsewhere(state: StackState, settings: Settings) -> Iterator[str]:
    """What is started from this environment uses instead of the stack's parts."""
    for variable, named, url in (
        (API_URL, _named_server(), state.api_url),
        (RAY_ADDRESS, settings.ray_address, state.ray_address),
    ):
        if url and named and named.rstrip("/") != url:
            yield (
                f"{variable} is {named}, so what is started from here uses that and not this "
                f"stack, whose is {url}. Unset it, or run trinity-sync down."
            )


def _part(name: str, process: Daemon | None, url: str) -> Part:
    if process:
        return Part(name, "running" if process.lives else "dead", url, process.pid, process.log)
    if not url:
        return Part(name, "absent")
    return Part(name, "external" if services.accepts_connections(url) else "away", url)


def _note(home: Path, state: StackState) -> None:
    """Write down what was just started; what cannot be written down is stopped again."""
    try:
        write_state(home, state)
    except BaseException:
        _stop(state, keep=read_state(home) or StackState())
        raise
