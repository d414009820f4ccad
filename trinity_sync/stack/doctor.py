"""Is everything in place for saves on this node? Each answer says what to do where it is not.

Nothing is changed. What concerns one job is in `doctor_job`.
"""

import importlib.metadata
import os
import pwd
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from packaging.requirements import Requirement

from trinity_sync.errors import StackError, TicketError
from trinity_sync.fs.mounts import find_mount
from trinity_sync.orchestration.deploy import deployments
from trinity_sync.orchestration.prefect_queries import compute_clock_skew
from trinity_sync.settings import Settings
from trinity_sync.snapshot.spool import JobSpool, list_job_spools
from trinity_sync.stack import embedded, services
from trinity_sync.stack.doctor_job import Check, check_root

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

STALE_S = 600.0
SKEW_S = 5.0
PLANNED_WITHIN_S = 120.0
"""Seconds after which a server has planned the runs of a new schedule; its loop takes 60."""
SYSTEM_UID_MAX = 999
LINGERING = Path("/var/lib/systemd/linger")
REMOVES_IPC = [
    *("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "RemoveIPC"),
]
"""Prints the setting of the running systemd-logind, whose default a distribution may change."""


def run_checks(
    settings: Settings, root: Path | None = None, *, clock: Callable[[], float] = time.time
) -> Iterator[Check]:
    """All checks, each as soon as it is known.

    Args:
        settings: those of this process's environment.
        root: a job to look at, too.
        clock: seconds since the epoch.
    """
    yield from _python()
    yield from _packages()
    yield from _server(settings, clock)
    yield _ray(settings)
    yield from _spool(settings.spool, clock)
    if root is not None:
        yield from check_root(root, settings)


# -------------------------------------------------------------------- this process


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 10) <= sys.version_info[:2] <= (3, 12)
    todo = "" if good else "use Python 3.10, 3.11 or 3.12"
    yield Check("python", "ok" if good else "fail", version, todo)


def _packages() -> Iterator[Check]:
    try:
        wanted = importlib.metadata.requires("trinity-sync") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            "packages",
            "warn",
            "trinity-sync is imported from a folder, so its requirements are not known",
            "pip install it, which also checks them",
        )
        return
    yield packages_check(wanted)


def packages_check(wanted: list[str]) -> Check:
    """Whether what is installed is in the ranges of the requirements of client and stack."""
    wrong, right = [], 0
    for requirement in map(Requirement, wanted):
        if requirement.marker and not requirement.marker.evaluate({"extra": "stack"}):
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
        todo = "pip install these versions, or trinity-sync again, which brings them"
        return Check("packages", "fail", "; ".join(wrong), todo)
    return Check("packages", "ok", f"{right} in the supported ranges")


# -------------------------------------------------------------------- Prefect and Ray


def _server(settings: Settings, clock: Callable[[], float]) -> Iterator[Check]:
    import prefect
    from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
    from prefect.exceptions import ObjectNotFound

    from trinity_sync.orchestration.prefect_queries import (
        count_waiting_runs,
        open_client,
        read_heartbeats,
    )

    state = embedded.find(settings)
    url = os.environ.get("PREFECT_API_URL") or (state.api_url if state else None)
    try:
        with open_client(url) as client:
            before = clock()
            answer = client.request("GET", "/admin/version")
            after = clock()
            version = answer.json()
            same = str(version).split(".")[0] == prefect.__version__.split(".")[0]
            yield Check(
                "prefect server",
                "ok" if same else "warn",
                f"version {version} at {client.api_url}; the client's is {prefect.__version__}",
                "" if same else "run a server of the client's major version",
            )
            yield _skew(answer.headers.get("date"), before, after)
            try:
                pool = client.read_work_pool(settings.work_pool)
            except ObjectNotFound:
                found = f"there is no work pool {settings.work_pool}"
                yield Check("work pool", "fail", found, "run: trinity-sync deploy")
                return
            paused = " and paused: resume it in the Prefect UI" if pool.is_paused else ""
            ours = WorkPoolFilter(name=WorkPoolFilterName(any_=[pool.name]))
            there = client.read_deployments(work_pool_filter=ours)
            deployed = {deployment.name for deployment in there}
            missing = [e["name"] for e in deployments() if e["name"] not in deployed]
            yield Check(
                "work pool",
                "fail" if paused or missing else "ok",
                f"{pool.name} of type {pool.type}{paused}"
                + (f"; not deployed: {', '.join(missing)}" if missing else ""),
                "run: trinity-sync deploy" if missing else paused.partition(": ")[2],
            )
            yield _schedules(client, there, clock)
            online, waiting = (
                read_heartbeats(client, pool.name),
                count_waiting_runs(client, pool.name),
            )
            yield Check(
                "worker",
                "ok" if online else "fail",
                f"{len(online)} online, {waiting} runs wait for one",
                "" if online else "run: trinity-sync up, or trinity-sync worker on each node",
            )
    except (StackError, httpx.HTTPError, ValueError) as error:
        todo = "run: trinity-sync up, or correct PREFECT_API_URL"
        yield Check("prefect server", "fail", str(error), todo)


