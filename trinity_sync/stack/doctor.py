"""Checks of `trinity-sync doctor`: whether saves can work on this node, and what to do if not.

The checks change nothing. Those of one job are in `doctor_job`. A check that fails in an unexpected
way is a failed check. Prefect is not imported, so that a version of it that is not supported stops
no check.
"""

import importlib.metadata
import os
import pwd
import shutil
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from packaging.requirements import Requirement

from trinity_sync.client.prefect_api import PrefectApi, ask_server
from trinity_sync.client.saver_control import LOG, UNREQUESTED
from trinity_sync.errors import PrefectApiError, StackError
from trinity_sync.fs.file_system import find_mount
from trinity_sync.orchestration.package_paths import find_missing_deployments
from trinity_sync.orchestration.quantities import format_bytes
from trinity_sync.settings import Settings, StackSettings
from trinity_sync.snapshot.spool import JobSpool, sort_job_spools
from trinity_sync.stack import list_missing_packages, local_stack, services, state_file
from trinity_sync.stack.doctor_job import Check, check_root
from trinity_sync.stack.services import StackState

STALE_S = 600.0
SKEW_S = 5.0
SYSTEM_UID_MAX = 999
CLEANED = "/tmp", "/var/tmp"
LINGERING = Path("/var/lib/systemd/linger")
REMOVES_IPC = [
    *("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "RemoveIPC"),
]
"""Command that prints the setting of the running systemd-logind."""


def run_checks(settings: Settings, root: Path | None = None) -> Iterator[Check]:
    """Run all checks, also those of a job if its root is given; yield each result once known."""
    state = state_file.read_state(settings.home)
    yield from _guard("settings", lambda: [_check_settings(state)])
    stack = local_stack.read_running_settings(state) or StackSettings()
    yield from _guard("packages", lambda: [_check_installation()])
    is_alone = not local_stack.uses_stack(settings, stack)
    if is_alone:
        yield Check("stack", "ok", "not used: savers commit all saves")
    else:
        yield from _guard("prefect server", lambda: _check_server(settings, stack))
        if not list_missing_packages():
            own = state or StackState()
            yield from (problems := [*_guard("services", lambda: _check_services(own))])
            if not problems:
                yield from _guard("ray", lambda: _check_ray(settings, stack, own))
                yield from _guard("access", lambda: _check_access(stack, own))
    yield from _guard("saver", lambda: _check_savers(settings, is_alone))
    if not is_alone:
        yield from _guard("home", lambda: _check_home(settings.home))
    yield from _guard("spool", lambda: _check_spool(settings.spool))
    if root is not None:
        yield from _guard("root", lambda: check_root(root, settings))


def _guard(name: str, run: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield the results of checks, and a failed check for an exception."""
    try:
        yield from run()
    except Exception as error:
        found = f"cannot be checked: {type(error).__name__}: {error}"
        yield Check(name, "fail", found, "correct what the checks above name, packages above all")


# -------------------------------------------------------------------- this process


def _check_settings(state: StackState | None) -> Check:
    """Compare the settings of a running stack with those of the file and the environment."""
    if local_stack.read_running_settings(state) is None:
        return Check("settings", "ok", "valid; no stack runs here")
    assert state is not None
    if changed := local_stack.find_changes(state):
        found = f"differ from those of the running stack: {'; '.join(changed)}"
        return Check("settings", "warn", found, "apply them: trinity-sync restart")
    return Check("settings", "ok", "are those of the running stack")


def _check_installation() -> Check:
    try:
        requirements = importlib.metadata.requires("trinity-sync") or []
    except importlib.metadata.PackageNotFoundError:
        return Check(
            "packages",
            "warn",
            "trinity-sync is imported from a folder, so its requirements are unknown",
            "install it with pip, which also checks them",
        )
    return check_packages(requirements)


def check_packages(requirements: list[str]) -> Check:
    """Check the installed packages against the requirements of client and stack."""
    wrong, right = [], 0
    extra = "" if list_missing_packages() else "stack"
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            right += 1
        else:
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        todo = "install these versions with pip, or trinity-sync again, which requires them"
        return Check("packages", "fail", "; ".join(wrong), todo)
    return Check("packages", "ok", f"{right} in the supported ranges")


# -------------------------------------------------------------------- Prefect and Ray


def _check_server(settings: Settings, stack: StackSettings) -> list[Check]:
    found: list[Check] = []

    async def ask(api: PrefectApi) -> None:
        async for check in _ask_server(api, stack.worker.pool):
            found.append(check)

    try:
        ask_server(settings, ask)
    except PrefectApiError as error:
        why, _, todo = str(error).partition(". ")
        found.append(Check("prefect server", "fail", why, todo))
    return found


async def _ask_server(api: PrefectApi, pool: str) -> AsyncIterator[Check]:
    version = own = await api.read_version()
    with suppress(importlib.metadata.PackageNotFoundError):  # a trainer's environment has none
        own = importlib.metadata.version("prefect")
    is_same = version.split(".")[0] == own.split(".")[0]
    yield Check(
        "prefect server",
        "ok" if is_same else "warn",
        f"version {version} at {api.find_server().ui_url}/api" + f"; here: {own}" * (not is_same),
        "" if is_same else "run a server of the client's major version",
    )
    yield _check_clock(api.clock_skew)
    found = await api.read_work_pool(pool)
    if found is None:
        yield Check(
            "work pool", "fail", f"there is no work pool {pool}", "run: trinity-sync deploy"
        )
        return
    paused = await api.list_paused(pool)
    missing = await find_missing_deployments(api, pool)
    yield Check(
        "work pool",
        "fail" if paused or missing else "ok",
        f"{pool} of type {found['type']}"
        + (f"; paused: {', '.join(paused)}" if paused else "")
        + (f"; not deployed: {', '.join(missing)}" if missing else ""),
        "run: trinity-sync deploy" if missing else "resume it in the Prefect UI" if paused else "",
    )
    online, waiting = await api.read_workers(pool), await api.count_waiting_runs(pool)
    yield Check(
        "worker",
        "ok" if online else "fail",
        f"{len(online)} online, {waiting} runs waiting",
        "" if online else "run: trinity-sync up, or trinity-sync worker on each node",
    )


def _check_services(state: StackState) -> Iterator[Check]:
    problems = {"dead": "has ended", "unresponsive": "does not answer", "unknown": "is elsewhere"}
    for name in local_stack.NAMES:
        each = local_stack.check_service(state, name)
        if why := problems.get(each.state):
            found = f"process {each.pid}, which up started, {why}; its log: {each.log}"
            where = " where it was started" * (each.state == "unknown")
            yield Check(f"{name} of this machine", "fail", found, f"run: trinity-sync up{where}")


def _check_clock(skew: float) -> Check:
    """Check the server's clock by that of this node, to the second."""
    if abs(skew) <= SKEW_S:
        return Check("clock", "ok", "agrees with the server's")
    found = f"{abs(skew):.0f} s off the server's; leases and the ages in reports use this clock"
    return Check("clock", "warn", found, "synchronize the clocks (NTP)")


def _check_ray(settings: Settings, stack: StackSettings, state: StackState) -> Iterator[Check]:
    state = state.with_external("", stack.ray.address)
    address = state.ray_address
    if not address:
        yield Check("ray", "fail", "no cluster is known", "run: trinity-sync up")
    elif not services.accepts_connections(address):
        todo = "start it there, or correct address in [ray]"
        yield Check("ray", "fail", f"nothing answers at {address}", todo)
    elif why := services.try_task(settings, stack, state):
        todo = "run: trinity-sync restart" if state.ray else "start it again there"
        yield Check("ray", "fail", f"runs no task at {address}: {why}", todo)
    else:
        yield Check("ray", "ok", f"has run a task at {address}")


def _check_access(stack: StackSettings, state: StackState) -> Iterator[Check]:
    """Check that server and Ray cluster refuse connections without credentials."""
    try:
        if refused := services.require_refusals(stack, state):
            found = f"refused without credentials by {' and '.join(refused)}"
            yield Check("access", "ok", found)
    except StackError as error:
        found, _, todo = str(error).partition(". ")
        yield Check("access", "fail", found, todo)
    address = stack.ray.address
    if ":" in address and services.accepts_connections(address) and services.accepts_calls(address):
        yield Check(
            "access",
            "warn",
            f"the Ray cluster at {address} accepts connections without a token, so whoever reaches "
            "it can run code as its user",
            "start it with RAY_AUTH_MODE=token, or let no one else reach it",
        )


def _check_savers(settings: Settings, is_alone: bool) -> Iterator[Check]:
    """Check that a saver lives where saves wait for one, and how the last one has ended."""
    for each in local_stack.check_savers(settings, is_alone=is_alone):
        found = f"process {each.pid}" if each.pid else "none lives, the next save starts one"
        found += " does not answer" * (each.state == "unresponsive") + f"; its log: {each.log}"
        is_wrong = each.state in ("dead", "unresponsive")
        todo = "start the training again; or see: trinity-sync status" * is_wrong
        yield Check("saver", "fail" if is_wrong else "ok", found, todo)
    with suppress(OSError):
        last = (settings.home / LOG).read_text(errors="replace").rstrip().rpartition("\n")[2]
        if last and not last[:4].isdigit():  # a traceback, which no saver has logged
            yield Check("last saver", "warn", f"has ended: {last}", "correct that; see its log")


def _check_home(home: Path) -> Iterator[Check]:
    """Check the room for server and logs; warn of a home from which old files are removed."""
    if lack := local_stack.describe_lack_of_room(home):
        found, _, todo = lack.partition(". ")
        yield Check("home", "fail", found, f"{todo}; saves go on until then")
    cleaned = [each for each in CLEANED if home.resolve().is_relative_to(each)]
    if cleaned and home.is_dir():
        found = (
            f"{home} is in {cleaned[0]}, where old files are removed: a worker keeps those of a "
            "running stack, and nothing keeps the database and the password of a stopped one"
        )
        yield Check("home", "warn", found, "set TRINITY_SYNC_HOME to a local folder elsewhere")


# -------------------------------------------------------------------- shared memory


def _check_spool(spool: Path) -> Iterator[Check]:
    if not spool.exists():
        good = os.access(spool.parent, os.W_OK | os.X_OK)
        todo = "" if good else "set TRINITY_SYNC_SPOOL to a writable folder in memory"
        found = f"{spool} does not exist yet; {'a save makes it' if good else 'it cannot be made'}"
        yield Check("spool", "ok" if good else "fail", found, todo)
        return
    mode = spool.lstat()
    wrong = ""
    if not stat.S_ISDIR(mode.st_mode) or mode.st_uid != os.getuid():
        wrong = f"{spool} is not a folder of this user"
    elif mode.st_mode & 0o077:
        wrong = f"{spool} is open to other users"
    if wrong:
        todo = f"run: chmod 700 {spool}; or set TRINITY_SYNC_SPOOL to a folder of your own"
        yield Check("spool", "fail", wrong, todo)
        return
    room = shutil.disk_usage(spool)
    kind = find_mount(spool).kind
    yield Check(
        "spool",
        "ok" if kind in ("tmpfs", "ramfs") else "warn",
        f"{spool} on {kind}, {room.free / 1e9:.1f} of {room.total / 1e9:.1f} GB free",
        "" if kind in ("tmpfs", "ramfs") else "set TRINITY_SYNC_SPOOL to a folder in memory",
    )
    if check := check_logout(spool, os.getuid()):
        yield check
    jobs, refused = sort_job_spools(spool)
    yield from map(_check_tickets, jobs)
    for error in refused:
        todo = "the images stay in memory until then"
        yield Check("images of another release", "fail", str(error), todo)


def check_logout(spool: Path, uid: int, lingering: Path = LINGERING) -> Check | None:
    """Return a warning if systemd removes the spool when the user logs out (``RemoveIPC``).

    systemd-logind removes all files of a user in ``/dev/shm`` when the last session ends, except
    those of system users and lingering users. Each of the latter has a file in ``lingering``.
    """
    if uid <= SYSTEM_UID_MAX or not spool.resolve().is_relative_to("/dev/shm"):
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
        said = subprocess.run(REMOVES_IPC, capture_output=True, text=True, timeout=5).stdout
    except (KeyError, OSError, subprocess.SubprocessError):
        return None  # no systemd here, or an unknown user
    if said.strip() != "b true" or (lingering / user).exists():
        return None
    return Check(
        "spool at logout",
        "warn",
        f"systemd removes {spool} when the last session of {user} ends (RemoveIPC=yes), including "
        "images that are not persisted yet",
        f"run: loginctl enable-linger {user}; or set RemoveIPC=no in /etc/systemd/logind.conf and "
        "run: systemctl restart systemd-logind",
    )


def _check_tickets(job: JobSpool) -> Check:
    sealed, bad = job.tickets()
    name = f"images of {job.folder.name}"
    stale = [s.ticket for s in sealed if time.time() - s.ticket.sealed_at > STALE_S]
    if bad:
        return Check(name, "fail", str(bad[0]), "remove that ticket")
    root = job.read_root()
    if sealed and (root is None or not root.is_dir()):
        found = f"{len(sealed)} wait for the job at {root or 'an unknown root'}, which is gone"
        todo = f"restore the job's folder, or delete its images: rm -r {job.folder}"
        return Check(name, "warn", found, todo)
    with suppress(OSError):
        why = (job.folder / UNREQUESTED).read_text() if sealed else ""
        if why:
            todo = "repair that: they are committed then"
            return Check(name, "warn", f"{len(sealed)} wait to be persisted: {why}", todo)
    if stale:
        steps = sorted({ticket.step for ticket in stale})
        found = (
            f"{len(stale)} of steps {steps} have waited for more than {STALE_S / 60:.0f} minutes"
        )
        return Check(name, "warn", found, "see: trinity-sync status")
    failed = sum(image.failed for image in sealed)
    found = f"{format_bytes(job.bytes_used)} in memory, {len(sealed) - failed} wait to be persisted"
    found += f", {failed} are of failed saves" * bool(failed)
    return Check(name, "ok", found)