def _schedules(
    client: "SyncPrefectClient",
    deployments: "list[DeploymentResponse]",
    clock: Callable[[], float],
) -> Check:
    """Whether the server plans the runs that the schedules ask for."""
    planned = [
        each
        for each in deployments
        if any(schedule.active for schedule in each.schedules)
        and each.updated
        and clock() - each.updated.timestamp() > PLANNED_WITHIN_S
    ]
    if not planned:
        return Check("schedules", "ok", "no flow has had an active one for long")
    ids = [each.id for each in planned]
    coming = {run.deployment_id for run in client.get_scheduled_flow_runs_for_deployments(ids)}
    silent = sorted(each.name for each in planned if each.id not in coming)
    if not silent:
        return Check("schedules", "ok", f"{len(planned)} flows have runs ahead of them")
    return Check(
        "schedules",
        "fail",
        f"no run is ahead of {', '.join(silent)}, although their schedules are active",
        "look for errors of the scheduler in the Prefect server's log, and at its SQLAlchemy "
        "(Prefect 3.8 needs one below 2.1)",
    )


def _skew(date: str | None, before: float, after: float) -> Check:
    """The server's clock, to the second, against this node's."""
    if not date:
        return Check("clock", "ok", "the server does not tell the time")
    skew = abs(compute_clock_skew(date, before, after))
    if skew <= SKEW_S:
        return Check("clock", "ok", "as the server's")
    found = f"{skew:.0f} s off the server's; leases, and ages in reports, go by this clock"
    return Check("clock", "warn", found, "synchronize the clocks (NTP)")


def _ray(settings: Settings) -> Check:
    state = embedded.find(settings)
    address = settings.ray_address or (state.ray_address if state else "")
    if not address:
        return Check("ray", "fail", "no cluster is known", "run: trinity-sync up")
    if not services.accepts_connections(address):
        todo = "start it there, or correct TRINITY_SYNC_RAY_ADDRESS"
        return Check("ray", "fail", f"nothing answers at {address}", todo)
    return Check("ray", "ok", f"something listens at {address}")


# -------------------------------------------------------------------- shared memory


def _spool(spool: Path, clock: Callable[[], float]) -> Iterator[Check]:
    if not spool.exists():
        good = os.access(spool.parent, os.W_OK | os.X_OK)
        todo = "" if good else "set TRINITY_SYNC_SPOOL to a folder in memory that can be written"
        found = f"{spool} is not there yet; {'a save makes it' if good else 'it cannot be made'}"
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
    room = os.statvfs(spool)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    kind = find_mount(spool).kind
    yield Check(
        "spool",
        "ok" if kind in ("tmpfs", "ramfs") else "warn",
        f"{spool} on {kind}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free",
        "" if kind in ("tmpfs", "ramfs") else "set TRINITY_SYNC_SPOOL to a folder in memory",
    )
    if check := logout_check(spool, os.getuid()):
        yield check
    yield from (_tickets(job, clock) for job in list_job_spools(spool))


def logout_check(spool: Path, uid: int, lingering: Path = LINGERING) -> Check | None:
    """A warning if systemd removes the spool when the user logs out (``RemoveIPC``).

    systemd-logind removes all files of the user in ``/dev/shm`` once the last session has ended,
    whatever still runs. It spares system users, and users that linger.

    Args:
        spool: the node's spool.
        uid: of its user.
        lingering: systemd's folder with a file for each user that lingers.
    """
    if uid <= SYSTEM_UID_MAX or not spool.resolve().is_relative_to("/dev/shm"):
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
        said = subprocess.run(REMOVES_IPC, capture_output=True, text=True, timeout=5).stdout
    except (KeyError, OSError, subprocess.SubprocessError):
        return None  # no systemd runs here, or it does not know the user
    if said.strip() != "b true" or (lingering / user).exists():
        return None
    return Check(
        "spool at logout",
        "warn",
        f"systemd removes {spool} when the last session of {user} ends (RemoveIPC=yes), with the "
        "images that are not saved yet",
        f"run: loginctl enable-linger {user}; or set RemoveIPC=no in /etc/systemd/logind.conf and "
        "run: systemctl restart systemd-logind",
    )


def _tickets(job: JobSpool, clock: Callable[[], float]) -> Check:
    sealed, bad = job.tickets()
    name = f"images of {job.folder.name}"
    stale = [s.ticket for s in sealed if clock() - s.ticket.sealed_at > STALE_S]
    if torn := [error for error in bad if isinstance(error, TicketError)]:
        return Check(name, "fail", str(torn[0]), "remove that ticket")
    if bad:
        return Check(name, "fail", str(bad[0]), "the images stay in memory until then")
    if sealed and (job.root is None or not job.root.is_dir()):
        found = f"{len(sealed)} wait for the job at {job.root or 'a root unknown'}, which is gone"
        todo = f"bring the job's folder back, or let go of its images: rm -r {job.folder}"
        return Check(name, "warn", found, todo)
    if stale:
        steps = sorted({ticket.step for ticket in stale})
        found = f"{len(stale)} of steps {steps} wait for more than {STALE_S / 60:.0f} minutes"
        return Check(name, "warn", found, "look at their flow runs, and whether a worker runs here")
    return Check(name, "ok", f"{len(sealed)} wait to be saved")
